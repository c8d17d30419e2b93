"""ModelProbe: asks the model itself, on the user's own batch, what no single forward can show."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.modes.dropout import DROPOUT_CALLS, active_dropout, dropout_in_eval
from gpt_guard.callbacks.probes.batch import Attended, Batch
from gpt_guard.callbacks.probes.questions import (
    TwoPasses,
    future_findings,
    kept_sizes,
    recurrent_findings,
    row_findings,
)
from gpt_guard.callbacks.probes.runner import LOSS_CALLS, OutOfBudget, ProbeRunner
from gpt_guard.callbacks.settings import check_types, patterns
from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.functions.function_calls import FunctionCall
from gpt_guard.hooks.functions.masks import HIDDEN
from gpt_guard.hooks.isolation.rerun import marks, not_repeatable, odd
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Observation

_FORWARDS = 10
_LEAST_SECONDS = 1.0
_ATTENTION = ("attention", "multi_head_attention", "softmax")


class ModelProbe(Guard):
    """Runs the model a few times more, before the first inspected step, on a copy of the batch it was trained on.

    In eval mode, without gradient, with the same random numbers each time; everything is put back, and the run stays
    bit-identical. Asked are: whether two passes agree (dropout that no mode switches off, a cache that grows); of a
    model whose targets are its own ids shifted by one, whether an earlier position changes with the last token; of a
    model of token ids, whether rows change with other rows. Graphs, pairs and experts with a capacity, whose rows know
    of each other by design, are silent or only worth knowing. In an evaluation it looks at dropout calls alone.

    - `budget`: seconds that the probes of one stretch may take; None for ten of the loop's own forwards, and a second
      at least. What did not fit is named in the summary. Where a leak was found, two forwards more that copy what every
      module takes and returns tell where answers part.
    - `allow`: patterns of modules in which rows mix, or the future is seen, on purpose.
    """

    inspects: ClassVar[bool] = True

    judged_at: ClassVar[frozenset[Moment]] = frozenset()

    def __init__(self, budget: float | None = None, allow: Iterable[str] = ()) -> None:
        check_types(ModelProbe, locals())
        if budget is not None and not budget > 0:
            raise GuardUsageError(f"ModelProbe(budget={budget!r}) cannot work: expected seconds above 0, or None")
        self._budget = budget
        self._allow = patterns("ModelProbe", "allow", allow)
        self._clear()

    def _clear(self) -> None:
        self._batch: Batch | None = None
        self._running = False
        self._began = 0.0
        self._marks: list[tuple[int, int]] = []
        self._sizes: dict[str, int] = {}
        self._skipped: dict[str, None] = {}
        self._reported: set[str] = set()

    def attach(self, watch: Watch) -> None:
        super().attach(watch)
        self._clear()
        watch.inspection.on_begin(self._stretch_begins)
        functions = watch.inspection.functions
        functions.listen(("embedding",), self._embedded)
        functions.listen(LOSS_CALLS, self._compared)
        functions.listen(_ATTENTION, self._attended)
        functions.listen(DROPOUT_CALLS, self._dropped)

    def detach(self) -> None:
        self._done()
        skipped = self._skipped
        self._clear()
        self._skipped = skipped
        super().detach()

    def judge(self, seen: Observation) -> Iterable[Finding]:
        """Findings are submitted when a question is answered."""
        return ()

    def blind_spots(self) -> Iterable[str]:
        return list(self._skipped)

    # What the loop does.

    def _stretch_begins(self) -> None:
        self._done()
        self.watch.forward_begins.append(self._forward_begins)
        self.watch.forward_ended.append(self._forward_ended)

    def _done(self) -> None:
        """Nothing more is noted in this stretch."""
        watch, self._batch, self._running = self._watch, None, False
        if watch is not None and self._forward_begins in watch.forward_begins:
            watch.forward_begins.remove(self._forward_begins)
            watch.forward_ended.remove(self._forward_ended)

    def _forward_begins(self) -> None:
        watch = self._watch
        if watch is None or watch.evaluation or not watch.inspection.active:
            return
        if self._batch is not None and not self._running:
            # Later losses are those of another forward.
            self._batch.open = False
            return
        inputs = watch.tap.inputs
        if inputs is None:
            return
        if (why := not_repeatable(watch.model)) or (name := odd(inputs)) is not None:
            self._skip("all questions", why or f"the model was given a {name}, which another forward might change")
            self._done()
            return
        kinds = {"cpu", *(parameter.device.type for parameter in watch.model.parameters())} - {"meta"}
        autocast = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds}
        self._batch, self._running = Batch(inputs, autocast), True
        self._marks, self._sizes = marks(watch.model), kept_sizes(watch.model)
        self._began = time.perf_counter()

    def _forward_ended(self, output: Any) -> None:
        if not self._running or self._batch is None or self.watch.evaluation:
            return
        self._running = False
        self._batch.seconds = time.perf_counter() - self._began
        sizes = kept_sizes(self.watch.model)
        self._batch.grown = {name for name, size in sizes.items() if size > self._sizes.get(name, 0)}
        if marks(self.watch.model) != self._marks:
            self._skip("all questions", "the model's forward writes to its parameters")
            self._done()

    def before_step(self, optimizer: Optimizer) -> None:
        """Ask, once in a stretch, after the first forward and backward of it."""
        batch = self._batch
        if batch is None or self._running:
            return
        self._done()
        batch.finish()
        seconds = max(_LEAST_SECONDS, _FORWARDS * batch.seconds) if self._budget is None else self._budget
        for found in self._questions(ProbeRunner(self.watch, batch, seconds)):
            if found.module is None or not any(fnmatchcase(found.module, each) for each in self._allow):
                self._submit(found)

    # What is asked.

    def _questions(self, runner: ProbeRunner) -> Iterator[Finding]:
        repeated, batch = TwoPasses(runner), runner.batch
        yield from self._ask("two eval passes", runner, repeated.findings)
        if not repeated.answer.tensors:
            return
        first, shift = repeated.answer, batch.shift
        if repeated.unsteady:
            if batch.tokens:
                self._skip("causality and independence of rows", repeated.unsteady)
            return
        future = []
        if shift is not None and shift.position in batch.reread:
            self._skip("causality", "the ids are looked up twice, as by an encoder and a decoder")
        elif shift is not None:
            future = self._ask("causality", runner, lambda: future_findings(runner, shift, first))
        if batch.tokens:
            leaking = {found.module for found in future}
            rows, length = next(iter(batch.tokens.values())).shape
            if rows == length and shift is None:
                self._skip("independence of rows", f"{rows} rows of {length} tokens cannot be told from their columns")
            yield from self._ask("independence of rows", runner, lambda: row_findings(runner, first, leaking))
        else:
            yield from self._ask("independence of rows", runner, lambda: recurrent_findings(runner, first))
        yield from future

    def _ask(self, question: str, runner: ProbeRunner, find: Callable[[], Iterable[Finding]]) -> list[Finding]:
        try:
            with runner.rerun.open(self.watch.inspection, question):
                return list(find())
        except OutOfBudget:
            self._skip(question, f"it would have taken more than the budget of {runner.budget:.3g} seconds")
        except Exception as error:
            # The model cannot run like that (without gradient, in eval mode); its own run goes on.
            self._skip(question, f"the model cannot be called again: {type(error).__name__}: {_short(error)}")
        return []

    def _skip(self, question: str, why: str) -> None:
        self._skipped[f"{question}: {why}"] = None

    def _submit(self, found: Finding) -> None:
        key = f"{found.code} {found.cause_id or found.module}"
        if key not in self._reported:
            self._reported.add(key)
            self.watch.submit(found.model_copy(update={"guard": self.name}))

    # What is noted of the forward.

    def _embedded(self, call: FunctionCall) -> None:
        if self._running and self._batch is not None:
            self._batch.embedded(call)

    def _compared(self, call: FunctionCall) -> None:
        if self._batch is not None:
            self._batch.compared(call)

    def _attended(self, call: FunctionCall) -> None:
        batch = self._batch
        if not self._running or batch is None:
            return
        module = call.module
        path = next((path for path, each in self.watch.model.named_modules() if each is module), "")
        mask = any(call.get(name) is not None for name in ("attn_mask", "key_padding_mask"))
        if call.kind == "softmax":
            scores = call.get("input")
            if type(scores) is not Tensor or scores.dim() < 3 or scores.size(-1) != scores.size(-2):
                return
            mask = bool((scores.detach() <= HIDDEN).any())
        batch.attended.append(Attended(path, call.line, mask or bool(call.get("is_causal", False))))

    def _dropped(self, call: FunctionCall) -> None:
        if not self.watch.evaluation or self.watch.model.training:
            return
        active = active_dropout(call)
        if active is not None and (found := dropout_in_eval(self.watch, active)) is not None:
            self._submit(found)


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:160]
