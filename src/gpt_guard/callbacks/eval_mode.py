"""EvalModeAssert: evaluation in training mode, and training in eval mode."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.mode_sensitive import Sensitive, described, sensitive_modules
from gpt_guard.catalogue import finding
from gpt_guard.hooks.frames import user_line
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, SourceLine

_LOOK_AGAIN = 100


@dataclass
class _Suspicion:
    """A forward without gradients while modules were in training mode, not yet known to be an evaluation."""

    modules: list[Sensitive]
    step: int
    where: SourceLine | None
    calls: int = 1


class EvalModeAssert(Guard):
    """Says when the model's mode does not fit what is done with it.

    Runs when the model is called and after backward; compares flags only, never a tensor. Silent for a model in which
    mode changes nothing. A forward without gradients in training mode is held back until it is clear that it was no
    part of training another model (a generator sampled for its discriminator).

    - `allow`: patterns of module paths whose mode is deliberate, such as `"*.mc_dropout"` for Monte Carlo dropout, or
      `"backbone.*"` for a frozen part.
    """

    judged_at: ClassVar[frozenset[Moment]] = frozenset({Moment.BEFORE_STEP})

    def __init__(self, allow: Iterable[str] = ()) -> None:
        self._allow = (allow,) if isinstance(allow, str) else tuple(allow)
        self._trained: dict[str, int] = {}
        self._all_trained = -1
        self._said: set[str] = set()
        self._clear()

    def _clear(self) -> None:
        self._sensitive: list[Sensitive] = []
        self._modules: list[Any] = []
        self._suspicion: _Suspicion | None = None
        self._modes: list[bool] | None = None
        self._root_trains = True
        self._trained_modes: list[bool] | None = None
        self._in_backward = False
        self._backwards = 0
        self._steps = 0

    def attach(self, watch: Watch) -> None:
        super().attach(watch)
        self._clear()
        self._look()
        watch.forward_begins.append(self._forward_begins)

    def detach(self) -> None:
        if self._watch is not None and self._forward_begins in self._watch.forward_begins:
            self._watch.forward_begins.remove(self._forward_begins)
        self._clear()
        super().detach()

    def _look(self) -> None:
        self._sensitive = sensitive_modules(self.watch.model, self._allow)
        self._modules = [each.module for each in self._sensitive]
        self._modes = self._trained_modes = None

    # What the loop does.

    def _forward_begins(self) -> None:
        if self._in_backward:
            # The last backward never came back to this model: what was sampled before it was for another one.
            self._in_backward = False
            self._suspicion = None
        if not self._modules:
            return
        watch = self.watch
        if torch.is_grad_enabled() and not watch.evaluation:
            self._modes = [module.training for module in self._modules]
            self._root_trains = watch.model.training
            return
        training = [each for each in self._sensitive if each.module.training]
        if training:
            self._suspect(training)

    def _suspect(self, training: list[Sensitive]) -> None:
        watch, known = self.watch, self._suspicion
        if known is None:
            self._suspicion = known = _Suspicion(training, watch.step, user_line())
        else:
            known.calls += 1
        if known.calls > 1 or not watch.optimizers or torch.is_grad_enabled():
            self._tell()

    def before_backward(self, loss: torch.Tensor) -> None:
        if self._in_backward:
            self._suspicion = None
        self._in_backward = True

    def after_backward(self) -> None:
        self._in_backward = False
        modes, self._modes = self._modes, None
        if modes is None:
            # Checkpointing the whole model runs it without gradients first: that was this training step.
            self._suspicion = None
            modes = [module.training for module in self._modules]
            self._root_trains = self.watch.model.training
        self._trained_modes = modes
        self._backwards += 1
        if self._backwards == 1:
            # One call before training begins is a shape test or fills lazy parameters.
            self._suspicion = None
        elif self._suspicion is not None:
            self._tell()

    def after_step(self, optimizer: Optimizer) -> None:
        self._steps += 1
        if self._steps % _LOOK_AGAIN == 0:
            self._look()

    def finish(self) -> Iterable[Finding]:
        if self._suspicion is not None and self._backwards and not self._in_backward:
            self._tell()
        return ()

    # What is said about it.

    def _tell(self) -> None:
        known, self._suspicion = self._suspicion, None
        if known is None:
            return
        statistics = [each for each in known.modules if each.buffers]
        who = self.watch.modes.who(training=True)
        seen = (
            f"The model was evaluated (a forward without gradients) with {len(known.modules)} of "
            f"{len(self._sensitive)} mode-sensitive modules in training mode ({described(known.modules)})."
        )
        if statistics:
            seen += f" The forward also changed the running statistics of {len(statistics)} of them."
        seen += f" {_call('train', who)}" if who else " Nobody called .eval() on them since watching began."
        self.watch.submit(
            finding(
                "GG501",
                seen,
                likely=["train_called"] if who else ["eval_forgotten"],
                step=known.step,
                moment=Moment.FORWARD,
                evaluation=True,
                module=known.modules[0].path,
                module_class=type(known.modules[0].module).__name__,
                where=known.where,
                evidence={
                    "modules": [each.path for each in known.modules[:50]],
                    "count": len(known.modules),
                    "statistics_changed": len(statistics),
                },
                guard=self.name,
            )
        )

    def judge(self, seen: Any) -> Iterable[Finding]:
        modes, self._trained_modes = self._trained_modes, None
        if modes is None:
            return
        if all(modes):
            self._all_trained = seen.step
            return
        off = [each for each, training in zip(self._sensitive, modes, strict=True) if not training]
        yield from self._judge_off(seen.step, off)
        without = {each.path for each in off}
        self._trained |= {each.path: seen.step for each in self._sensitive if each.path not in without}

    def _last_trained(self, module: Sensitive) -> int:
        """The last step in which a module trained in training mode; -1 for never."""
        return max(self._trained.get(module.path, -1), self._all_trained)

    def _judge_off(self, step: int, off: list[Sensitive]) -> Iterable[Finding]:
        changed = [each for each in off if self._last_trained(each) >= 0]
        if not changed:
            # From the start: parts frozen on purpose sit in a model that itself is in training mode.
            if len(off) == len(self._sensitive) and not self._root_trains:
                yield from self._finding(
                    "GG502", step, off, "They were in eval mode from the first step on.", ["never_train"]
                )
            return
        who = self.watch.modes.who(training=False)
        last = max(self._last_trained(each) for each in changed)
        story = f"They were in training mode until step {last}"
        story += f"; {_call('eval', who)[:-1]} and never undone." if who else "."
        if len(off) == len(self._sensitive):
            yield from self._finding("GG503", step, off, story, ["eval_not_undone"], who)
        else:
            yield from self._finding("GG504", step, changed, story, ["part_eval"], who)

    def _finding(
        self,
        code: str,
        step: int,
        off: list[Sensitive],
        story: str,
        likely: list[str],
        who: tuple[str, SourceLine | None] | None = None,
    ) -> Iterable[Finding]:
        cause = f"{code} {who[1] if who else ''}" if code != "GG504" else f"{code} {off[0].path}"
        if cause in self._said:
            return
        self._said.add(cause)
        yield finding(
            code,
            f"Training step with {len(off)} of {len(self._sensitive)} mode-sensitive modules in eval mode "
            f"({described(off)}). {story}",
            likely=likely,
            step=step,
            moment=Moment.AFTER_BACKWARD,
            module=off[0].path,
            module_class=type(off[0].module).__name__,
            where=who[1] if who else None,
            cause_id=cause,
            evidence={"modules": [each.path for each in off[:50]], "count": len(off)},
        )

    def state_dict(self) -> dict[str, Any]:
        return {"trained": dict(self._trained), "all_trained": self._all_trained, "said": sorted(self._said)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._trained = {str(path): int(step) for path, step in state["trained"].items()}
        self._all_trained = int(state["all_trained"])
        self._said = set(state["said"])


def _call(method: str, who: tuple[str, SourceLine | None]) -> str:
    path, line = who
    target = f"model.{path}.{method}()" if path else f"model.{method}()"
    where = f" in `{line.function}` ({line.file}:{line.line})" if line else ""
    return f"{target} was called{where}."
