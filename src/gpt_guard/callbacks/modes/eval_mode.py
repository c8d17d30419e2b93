"""EvalModeAssert: evaluation in training mode, and training in eval mode."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.modes.eval_graphs import UnusedGraphs
from gpt_guard.callbacks.modes.eval_off import off_in_training
from gpt_guard.callbacks.modes.eval_spectral import Unestimated
from gpt_guard.callbacks.modes.eval_unfrozen import BeganInEval
from gpt_guard.callbacks.modes.eval_words import (
    EACH_STEP,
    ONE_BY_ONE,
    Suspicion,
    evaluated_in_training,
)
from gpt_guard.callbacks.modes.mode_rhythm import Rhythm
from gpt_guard.callbacks.modes.mode_sensitive import (
    Sensitive,
    cumulative_norms,
    recomputing_statistics,
    sensitive_modules,
    set_one_by_one,
)
from gpt_guard.callbacks.settings import patterns
from gpt_guard.hooks.frames import user_line
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding

_LOOK_AGAIN = 100


class EvalModeAssert(Guard):
    """Says when the model's mode does not fit what is done with it.

    Runs when the model is called and after backward; compares flags only, never a tensor. Silent for a model in which
    mode changes nothing. A forward without gradients in training mode is held back until it is clear that it was no
    part of training another model (a generator sampled for its discriminator). Where each step from the first on has
    the same one or two (pseudo-labels), they are part of the algorithm, and only worth knowing; so is a model in eval
    mode whose dropout layers were put back one by one (Monte Carlo dropout). What recomputes the statistics of
    BatchNorm (torch.optim.swa_utils.update_bn) has to run in training mode.

    - `allow`: patterns of module paths whose mode is deliberate, such as `"*.mc_dropout"` for Monte Carlo dropout, or
      `"backbone.*"` for a frozen part.
    """

    # A call of .train() or .eval(), a forward without gradients or a second one before the backward: that step is full.
    light: ClassVar[frozenset[str]] = frozenset()
    late = True

    def __init__(self, allow: Iterable[str] = ()) -> None:
        self._allow = patterns("EvalModeAssert", "allow", allow)
        self._trained: dict[str, int] = {}
        self._all_trained = -1
        self._said: set[str] = set()
        self._clear()

    def _clear(self) -> None:
        self._sensitive: list[Sensitive] = []
        self._modules: list[Any] = []
        self._suspicion: Suspicion | None = None
        self._held: Suspicion | None = None
        self._rhythm = Rhythm()
        self._cumulative: set[str] = set()
        self._meant: set[str] = set()
        self._modes: list[bool] | None = None
        self._root_trains = True
        self._trained_modes: list[bool] | None = None
        self._known_modes: list[bool] | None = None
        self._began = BeganInEval()
        self._graphs = UnusedGraphs()
        self._spectral = Unestimated()
        self._in_backward = False
        self._backwards = 0
        self._steps = 0

    def attach(self, watch: Watch) -> None:
        super().attach(watch)
        self._clear()
        self._look()
        self._began.enter(watch, self._sensitive)
        watch.modes_meant.update(self._allow)
        watch.full_forwards.append(self._forward_begins)
        self._spectral.attach(watch)

    def detach(self) -> None:
        if self._watch is not None and self._forward_begins in self._watch.full_forwards:
            self._watch.full_forwards.remove(self._forward_begins)
            self._quiet_again()
        for each in (self._spectral, self._began):
            each.detach()
        self._clear()
        super().detach()

    def _look(self) -> None:
        self._sensitive = sensitive_modules(self.watch.model, self._allow)
        self._modules = [each.module for each in self._sensitive]
        self._cumulative = cumulative_norms(self._sensitive)
        self._modes = self._trained_modes = self._known_modes = None

    def _forward_begins(self) -> None:
        if self._in_backward:
            # The last backward never came back to this model: what was sampled before it was for another one.
            self._in_backward = False
            self._clear_suspicion()
        if not self._modules:
            return
        watch = self.watch
        if torch.is_grad_enabled() and not watch.evaluation:
            self._modes = [module.training for module in self._modules]
            self._root_trains = watch.model.training
            if self._graphs.forward_begins(watch.forwards) and self._forward_ended not in watch.forward_ended:
                watch.forward_ended.append(self._forward_ended)
                # Its judgement needs to be told of each backward.
                watch.pace.doubt()
            return
        training = [each for each in self._sensitive if each.module.training]
        if training:
            self._suspect(training)

    def _suspect(self, training: list[Sensitive]) -> None:
        watch = self.watch
        if recomputing_statistics(training, self._cumulative):
            return
        if set_one_by_one(watch.model):
            self._tell(self._suspected(training), why=ONE_BY_ONE)
            return
        if watch.evaluating:
            self._tell(self._suspected(training))
            return
        self._rhythm.calls += 1
        if (known := self._suspicion) is None:
            self._suspicion = known = self._suspected(training)
        else:
            known.calls += 1
        in_a_row = known.calls > 1 and not self._rhythm.holds(known.calls)
        if in_a_row or not watch.optimizers or torch.is_grad_enabled():
            self._suspicion = None
            self._tell(known)

    def _suspected(self, training: list[Sensitive]) -> Suspicion:
        return Suspicion(training, self.watch.step, user_line(), inside=self.watch.evaluating)

    def _forward_ended(self, output: Any) -> None:
        if not self.watch.evaluation:
            self._graphs.forward_ended(output, self._sensitive)

    def _quiet_again(self) -> None:
        if self._watch is not None and self._forward_ended in self._watch.forward_ended:
            self._watch.forward_ended.remove(self._forward_ended)

    def before_backward(self, loss: torch.Tensor) -> None:
        if self._graphs.judge(self.watch, len(self._sensitive)):
            self._quiet_again()
        if self._in_backward:
            self._clear_suspicion()
        self._in_backward = True

    def _clear_suspicion(self) -> None:
        self._suspicion = None
        self._rhythm.forget()

    def after_backward(self) -> None:
        self._in_backward = False
        modes, self._modes = self._modes, None
        if modes is None:
            # Checkpointing the whole model runs it without gradients first: that was this training step.
            self._clear_suspicion()
            modes = [module.training for module in self._modules]
            self._root_trains = self.watch.model.training
        self._trained_modes = modes
        self._backwards += 1
        self._rhythm.backward()
        known, self._suspicion = self._suspicion, None
        if known is None:
            return
        if not self._rhythm.holds(known.calls):
            self._tell(known)
        elif self._held is None or self._held.step < known.step:
            self._held = known

    def _judge_rhythm(self) -> None:
        """What was held back is told once a step shows that it is no part of each."""
        if self._rhythm.step() and self._held is not None:
            self._tell(self._held)
        if not self._rhythm.usual:
            self._held = None

    def finish(self) -> Iterable[Finding]:
        self._graphs.judge(self.watch, len(self._sensitive))
        known, rhythm = self._suspicion, self._rhythm
        if known is not None and not self._in_backward and (self._backwards or known.calls > 1):
            self._tell(known)
        elif self._held is not None and (rhythm.kept or rhythm.suspicious):
            self._tell(self._held, why=EACH_STEP if rhythm.kept else "")
        return ()

    def _tell(self, known: Suspicion, why: str = "") -> None:
        if why not in self._meant:
            self._meant |= {why} if why else set()
            self.watch.submit(evaluated_in_training(self.watch, known, len(self._sensitive), why=why))

    def judge(self, seen: Any) -> Iterable[Finding]:
        light = "backwards" in seen.readings
        self._steps += 1
        if self._steps % _LOOK_AGAIN == 0:
            self._look()
        if light:
            # As in the last full step.
            self._rhythm.backward()
            self._graphs.backward()
        self._judge_rhythm()
        modes, self._trained_modes = self._trained_modes, None
        if modes is None and light:
            modes = self._known_modes or [module.training for module in self._modules]
        if modes is None:
            return
        self._known_modes = modes
        first = self._root_trains and self._all_trained < 0 and not self._trained
        yield from self._began.judge(self.watch, seen.step, self._sensitive, modes, first=first)
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
        last = [self._last_trained(each) for each in off]
        found = off_in_training(self.watch, step, off, last, len(self._sensitive), whole=not self._root_trains)
        if found is not None and found.cause_id not in self._said:
            self._said.add(str(found.cause_id))
            yield found

    def state_dict(self) -> dict[str, Any]:
        return {"trained": dict(self._trained), "all_trained": self._all_trained, "said": sorted(self._said)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._trained = {str(path): int(step) for path, step in state["trained"].items()}
        self._all_trained = int(state["all_trained"])
        self._said = set(state["said"])
