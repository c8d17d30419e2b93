"""AttentionCalls: masks of the wrong sense, positions that see nothing, attention over the wrong dimension."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import ClassVar

from torch import Tensor
from torch.optim import Optimizer

from gpt_guard.callbacks.attention.masks import judge_masks, softmax_dim
from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.call_issue import CallIssue
from gpt_guard.callbacks.settings import patterns
from gpt_guard.hooks.functions.call_record import CallPlace
from gpt_guard.hooks.functions.function_calls import FunctionCall
from gpt_guard.hooks.functions.masks import visible_keys
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Observation

_CALLS = ("attention", "multi_head_attention", "softmax")


class AttentionCalls(Guard):
    """Looks at every attention call of inspected forwards, however it is written, and at the mask it was given.

    Sees `scaled_dot_product_attention`, `nn.MultiheadAttention` and the layers built on it, and softmax over scores
    that hold masked entries. Reads the device in inspected forwards only. A model that reads from right to left as well
    as from left to right is silent; so are -inf masks, padded queries that see nothing, and biases that are learned.

    - `allow`: patterns of module paths whose attention is meant as it is.
    """

    inspects: ClassVar[bool] = True

    judged_at: ClassVar[frozenset[Moment]] = frozenset()

    def __init__(self, allow: Iterable[str] = ()) -> None:
        self._allow = patterns("AttentionCalls", "allow", allow)
        self._clear()

    def _clear(self) -> None:
        self._held: dict[tuple[str, str], Finding] = {}
        self._meant: set[tuple[str, str]] = set()
        self._forward: object = None
        self._reported: set[tuple[str, str]] = set()

    def attach(self, watch: Watch) -> None:
        super().attach(watch)
        self._clear()
        watch.inspection.functions.listen(("embedding",), self._embedded)
        watch.inspection.functions.listen(_CALLS, self._attended)
        watch.inspection.on_end(self._step_over)

    def detach(self) -> None:
        self._clear()
        super().detach()

    def before_step(self, optimizer: Optimizer) -> None:
        """Report what was held back, before others report what follows from it."""
        self._step_over()

    def judge(self, seen: Observation) -> Iterable[Finding]:
        """Everything is reported at the call, or when the forward is over."""
        return ()

    def finish(self) -> Iterable[Finding]:
        self._step_over()
        return ()

    def _step_over(self) -> None:
        self._forward_over()
        self.watch.calls.clear()

    def _forward_over(self) -> None:
        """Report what nothing else in the forward has explained."""
        held = [found for key, found in self._held.items() if key not in self._meant]
        self._held.clear()
        self._meant.clear()
        for found in held:
            self._submit(found)

    def _embedded(self, call: FunctionCall) -> None:
        self.watch.calls.note(call)

    def _attended(self, call: FunctionCall) -> None:
        record = self.watch.calls
        # A listener of its own would cost something in every forward to come.
        if record.forward() != self._forward:
            self._forward = record.forward()
            self._forward_over()
        place = record.place(call)
        path = place.module or ""
        if any(fnmatchcase(path, pattern) for pattern in self._allow):
            return
        if call.kind == "softmax":
            scores, dim = call.get("input"), call.get("dim")
            if type(scores) is not Tensor or not isinstance(dim, int) or scores.dim() not in (3, 4):
                return
            if dim % scores.dim() != scores.dim() - 1:
                self._take(call, place, softmax_dim(call, record.embedded_now(), path))
                return
            # Over both dimensions in turn, as co-attention does.
            self._meant.add(("GG698", path))
        seen = visible_keys(call)
        if any(each.only_the_past for each in seen):
            self._meant.add(("GG697", "backwards"))
        self._take(call, place, judge_masks(call, seen, record.embedded_now()))

    def _take(self, call: FunctionCall, place: CallPlace, issues: Iterable[CallIssue]) -> None:
        where = f"`{place.module}`" if place.module else "the model"
        for issue in issues:
            found = issue._replace(
                text=f"{call.name} in {where}: {issue.text}", evidence={"call": call.name, **(issue.evidence or {})}
            ).finding(
                place,
                step=self.watch.step,
                moment=Moment.FORWARD,
                evaluation=self.watch.evaluation,
                guard=self.name,
            )
            if issue.unless is None:
                self._submit(found)
            else:
                self._held.setdefault((issue.code, issue.unless), found)

    def _submit(self, found: Finding) -> None:
        """One line that all layers share is reported once."""
        key = (found.code, found.cause_id or found.module or "")
        if key not in self._reported:
            self._reported.add(key)
            self.watch.submit(found)
