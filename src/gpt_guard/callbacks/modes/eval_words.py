"""What EvalModeAssert says of an evaluation in training mode, and how it names a call of `.train()` or `.eval()`."""

from __future__ import annotations

from dataclasses import dataclass

from gpt_guard.callbacks.modes.mode_sensitive import Sensitive, described
from gpt_guard.catalogue import finding
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Severity, SourceLine

ONE_BY_ONE = (
    "The model itself is in eval mode; these modules were put back, and nothing around them: that seems to be meant."
)
EACH_STEP = (
    "Each step from the first on has such a forward: it seems to be part of the algorithm, as pseudo-labels are."
)


Who = tuple[str, SourceLine | None]
"""The module that `.train()` or `.eval()` was called on, and the line."""


@dataclass
class Suspicion:
    """A forward without gradients while modules were in training mode, not yet known to be an evaluation."""

    modules: list[Sensitive]
    step: int
    where: SourceLine | None
    calls: int = 1
    inside: bool = False


def evaluated_in_training(watch: Watch, known: Suspicion, sensitive: int, *, why: str = "") -> Finding:
    """GG501; `why` tells that it seems to be meant, and makes it information."""
    first = known.modules[0]
    statistics = [each for each in known.modules if each.buffers]
    who = watch.modes.who(training=True, of=first.path)
    place = " inside of guardian.evaluating()" if known.inside else ""
    seen = (
        f"The model was evaluated (a forward without gradients){place} with {len(known.modules)} of {sensitive} "
        f"mode-sensitive modules in training mode ({described(known.modules)})."
    )
    if statistics:
        whose = f"of {len(statistics)} of them" if len(known.modules) > 1 else "of it"
        seen += f" The forward also changed the running statistics {whose}."
    on = "them" if len(known.modules) > 1 else "it"
    nobody = "" if known.inside else f" Nobody called .eval() on {on} since watching began."
    seen += f" {why}" if why else f" {call('train', who)}" if who else nobody
    return finding(
        "GG501",
        seen,
        likely=["on_purpose"] if why else ["train_called"] if who or known.inside else ["eval_forgotten"],
        severity=Severity.INFO if why else Severity.WARNING,
        step=known.step,
        moment=Moment.FORWARD,
        evaluation=True,
        module=first.path,
        module_class=type(first.module).__name__,
        where=known.where,
        # Not the same trouble as one that is not meant: that is said although this was.
        cause_id=why or None,
        evidence={
            "modules": [each.path for each in known.modules[:50]],
            "count": len(known.modules),
            "statistics_changed": len(statistics),
        },
        guard="EvalModeAssert",
    )


def trained_in_eval(
    code: str, step: int, off: list[Sensitive], sensitive: int, story: str, likely: list[str], who: Who | None
) -> Finding:
    """GG502, GG503 or GG504: a training step with these modules in eval mode, and how that came."""
    return finding(
        code,
        f"Training step with {len(off)} of {sensitive} mode-sensitive modules in eval mode ({described(off)}). {story}",
        likely=likely,
        step=step,
        moment=Moment.AFTER_BACKWARD,
        module=off[0].path,
        module_class=type(off[0].module).__name__,
        where=who[1] if who else None,
        cause_id=f"{code} {who[1] if who else ''}" if code != "GG504" else f"{code} {off[0].path}",
        evidence={"modules": [each.path for each in off[:50]], "count": len(off)},
    )


def call(method: str, who: Who) -> str:
    """Which call set a mode, and where."""
    path, line = who
    target = f"model.{path}.{method}()" if path else f"model.{method}()"
    where = f" in `{line.function}` ({line.file}:{line.line})" if line else ""
    return f"{target} was called{where}."
