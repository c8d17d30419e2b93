"""LossInputs: what enters the losses of a running loop, looked at in the inspected steps."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.losses.loss_calls import (
    LOSSES,
    SQUASHES,
    ClassIds,
    Place,
    Seen,
    Told,
    class_ids,
    readable,
    reduction_of,
)
from gpt_guard.callbacks.losses.loss_causal import is_causal
from gpt_guard.callbacks.losses.loss_labels import Count, hardly_any, none_counts, padding_counts
from gpt_guard.callbacks.losses.loss_pairing import Pairing, grids, other_order, pairing, shifted
from gpt_guard.callbacks.losses.loss_reduction import Reduced, first_loss, judge_reduction, reduced
from gpt_guard.callbacks.losses.loss_scores import implicit_dim, judge_scores, squashed_twice
from gpt_guard.callbacks.losses.loss_targets import judge_targets, outer_difference
from gpt_guard.callbacks.losses.loss_terms import Origin, may_be_walked, terms_of
from gpt_guard.callbacks.losses.loss_weighing import Weighed, drowned, weigh
from gpt_guard.callbacks.settings import check_types
from gpt_guard.catalogue import finding
from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.autograd_graph.origin import sequence_of
from gpt_guard.hooks.frames import user_line
from gpt_guard.hooks.functions.functions import FunctionCall
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Observation

_COMPARES = (*(kind for kind in LOSSES if kind != "kl_div"),)


class LossInputs(Guard):
    """Says when a loss is given something else than it takes, in the inspected steps only; reads the device there.

    Looks at every call of torch's losses, however it is spelt: what kind of scores enter (probabilities into
    cross_entropy, raw scores into nll_loss), which labels count, in which order scores and targets were flattened, by
    how much targets are shifted against the token ids, how the loss was reduced, and which of several added losses
    decides. Losses written out by hand are seen by their graph only. Whether a shift of 0 or 2 is wrong is asked of
    the model by two forwards more, and only where there is such a shift.

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
        self._paths: dict[int, str] = {}
        self._counts: dict[str, tuple[Place, Count]] = {}
        self._weighed: list[dict[str, Weighed]] = []
        self._shared = self._step = 0
        self._blind: set[str] = set()
        self._calls = self._backwards = 0
        self._seen = Seen()
        self._step_over()

    def _step_over(self) -> None:
        """What belongs to the step that is over holds its tensors: let go."""
        self._seen.clear()
        self._reduced: list[tuple[Place, Reduced]] = []
        self._shifts: list[tuple[Place, Pairing]] = []
        self._origins: dict[int, Origin] = {}
        self._places: dict[int, Place] = {}

    def attach(self, watch: Watch) -> None:
        """Ask for the calls of the inspected steps."""
        super().attach(watch)
        self._clear()
        self._paths = self._seen.paths = {id(module): path for path, module in watch.model.named_modules()}
        inspection = watch.inspection
        inspection.on_end(self._ended)
        inspection.functions.listen(LOSSES, self._before, before=True)
        inspection.functions.listen(LOSSES, self._after)
        inspection.functions.listen(
            (*SQUASHES, "logsumexp", "embedding", "reshape", "attention", "masked_fill", "gradient_hook"), self._other
        )

    def detach(self) -> None:
        super().detach()
        self._clear()

    # Calls.

    def _other(self, call: FunctionCall) -> None:
        if not self.watch.inspection.active:
            return
        squash = call.kind in SQUASHES
        if (told := (implicit_dim(call) if squash else None) or squashed_twice(call, self._seen)) is not None:
            self._tell(Place(call, self._paths), told)
        self._seen.note(call)

    def _before(self, call: FunctionCall) -> None:
        scores = call.get("input")
        if not self.watch.inspection.active or not isinstance(scores, Tensor) or not readable(call):
            return
        self._calls += 1
        # What is judged when the last of these steps is over is said under its own number.
        self._step = self.watch.step
        place = Place(call, self._paths)
        if scores.requires_grad:
            self._tell_all(place, judge_scores(call, self._seen))
        self._tell_all(place, judge_targets(call))
        if (known := class_ids(call)) is not None and scores.requires_grad:
            self._tell_all(place, none_counts(known, reduction_of(call), self._seen))

    def _after(self, call: FunctionCall) -> None:
        result = call.result
        if not self.watch.inspection.active or not isinstance(result, Tensor) or not readable(call):
            return
        number = sequence_of(result)
        if number is None:
            return
        place = Place(call, self._paths)
        self._origins[number] = Origin(call.name, place.line, call.kind in _COMPARES)
        if (known := class_ids(call)) is None or known.scores.dim() < 2:
            return
        self._supervised(place, known)
        self._paired(place, known)
        if (found := reduced(call, known)) is not None:
            self._reduced.append((place, found))
        if self.watch.step == 0:
            self._tell_all(place, first_loss(call, known))

    def _supervised(self, place: Place, known: ClassIds) -> None:
        _, count = self._counts.setdefault(place.key, (place, Count()))
        count.add(known, self._seen.shape_of(known.targets))

    def _paired(self, place: Place, known: ClassIds) -> None:
        laid = grids(known, self._seen)
        for grid in laid:
            self._tell_all(place, padding_counts(grid, self._seen, self.watch.tap.inputs))
        pair = pairing(laid)
        if pair is not None:
            self._shifts.append((place, pair))
        elif (told := other_order(known, self._seen)) is not None:
            self._tell(place, told)

    # Moments.

    def before_backward(self, loss: Tensor) -> None:
        """Look at the graph of the loss: how it was reduced, and what it is the sum of."""
        inspection = self.watch.inspection
        if not inspection.active or loss.numel() != 1 or loss.grad_fn is None:
            return
        self._backwards += 1
        begun = time.perf_counter()
        for place, each in self._reduced:
            self._tell_all(place, judge_reduction(each, float(loss.detach())))
        if (told := outer_difference(loss)) is not None:
            # The line that calls backward(): the graph does not know where the difference was taken.
            self._tell(None, told._replace(line=user_line()))
        if self._above and self.watch.micro_batch == 0 and not self.watch.closure:
            self._weigh(loss)
        inspection.spent += time.perf_counter() - begun

    def _weigh(self, loss: Tensor) -> None:
        parameters = [each for each in self.watch.parameters.values() if each.requires_grad]
        terms = terms_of(loss, self._origins)
        if not parameters or len(terms) < 2 or not any(term.data for term in terms):
            return
        hooked = self._seen.hooked or any(each._backward_hooks for each in parameters)
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
        shifts = self._shifts
        if shifts and not any(pair.shift == 1 for _, pair in shifts):
            place, pair = shifts[0]
            causal, recurrent = is_causal(self.watch, pair.ids), self._one_way()
            # A model that returns no scores tells by its masks, and by being recurrent one way.
            sure = True if causal is None and (recurrent or self._seen.causal) else causal
            self._tell(place, shifted(pair, causal=sure, recurrent=recurrent))
        self._step_over()

    def _one_way(self) -> bool:
        recurrent = [each for each in self.watch.model.modules() if isinstance(each, nn.RNNBase)]
        return bool(recurrent) and not any(each.bidirectional for each in recurrent)

    def judge(self, seen: Observation) -> Iterable[Finding]:
        """Nothing: each call is judged when it is made."""
        return ()

    def _ended(self) -> None:
        """Judge what takes all inspected steps together."""
        for place, count in self._counts.values():
            self._tell_all(place, hardly_any(count))
        self._counts.clear()
        self._tell_all(None, drowned(self._weighed, self._shared, self._above))
        self._weighed.clear()
        self._step_over()

    def blind_spots(self) -> Iterable[str]:
        """A loss written out by hand, and added losses that could not be compared."""
        if self._backwards and not self._calls:
            yield "a loss written by hand: none of torch's losses was called in the inspected steps"
        yield from sorted(self._blind)

    def _tell_all(self, place: Place | None, told: Iterator[Told]) -> None:
        for each in told:
            self._tell(place, each)

    def _tell(self, place: Place | None, told: Told) -> None:
        watch = self.watch
        extra: dict[str, Any] = {} if told.severity is None else {"severity": told.severity}
        if place is not None:
            extra |= {"where": place.line, "module": place.module, "module_class": place.module_class}
            extra["cause_id"] = place.key
        if told.line is not None:
            extra |= {"where": told.line, "cause_id": f"{told.line.file}:{told.line.line}"}
        if told.module is not None:
            extra |= {"module": told.module[0], "module_class": told.module[1]}
        watch.submit(
            finding(
                told.code,
                told.seen,
                likely=told.likely,
                step=self._step,
                evidence=told.evidence or {},
                guard=self.name,
                **extra,
            )
        )
