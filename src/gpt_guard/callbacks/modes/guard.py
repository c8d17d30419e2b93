"""EvalModeAssert: evaluation in training mode, and training in eval mode."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.modes.frozen import BeganInEval
from gpt_guard.callbacks.modes.graphs import UnusedGraphs
from gpt_guard.callbacks.modes.kept_rates import KeptRates
from gpt_guard.callbacks.modes.no_grad_forwards import NoGradForwards, described_call
from gpt_guard.callbacks.modes.sensitive import Sensitive, described, sensitive_modules
from gpt_guard.callbacks.modes.spectral import not_estimated, spectral_weights
from gpt_guard.callbacks.settings import patterns
from gpt_guard.catalogue import finding
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Observation

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

    def __init__(self, allow: Iterable[str] = ()) -> None:
        self._allow = patterns("EvalModeAssert", "allow", allow)
        self._trained: dict[str, int] = {}
        self._all_trained = -1
        self._reported: set[str] = set()
        self._clear()

    def _clear(self) -> None:
        self._sensitive: list[Sensitive] = []
        self._modes: list[bool] | None = None
        self._trained_modes: list[bool] | None = None
        self._root_trains = True
        self._no_grad = NoGradForwards()
        self._rates = KeptRates()
        self._graphs = UnusedGraphs()
        self._began = BeganInEval()
        self._look_at_norms = False
        self._judged = 0

    def attach(self, watch: Watch) -> None:
        super().attach(watch)
        self._clear()
        self._look()
        self._began.enter(watch, self._sensitive)
        self._look_at_norms = any(True for _ in spectral_weights(watch.model))
        watch.modes_meant.update(self._allow)
        watch.forward_begins.append(self._forward_begins)
        watch.forward_ended.append(self._forward_ended)

    def detach(self) -> None:
        if self._watch is not None and self._forward_begins in self._watch.forward_begins:
            self._watch.forward_begins.remove(self._forward_begins)
            self._watch.forward_ended.remove(self._forward_ended)
        self._began.detach()
        self._clear()
        super().detach()

    def _look(self) -> None:
        self._sensitive = sensitive_modules(self.watch.model, self._allow)
        self._no_grad.look_at(self._sensitive)
        self._modes = self._trained_modes = None

    def _forward_begins(self) -> None:
        self._no_grad.forward_begins()
        watch = self.watch
        if watch.evaluation or not watch.model.training:
            self._rates.forward_begins(watch)
        if not self._sensitive:
            return
        if torch.is_grad_enabled() and not watch.evaluation:
            self._note_modes()
            self._graphs.forward_begins(watch.forwards)
        elif training := [each for each in self._sensitive if each.module.training]:
            self._no_grad.suspect(watch, training)

    def _note_modes(self) -> None:
        self._modes = [each.module.training for each in self._sensitive]
        self._root_trains = self.watch.model.training

    def _forward_ended(self, output: Any) -> None:
        watch = self._watch
        if watch is None:
            return
        self._rates.forward_ended(watch)
        if self._look_at_norms:
            self._look_at_norms = False
            if (found := not_estimated(watch)) is not None:
                watch.submit(found)
        if self._graphs.marking and not watch.evaluation:
            self._graphs.forward_ended(output, self._sensitive)

    def before_backward(self, loss: torch.Tensor) -> None:
        self._graphs.judge(self.watch, len(self._sensitive))
        self._no_grad.before_backward()

    def after_backward(self) -> None:
        if self._modes is None:
            # Checkpointing the whole model runs it without gradients first: that was this training step.
            self._no_grad.forget()
            self._note_modes()
        self._trained_modes, self._modes = self._modes, None
        self._no_grad.after_backward(self.watch)

    def finish(self) -> Iterable[Finding]:
        self._graphs.judge(self.watch, len(self._sensitive))
        self._no_grad.finish(self.watch)
        return ()

    def judge(self, seen: Observation) -> Iterable[Finding]:
        self._judged += 1
        if self._judged % _LOOK_AGAIN == 0:
            self._look()
        self._no_grad.step(self.watch)
        yield from self._rates.trained(self.watch, seen.step)
        modes, self._trained_modes = self._trained_modes, None
        if modes is None:
            return
        first = self._root_trains and self._all_trained < 0 and not self._trained
        yield from self._began.judge(self.watch, seen.step, self._sensitive, modes, first=first)
        if all(modes):
            self._all_trained = seen.step
            return
        pairs = list(zip(self._sensitive, modes, strict=True))
        found = self._trained_in_eval(seen.step, [each for each, training in pairs if not training])
        if found is not None and found.cause_id not in self._reported:
            self._reported.add(str(found.cause_id))
            yield found
        self._trained |= {each.path: seen.step for each, training in pairs if training}

    def _trained_in_eval(self, step: int, off: Sequence[Sensitive]) -> Finding | None:
        """GG502 to GG504 for the modules that were in eval mode; None for parts that were frozen on purpose."""
        last = {each.path: max(self._trained.get(each.path, -1), self._all_trained) for each in off}
        changed = [each for each in off if last[each.path] >= 0]
        whole = len(off) == len(self._sensitive)
        if not changed:
            # From the start: parts frozen on purpose sit in a model that itself is in training mode.
            if not whole or self._root_trains:
                return None
            who = self.watch.modes.who(training=False, of=off[0].path)
            code, named, likely = "GG502", off, "never_train" if who is None else "eval_before_loop"
            story = f"{_they_were(off)} in eval mode from the first step on"
            story += f"; {described_call('eval', who)[:-1]} and never undone." if who else "."
        else:
            code, named, likely = ("GG503", off, "eval_not_undone") if whole else ("GG504", changed, "part_eval")
            who = self.watch.modes.who(training=False, of=changed[0].path)
            story = f"{_they_were(named)} in training mode until step {max(last.values())}"
            story += f"; {described_call('eval', who)[:-1]} and never undone." if who else "."
        where = who[1] if who else None
        return finding(
            code,
            f"Training step with {len(named)} of {len(self._sensitive)} mode-sensitive modules in eval mode "
            f"({described(named)}). {story}",
            likely=[likely],
            step=step,
            moment=Moment.AFTER_BACKWARD,
            module=named[0].path,
            module_class=type(named[0].module).__name__,
            where=where,
            cause_id=f"{code} {named[0].path}" if code == "GG504" else f"{code} {where or ''}",
            evidence={"modules": [each.path for each in named[:50]], "count": len(named)},
        )

    def state_dict(self) -> dict[str, Any]:
        return {"trained": dict(self._trained), "all_trained": self._all_trained, "said": sorted(self._reported)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._trained = {str(path): int(step) for path, step in state["trained"].items()}
        self._all_trained = int(state["all_trained"])
        self._reported = set(state["said"])


def _they_were(modules: Sequence[Sensitive]) -> str:
    return "It was" if len(modules) == 1 else "They were"
