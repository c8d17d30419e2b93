"""LossInputs: what enters the losses of a running loop, looked at in the inspected steps."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.call_issue import CallIssue
from gpt_guard.callbacks.losses.accumulation import AccumulatedSteps, MeanLoss, MicroBatch, mean_loss, micro_batch
from gpt_guard.callbacks.losses.calls import LOSSES, ClassIds, class_ids, readable
from gpt_guard.callbacks.losses.pairing import Pairing, grids, is_causal, other_order, pairing, positions, shifted
from gpt_guard.callbacks.losses.reduction import ReducedLoss, first_loss, over_all_positions, plain_sum, reduced
from gpt_guard.callbacks.losses.scores import judge_scores, judge_softmax
from gpt_guard.callbacks.losses.targets import (
    TargetCount,
    hardly_any,
    judge_targets,
    none_counts,
    outer_difference,
    padding_counts,
)
from gpt_guard.callbacks.losses.terms import LossTerm, NamedLoss, drowned, may_be_walked, terms_of, weigh
from gpt_guard.callbacks.losses.unused import UnusedLosses
from gpt_guard.callbacks.settings import check_types
from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.autograd_graph.nodes import sequence_of
from gpt_guard.hooks.frames import user_line
from gpt_guard.hooks.functions.call_record import NOTED, CallPlace
from gpt_guard.hooks.functions.function_calls import FunctionCall
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Observation


class LossInputs(Guard):
    """Says when a loss is given something else than it takes, in the inspected steps only; reads the device there.

    Looks at every call of torch's losses, however it is spelt: what kind of scores enter (probabilities into
    cross_entropy, raw scores into nll_loss), which labels count, in which order scores and targets were flattened, by
    how much targets are shifted against the token ids, how the loss was reduced, what each micro-batch of a step counts
    for, which of several added losses decides, and which numbers with a graph the model computes that no loss contains
    (GG647). Losses written out by hand are seen by their graph only. Whether a shift of 0 or 2 is wrong is asked of the
    model by two forwards more, and only where there is such a shift.

    - `drowned_above`: how many times larger another loss's gradient on the shared parameters must be, in most of the
      inspected steps, for GG678. A thousand is no choice of weights: GradNorm (Chen et al. 2018) starts from factors
      of ten. 0 switches it off, and with it one backward more for each added loss.
    """

    inspects: ClassVar[bool] = True

    def __init__(self, drowned_above: float = 1000.0) -> None:
        check_types(type(self), locals())
        if not (drowned_above == 0 or drowned_above > 1):
            raise GuardUsageError(f"LossInputs(drowned_above={drowned_above!r}) cannot work: give 0, or above 1")
        self._above = float(drowned_above)
        self._clear()

    def _clear(self) -> None:
        self._counts: dict[str, tuple[CallPlace, TargetCount]] = {}
        self._weighed: list[dict[str, LossTerm]] = []
        self._accumulated = AccumulatedSteps()
        self._shared = self._step = 0
        self._blind: set[str] = set()
        self._calls = self._backwards = 0
        self._unused = UnusedLosses()
        self._clear_step()

    def _clear_step(self) -> None:
        """What belongs to the step that is over holds its tensors: let go."""
        self._reduced: list[tuple[CallPlace, ReducedLoss]] = []
        self._divided: list[tuple[CallPlace, ReducedLoss]] = []
        self._shifts: list[tuple[CallPlace, Pairing, bool]] = []
        self._losses: dict[int, NamedLoss] = {}
        self._means: list[MeanLoss] = []
        self._micro_batches: list[MicroBatch | None] = []

    def attach(self, watch: Watch) -> None:
        """Ask for the calls of the inspected steps."""
        super().attach(watch)
        self._clear()
        inspection = watch.inspection
        # What an evaluation has shown before is of no loss of these steps.
        inspection.on_begin(watch.calls.clear)
        inspection.on_end(self._ended)
        watch.forward_ended.append(self._forward_ended)
        inspection.functions.listen(LOSSES, self._loss_begins, before=True)
        inspection.functions.listen(LOSSES, self._loss_computed)
        inspection.functions.listen((*NOTED, "logsumexp"), self._called)

    def detach(self) -> None:
        if self._watch is not None and self._forward_ended in self._watch.forward_ended:
            self._watch.forward_ended.remove(self._forward_ended)
        super().detach()
        self._clear()

    # Calls.

    def _called(self, call: FunctionCall) -> None:
        if self.watch.inspection.active:
            if (issue := judge_softmax(call, self.watch.calls)) is not None:
                self._submit(self.watch.calls.place(call), issue)
            self.watch.calls.note(call)

    def _loss_begins(self, call: FunctionCall) -> None:
        scores, record = call.get("input"), self.watch.calls
        if not self.watch.inspection.active or not isinstance(scores, Tensor) or not readable(call):
            return
        self._calls += 1
        # What is judged when the last of these steps is over gets its number.
        self._step = self.watch.step
        place = record.place(call)
        if scores.requires_grad:
            self._submit(place, *judge_scores(call, record))
        self._submit(place, *judge_targets(call))
        if scores.requires_grad:
            self._submit(place, *none_counts(call, record))

    def _loss_computed(self, call: FunctionCall) -> None:
        result = call.result
        if not self.watch.inspection.active or not isinstance(result, Tensor) or not readable(call):
            return
        number = sequence_of(result)
        if number is None:
            return
        place = self.watch.calls.place(call)
        self._losses[number] = NamedLoss(call.name, place.line, call.kind != "kl_div")
        if (known := class_ids(call)) is None or known.scores.dim() < 2:
            return
        _, count = self._counts.setdefault(place.key, (place, TargetCount()))
        count.add(known, self.watch.calls.flattened_from(known.targets))
        self._pair(place, known)
        if (found := reduced(call, known)) is not None:
            self._reduced.append((place, found))
        if (mean := mean_loss(call, known, place)) is not None:
            self._means.append(mean)
        if self.watch.step == 0:
            self._submit(place, *first_loss(call, known, self.watch.model))

    def _pair(self, place: CallPlace, known: ClassIds) -> None:
        record, where = self.watch.calls, positions(known)
        laid = grids(known, where, record)
        # The ids of another micro-batch may have the same shape: padding is told if it is, by whichever of them.
        padded = [list(padding_counts(grid, record, self.watch.tap.inputs)) for grid in laid]
        if all(padded):
            self._submit(place, *(padded[-1] if padded else ()))
        pair = pairing(laid)
        if pair is not None:
            self._shifts.append((place, pair, record.causal))
        elif (issue := other_order(known, where, record)) is not None:
            self._submit(place, issue)

    # Moments.

    def _forward_ended(self, output: Any) -> None:
        watch = self.watch
        if watch.inspection.active and not watch.evaluation and not watch.inspection.functions.muted:
            begun = time.perf_counter()
            self._unused.forward_ended(watch, output)
            watch.inspection.spent += time.perf_counter() - begun

    def before_backward(self, loss: Tensor) -> None:
        """Look at the graph of the loss: how it was reduced, and what it is the sum of."""
        inspection = self.watch.inspection
        if not inspection.active or loss.grad_fn is None:
            return
        begun = time.perf_counter()
        self._unused.before_backward(loss)
        if loss.numel() != 1:
            return
        self._backwards += 1
        value = float(loss.detach())
        self._micro_batches.append(None if self.watch.closure else micro_batch(self._means, value))
        self._means.clear()
        self._divided += [(place, each) for place, each in self._reduced if each.over_all_positions(value)]
        for place, each in self._reduced:
            self._submit(place, *plain_sum(each, value))
        if (issue := outer_difference(loss)) is not None:
            # The line that calls backward(): the graph does not know where the difference was taken.
            self._submit(CallPlace(user_line(), None, None), issue)
        if self._above and self.watch.micro_batch == 0 and not self.watch.closure:
            self._weigh(loss)
        inspection.spent += time.perf_counter() - begun

    def _weigh(self, loss: Tensor) -> None:
        parameters = [each for each in self.watch.parameters.values() if each.requires_grad]
        terms = terms_of(loss, self._losses)
        if not parameters or len(terms) < 2 or not any(term.data for term in terms):
            return
        hooked = self.watch.calls.hooked or any(each._backward_hooks for each in parameters)
        if hooked or not may_be_walked(loss):
            # They would run once more, and show it.
            self._blind.add(
                "which of the added losses decides: hooks, a checkpoint or functions of your own are between"
            )
            return
        try:
            weighed, shared = weigh(loss, terms, parameters)
        except RuntimeError as error:
            # No memory for it, or an operation that goes backward only once.
            self._blind.add(f"which of the added losses decides: {type(error).__name__} in a backward of our own")
            return
        self.watch.inspection.probes["loss balance"] = self.watch.inspection.probes.get("loss balance", 0) + 1
        if shared:
            self._shared = shared
            self._weighed.append(weighed)

    def before_step(self, optimizer: Optimizer) -> None:
        """Judge the shifts of this step together: a model may predict several tokens ahead, the next one among them."""
        if not self.watch.inspection.active:
            return
        self._step = self.watch.step
        self._unused.step_ends()
        # The number of all targets of an accumulation is the right divisor, and may be that of one batch's positions.
        counted = sum(each.counted for _, each in self._reduced)
        for place, each in self._divided:
            if each.positions != counted:
                self._submit(place, over_all_positions(each))
        self._accumulated.add(self._step, self._micro_batches)
        shifts = self._shifts
        if shifts and not any(pair.shift == 1 for _, pair, _ in shifts):
            place, pair, masked = shifts[0]
            causal, recurrent = is_causal(self.watch, pair.ids), self._one_way()
            # A model that returns no scores tells by its masks, and by being recurrent one way.
            sure = True if causal is None and (recurrent or masked) else causal
            self._submit(place, shifted(pair, causal=sure, recurrent=recurrent))
        self._clear_step()
        self.watch.calls.clear()

    def _one_way(self) -> bool:
        recurrent = [each for each in self.watch.model.modules() if isinstance(each, nn.RNNBase)]
        return bool(recurrent) and not any(each.bidirectional for each in recurrent)

    def judge(self, seen: Observation) -> Iterable[Finding]:
        """Nothing: each call is judged when it is made."""
        return ()

    def _ended(self) -> None:
        """Judge what takes all inspected steps together."""
        for place, count in self._counts.values():
            self._submit(place, *hardly_any(count))
        self._counts.clear()
        self._submit(None, *drowned(self._weighed, self._shared, self._above))
        self._weighed.clear()
        for step, place, issue in self._accumulated.judge():
            self.watch.submit(issue.finding(place, step=step, guard=self.name))
        self._accumulated = AccumulatedSteps()
        for found in self._unused.judge(self.watch, self._step):
            self.watch.submit(found.model_copy(update={"guard": self.name}))
        self._clear_step()
        self.watch.calls.clear()

    def blind_spots(self) -> Iterable[str]:
        """A loss written out by hand, and added losses that could not be compared."""
        if self._backwards and not self._calls:
            yield "a loss written by hand: none of torch's losses was called in the inspected steps"
        yield from sorted(self._blind)

    def _submit(self, place: CallPlace | None, *issues: CallIssue) -> None:
        for issue in issues:
            self.watch.submit(issue.finding(place, step=self._step, guard=self.name))
