"""DataWatch: what reaches the model from the data, above all whether it is new data in each step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import LBFGS, Optimizer

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.data.batches import BatchLog, MeasuredBatch
from gpt_guard.callbacks.data.form import BatchShape, unusual
from gpt_guard.callbacks.data.loaders import Draws, LoaderLog, LoaderUse, loaders_of
from gpt_guard.callbacks.data.overlap import TrainedRows
from gpt_guard.callbacks.data.repeats import (
    RepeatedBatch,
    equal_rows,
    in_order,
    one_sided,
    repeated,
    same_batch,
    same_from_workers,
)
from gpt_guard.callbacks.settings import check_types
from gpt_guard.hooks.functions.function_calls import FunctionCall
from gpt_guard.hooks.tensors import walk
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Observation, Severity

_LOOKED = 3
_LOSSES = (
    *("cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div"),
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
)


class DataWatch(Guard):
    """Says when the loop trains on other data than it seems to.

    In the first steps: the same batch each time (GG605), only its inputs or only its targets the same (GG609), equal
    rows, equal batches from loader workers (GG801), inputs of an unusual form (GG634), and samples of an evaluation
    that were trained on (GG638). In every step, by shapes alone: a batch dimension that is lost (GG600). In each epoch
    of a loader of torch's: whether its order is that of the epoch before (GG628). Hashes are made on the device and
    read with the step. After the first `repeats` steps no value is looked at any more.

    - `overfit`: one batch is repeated on purpose, to see whether the model can learn it by heart.
    - `repeats`: where nothing shows why, the same batch is reported after this many steps. PPO trains up to 15 epochs
      on one batch (Schulman et al., 2017, table 4), and goes on to the next. Training on a batch that the loop holds
      on to, such as a whole graph or data set, or makes anew each time and draws nothing for, is only recorded; LBFGS
      needs the same data in each step.
    """

    judged_at: ClassVar[frozenset[Moment]] = frozenset({Moment.BEFORE_STEP, Moment.FORWARD})

    def __init__(self, *, overfit: bool = False, repeats: int = 20) -> None:
        check_types(DataWatch, locals())
        self.overfit = overfit
        self.repeats = max(_LOOKED, repeats)
        self._loaders = LoaderLog()
        self._clear()

    def _clear(self) -> None:
        self._log: BatchLog | None = None
        self._shape = BatchShape()
        self._rows = TrainedRows()
        self._groups: list[list[MeasuredBatch]] = []
        self._open = False
        self._settled = False
        self._evaluated = False
        self._begun_anew: LoaderUse | None = None
        self._draws = Draws()

    def attach(self, watch: Watch) -> None:
        super().attach(watch)
        self._clear()
        self._log = BatchLog(watch, self._loaders)
        self._loaders.open()
        watch.forward_begins.append(self._forward_begins)
        watch.inspection.on_begin(self._begin)
        watch.inspection.functions.listen(_LOSSES, self._loss_called)
        watch.inspection.functions.listen(("draw",), self._drawn)

    def detach(self) -> None:
        if self._watch is not None and self._forward_begins in self._watch.forward_begins:
            self._watch.forward_begins.remove(self._forward_begins)
        self._loaders.close()
        self._clear()
        super().detach()

    def _begin(self) -> None:
        """A stretch of inspected steps begins: look anew."""
        self._groups.clear()
        self._open, self._settled = True, False

    # What the loop does.

    def _forward_begins(self) -> None:
        watch = self.watch
        if watch.evaluation:
            meant = watch.evaluating or not watch.model.training
            if meant and self._log is not None and len(self._rows) and not self._rows.full:
                self._log.forward(evaluation=True)
                self._evaluated = True
            return
        if self._evaluated:
            self._end_evaluation()
        self._draws.forward_begins()
        if (use := self._loaders.current) is not None:
            use.order.trained += 1
            if (found := use.order.repeated(use.line, use.batches)) is not None:
                self._submit(found.model_copy(update={"step": watch.step}))
        if self._open and self._log is not None:
            self._log.forward(evaluation=False)
        args, kwargs = watch.tap.inputs or ((), {})
        first = next(iter((*args, *kwargs.values())), None)
        if type(first) is Tensor:
            self._shape.forward(tuple(first.shape))

    def _loss_called(self, call: FunctionCall) -> None:
        target = call.get("target")
        if self._open and self._log is not None and not self.watch.evaluation and isinstance(target, Tensor):
            self._log.target(target)

    def _drawn(self, call: FunctionCall) -> None:
        """Whole numbers are drawn, which may be places in the data."""
        self._draws.seen = self._draws.seen or not self.watch.evaluation

    def after_backward(self) -> None:
        if (change := self._shape.backward()) is not None:
            self._submit(change)

    def after_step(self, optimizer: Optimizer) -> None:
        self._shape.stepped()

    # What is reported about it.

    def judge(self, seen: Observation) -> Iterable[Finding]:
        if self._log is None or not (self._open or self._log.waiting):
            return
        self._take(seen.readings)
        if not self._open or seen.evaluation or seen.moment is not Moment.BEFORE_STEP:
            return
        count = len(self._groups)
        if count >= _LOOKED and not self._settled:
            self._settled = True
            yield from self._early()
        if count >= self.repeats:
            self._open = False
            yield from self._late()

    def _take(self, readings: dict[str, Any]) -> None:
        for batch in self._log.complete(readings) if self._log is not None else ():
            if batch.evaluation:
                self._rows.evaluate(batch)
                continue
            self._rows.train(batch)
            if not self._groups or self._groups[-1][0].group != batch.group:
                self._groups.append([])
            self._groups[-1].append(batch)

    def _early(self) -> Iterable[Finding]:
        """What the first steps show for certain."""
        groups = self._groups
        found = repeated(groups)
        if (equal := equal_rows(groups)) is not None:
            self._open = False
            yield equal
        elif found is not None and (use := found.begun_anew) is not None:
            self._begun_anew = use
            yield from self._same(found, ["fresh_iterator", "reseeded"], use)
        elif found is not None and found.held and not found.whole_loader:
            use = found.example.loader or self._drawn_before()
            if use is not None and (use.batches or 0) > 1 and use.batch_size == found.example.rows:
                yield from self._same(found, ["drawn_once", "on_purpose"], use)
        elif (workers := same_from_workers(groups)) is not None:
            self._open = False
            yield workers
        if (side := one_sided(groups)) is not None:
            yield side
        yield from unusual(groups)

    def _drawn_before(self) -> LoaderUse | None:
        """The loader that the batch came from before the watch began, if its data can be looked through."""
        first = next((tensor for _, tensor in walk(self.watch.tap.inputs)), None)
        return next(loaders_of(first.detach()), None) if first is not None and first.dim() else None

    def _same(
        self, found: RepeatedBatch, likely: list[str], use: Any, severity: Severity = Severity.WARNING
    ) -> Iterable[Finding]:
        self._open = False
        if not self.overfit:
            yield same_batch(found, likely=likely, severity=severity, loader=use)

    def _late(self) -> Iterable[Finding]:
        """What only more steps can show: a batch that is trained on a few times is not one that never changes."""
        groups = self._groups
        if len(groups) < _LOOKED:
            return
        if (found := repeated(groups)) is not None:
            meant = found.held or found.whole_loader
            if meant and len(groups) < self.repeats:
                return
            optimizers = self.watch.optimizers
            if meant and optimizers and all(isinstance(optimizer, LBFGS) for optimizer in optimizers):
                return
            meant = meant or not (self._draws.seen or found.example.loader)
            likely = ["on_purpose", "drawn_once"] if meant else ["reseeded", "fresh_iterator", "drawn_once"]
            severity = Severity.INFO if meant else Severity.WARNING
            yield from self._same(found, likely, found.example.loader, severity)
        elif (workers := same_from_workers(groups)) is not None:
            yield workers

    def _end_evaluation(self) -> None:
        self._evaluated = False
        self._take({})
        if (found := self._rows.overlap()) is not None:
            self._submit(found)

    def _submit(self, found: Finding) -> None:
        self.watch.submit(found.model_copy(update={"guard": self.name}))

    def finish(self) -> Iterable[Finding]:
        if self._log is None:
            return
        self._take({})
        if self._open:
            if len(self._groups) >= _LOOKED and not self._settled:
                yield from self._early()
            if self._open:
                yield from self._late()
        if self._evaluated:
            self._end_evaluation()
        for use in self._loaders.uses:
            if use is not self._begun_anew and (found := in_order(use)) is not None:
                yield found

    def blind_spots(self) -> Iterable[str]:
        """Where no step is inspected, no batch is looked at."""
        if self._log is not None and not self._groups and self.watch.tap.calls and not self.watch.inspection.steps_seen:
            yield "batches: no step was inspected"
