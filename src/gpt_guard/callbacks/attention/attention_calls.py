"""AttentionCalls: masks of the wrong sense, positions that see nothing, attention over the wrong dimension."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from gpt_guard.callbacks.attention import attention_masks as looks
from gpt_guard.callbacks.attention.attention_verdicts import Tokens, Verdict, softmax_dim, verdicts
from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.settings import patterns
from gpt_guard.catalogue import finding
from gpt_guard.hooks.functions.function_calls import FunctionCall
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
        self._tokens: list[Tokens] = []
        self._held: dict[tuple[str, str], Finding] = {}
        self._meant: set[tuple[str, str]] = set()
        self._paths: dict[int, str] = {}
        self._forward = (0, 0, 0)
        self._said: set[tuple[str, str]] = set()

    def attach(self, watch: Watch) -> None:
        super().attach(watch)
        self._clear()
        functions = watch.inspection.functions
        functions.listen(("embedding",), self._embedded)
        functions.listen(_CALLS, self._attended)
        watch.inspection.on_end(self._flush)

    def detach(self) -> None:
        self._clear()
        super().detach()

    def before_step(self, optimizer: Optimizer) -> None:
        """Tell what was held back, before others tell what follows from it."""
        self._flush()

    def judge(self, seen: Observation) -> Iterable[Finding]:
        """Everything is told at the call, or when the forward is over."""
        return ()

    def finish(self) -> Iterable[Finding]:
        self._flush()
        return ()

    def _flush(self) -> None:
        """A forward is over: tell what nothing else in it has explained."""
        held = [found for key, found in self._held.items() if key not in self._meant]
        self._tokens.clear()
        self._held.clear()
        self._meant.clear()
        for found in held:
            self._submit(found)

    def _notice_forward(self) -> None:
        """Forwards are told apart by their number: a listener of their own would cost in every step to come."""
        watch = self.watch
        now = (watch.tap.calls, watch.step, watch.micro_batch)
        if now != self._forward:
            self._forward = now
            self._flush()

    def _embedded(self, call: FunctionCall) -> None:
        self._notice_forward()
        ids, table = call.get("input"), call.get("weight")
        if type(ids) is Tensor and ids.dim() == 2 and isinstance(table, Tensor) and not ids.is_floating_point():
            padding = call.get("padding_idx")
            declared = padding if isinstance(padding, int) and padding >= 0 else None
            self._tokens.append(Tokens(ids.detach(), declared, table.size(-1)))

    def _attended(self, call: FunctionCall) -> None:
        self._notice_forward()
        path = self._path(call)
        if any(fnmatchcase(path, pattern) for pattern in self._allow):
            return
        if call.kind == "softmax":
            scores, dim = call.get("input"), call.get("dim")
            if type(scores) is not Tensor or not isinstance(dim, int) or scores.dim() not in (3, 4):
                return
            if dim % scores.dim() != scores.dim() - 1:
                self._take(call, path, softmax_dim(call, self._tokens, path))
                return
            # Over both dimensions in turn, as co-attention does.
            self._meant.add(("GG698", path))
        if any(looks.is_lower(each) for each in looks.visible(call)):
            self._meant.add(("GG697", "backwards"))
        self._take(call, path, verdicts(call, self._tokens))

    def _take(self, call: FunctionCall, path: str, found: Iterable[Verdict]) -> None:
        for verdict in found:
            told = self._finding(call, path, verdict)
            if verdict.held is None:
                self._submit(told)
            else:
                self._held.setdefault((verdict.code, verdict.held), told)

    def _path(self, call: FunctionCall) -> str:
        module = call.module
        if id(module) not in self._paths:
            self._paths = {id(each): path for path, each in self.watch.model.named_modules()}
        return self._paths.get(id(module), "")

    def _finding(self, call: FunctionCall, path: str, verdict: Verdict) -> Finding:
        module, where = call.module, call.line
        fields: dict[str, Any] = {} if verdict.severity is None else {"severity": verdict.severity}
        return finding(
            verdict.code,
            f"{call.name} in {f'`{path}`' if path else 'the model'}: {verdict.words}",
            likely=verdict.likely,
            step=self.watch.step,
            moment=Moment.FORWARD,
            evaluation=self.watch.evaluation,
            module=path,
            module_class=type(module).__name__ if module is not None else None,
            where=where,
            cause_id=f"{where.file}:{where.line}" if where is not None else None,
            guard=self.name,
            evidence={"call": call.name, **verdict.evidence},
            **fields,
        )

    def _submit(self, found: Finding) -> None:
        """One line that all layers share is told of once."""
        key = (found.code, found.cause_id or found.module or "")
        if key not in self._said:
            self._said.add(key)
            self.watch.submit(found)
