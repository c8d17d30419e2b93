"""Forwards without gradients while modules are in training mode: an evaluation, or a part of the training step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gpt_guard.callbacks.modes.sensitive import (
    Sensitive,
    cumulative_norms,
    described,
    recomputing_statistics,
    set_one_by_one,
)
from gpt_guard.catalogue import finding
from gpt_guard.hooks.frames import user_line
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Severity, SourceLine

_ONE_BY_ONE = (
    "The model itself is in eval mode; these modules were put back, and nothing around them: that seems to be meant."
)
_EACH_STEP = (
    "Each step from the first on has such a forward: it seems to be part of the algorithm, as pseudo-labels are."
)
# One for each augmented view of the unlabelled batch: FixMatch (Sohn et al. 2020) takes one, MixMatch (Berthelot et al.
# 2019) two. More in a row are a validation set or a sampled text.
_VIEWS = 2
_ENOUGH_STEPS = 3


@dataclass
class Suspicion:
    """A forward without gradients while modules were in training mode, not yet known to be an evaluation."""

    modules: list[Sensitive]
    step: int
    where: SourceLine | None
    inside: bool
    calls: int = 1


class NoGradForwards:
    """Tells evaluations in training mode (GG501) from forwards that belong to a training step.

    What is suspected before a backward of another model was sampled for that one. What each step has alike is part of
    the algorithm: it is held back until a step shows otherwise.
    """

    def __init__(self) -> None:
        self._sensitive = 0
        self._cumulative: set[str] = set()
        self._suspected: Suspicion | None = None
        self._held: Suspicion | None = None
        self._rhythm = Rhythm()
        self._in_backward = False
        self._backwards = 0
        self._meant: set[str] = set()

    def look_at(self, modules: Sequence[Sensitive]) -> None:
        """Take the modules whose mode matters, as they are outside of any evaluation."""
        self._sensitive = len(modules)
        self._cumulative = cumulative_norms(modules)

    def forward_begins(self) -> None:
        """The model is called, in whatever way."""
        if self._in_backward:
            # The last backward never came back to this model: what was sampled before it was for another one.
            self._in_backward = False
            self.forget()

    def forget(self) -> None:
        """What ran since the last step was for something else."""
        self._suspected = None
        self._rhythm.calls = 0

    def suspect(self, watch: Watch, training: list[Sensitive]) -> None:
        """The model is called without gradients, with these modules in training mode."""
        if recomputing_statistics(training, self._cumulative):
            return
        if (meant := set_one_by_one(watch.model)) or watch.evaluating:
            self._report(watch, _suspicion(watch, training), why=_ONE_BY_ONE if meant else "")
            return
        self._rhythm.calls += 1
        if self._suspected is None:
            self._suspected = _suspicion(watch, training)
        else:
            self._suspected.calls += 1
        known = self._suspected
        in_a_row = known.calls > 1 and not self._rhythm.holds(known.calls)
        if in_a_row or not watch.optimizers or torch.is_grad_enabled():
            self._suspected = None
            self._report(watch, known)

    def before_backward(self) -> None:
        """A backward begins, of this model or another."""
        if self._in_backward:
            self.forget()
        self._in_backward = True

    def after_backward(self, watch: Watch) -> None:
        """A backward of this model is over."""
        self._in_backward = False
        self._backwards += 1
        self._rhythm.backwards += 1
        known, self._suspected = self._suspected, None
        if known is None:
            return
        if not self._rhythm.holds(known.calls):
            self._report(watch, known)
        elif self._held is None or self._held.step < known.step:
            self._held = known

    def step(self, watch: Watch) -> None:
        """A step is judged: what was held back is reported once one shows that it is no part of each."""
        broken = self._rhythm.step()
        if broken and self._held is not None:
            self._report(watch, self._held)
        if not self._rhythm.usual:
            self._held = None

    def finish(self, watch: Watch) -> None:
        """The run is over: nothing more will tell what the last ones were for."""
        known, rhythm = self._suspected, self._rhythm
        if known is not None and not self._in_backward and (self._backwards or known.calls > 1):
            self._report(watch, known)
        elif self._held is not None and (rhythm.kept or rhythm.suspicious):
            self._report(watch, self._held, why=_EACH_STEP if rhythm.kept else "")

    def _report(self, watch: Watch, known: Suspicion, why: str = "") -> None:
        """`why` tells that it seems to be meant; that is reported once in a run."""
        if why not in self._meant:
            self._meant |= {why} if why else set()
            watch.submit(_evaluated_in_training(watch, known, self._sensitive, why))


class Rhythm:
    """Whether each step, from the very first on, has had the same few forwards without gradients.

    A validation comes now and then, or after a step and not before the first. `calls` and `backwards` count since the
    last step. `usual` is None during the first step, then the number of such forwards in a step, and 0 for good once a
    step had another number.
    """

    def __init__(self) -> None:
        self.usual: int | None = None
        self.calls = 0
        self.backwards = 0
        self._steps = 0

    def holds(self, in_a_row: int) -> bool:
        """Whether so many forwards without gradients before one backward may be part of the training step."""
        return self.usual != 0 and in_a_row <= _VIEWS

    @property
    def kept(self) -> bool:
        """Whether it has been kept for long enough to be no chance."""
        return bool(self.usual) and self._steps >= _ENOUGH_STEPS

    @property
    def suspicious(self) -> bool:
        """Whether what was held back is too much for a test of shapes, though too little for a rhythm."""
        return (self.calls if self.usual is None else self.usual * self._steps) > 1

    def step(self) -> bool:
        """A step is about to be made; True if it shows that what was held back is no part of the training step.

        Further optimizers of the same step do not count.
        """
        if not self.backwards:
            return False
        calls, most = self.calls, _VIEWS * self.backwards
        self.calls = self.backwards = 0
        if self.usual is None:
            self.usual = calls if calls <= most else 0
        elif self.usual and calls != self.usual:
            broken = calls > self.usual or (self.suspicious and not self.kept)
            self.usual = 0
            return broken
        self._steps += 1
        return False


def _suspicion(watch: Watch, training: list[Sensitive]) -> Suspicion:
    return Suspicion(training, watch.step, user_line(), inside=watch.evaluating)


def _evaluated_in_training(watch: Watch, known: Suspicion, sensitive: int, why: str) -> Finding:
    """GG501; only information where `why` tells that it seems to be meant."""
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
    seen += f" {why}" if why else f" {described_call('train', who)}" if who else nobody
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
        # Not the same trouble as one that is not meant: that is reported although this was.
        cause_id=why or None,
        evidence={
            "modules": [each.path for each in known.modules[:50]],
            "count": len(known.modules),
            "statistics_changed": len(statistics),
        },
        guard="EvalModeAssert",
    )


def described_call(method: str, who: tuple[str, SourceLine | None]) -> str:
    """Which call set a mode, and where; `who` is the module's path and the line, as `ModeLog.who` gives them."""
    path, line = who
    target = f"model.{path}.{method}()" if path else f"model.{method}()"
    where = f" in `{line.function}` ({line.file}:{line.line})" if line else ""
    return f"{target} was called{where}."
