"""What the calls of an inspected step have shown, kept once for all guards: ids, softmaxes, masks, whose code it is.

A guard that listens to one of the kinds in `NOTED` hands each call to `note`; the second to do so changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from gpt_guard.hooks.autograd_graph.nodes import sequence_of
from gpt_guard.hooks.frames import running_module
from gpt_guard.hooks.functions.function_calls import FunctionCall
from gpt_guard.hooks.functions.masks import visible_keys
from gpt_guard.records import SourceLine

SOFTMAXES = ("softmax", "log_softmax")
NOTED = (*SOFTMAXES, "embedding", "reshape", "attention", "masked_fill", "gradient_hook")
"""Kinds of calls that are of use later in the step."""


class CallPlace(NamedTuple):
    """The line of the user's that makes a call, and path and class of the model's module whose code that is."""

    line: SourceLine | None
    module: str | None
    module_class: str | None

    @property
    def key(self) -> str:
        """The line as a string; empty where there is none."""
        return f"{self.line.file}:{self.line.line}" if self.line is not None else ""

    @property
    def fields(self) -> dict[str, Any]:
        """The place by the field names of a finding."""
        return {"where": self.line, "module": self.module, "module_class": self.module_class}

    def __str__(self) -> str:
        named = f" in module {self.module!r} ({self.module_class})" if self.module else ""
        return named + (f" ({self.key})" if self.line is not None else "")


class SoftmaxCall(NamedTuple):
    """A softmax or log_softmax: its name, and where it was called."""

    name: str
    place: CallPlace

    def __str__(self) -> str:
        return f"{self.name}{self.place}"


class EmbeddedIds(NamedTuple):
    """Token ids `[B, T]` that an embedding looked up, the id that it declares as padding, and its width.

    `forward` is the number of the forward that did so.
    """

    ids: Tensor
    padding: int | None
    width: int
    forward: object


class CallRecord:
    """What has been called since the step began; whoever has judged a step calls `clear`.

    `embedded` are the ids of all its forwards. `causal` tells that attention was kept from looking ahead, `hooked`
    that a hook was put on a gradient.
    """

    def __init__(self, model: nn.Module, forward: Callable[[], object]) -> None:
        self._model = model
        self.forward = forward
        self.clear()

    def clear(self) -> None:
        """Let go of the step that is over, and of its tensors."""
        self.embedded: list[EmbeddedIds] = []
        self._softmaxes: dict[int, SoftmaxCall] = {}
        self.causal = self.hooked = False
        self._flattened = WeakTensorKeyDictionary()
        self._paths: dict[int, str] = {}

    def place(self, call: FunctionCall) -> CallPlace:
        """Where a call comes from, while it is running; walks the stack."""
        if not self._paths:
            self._paths = {id(module): path for path, module in self._model.named_modules()}
        module = running_module(self._paths)
        if module is None:
            return CallPlace(call.line, None, None)
        return CallPlace(call.line, self._paths[id(module)], type(module).__name__)

    def softmax_of(self, node: Any) -> SoftmaxCall | None:
        """The call that made this node of a graph, if it was seen."""
        return None if node is None else self._softmaxes.get(int(node._sequence_nr()))

    def embedded_now(self) -> list[EmbeddedIds]:
        """The ids of the forward that is running, or was the last."""
        now = self.forward()
        return [each for each in self.embedded if each.forward == now]

    def flattened_from(self, targets: Tensor) -> tuple[int, int] | None:
        """`[B, T]` or `[T, B]` as targets were before they were flattened, if that was seen."""
        if targets.dim() == 2:
            return targets.size(0), targets.size(1)
        found = self._flattened.get(targets)
        return found if isinstance(found, tuple) else None

    def note(self, call: FunctionCall) -> None:
        """Keep what a call shows, after it has run."""
        if call.noted:
            return
        call.noted = True
        given, result = call.get("input"), call.result
        if call.kind in SOFTMAXES:
            if isinstance(result, Tensor) and (number := sequence_of(result)) is not None:
                self._softmaxes[number] = SoftmaxCall(call.name, self.place(call))
        elif call.kind == "embedding":
            self._embedded(call, given)
        elif call.kind == "gradient_hook":
            self.hooked = True
        elif call.kind in ("attention", "masked_fill"):
            masked = any(each.only_the_past for each in visible_keys(call))
            self.causal = self.causal or masked or bool(call.get("is_causal", False))
        elif isinstance(given, Tensor) and not given.is_floating_point() and given.dim() == 2:
            self._flattened[result] = tuple(given.shape)

    def _embedded(self, call: FunctionCall, ids: Any) -> None:
        table, padding = call.get("weight"), call.get("padding_idx")
        if type(ids) is Tensor and ids.dim() == 2 and ids.numel() and isinstance(table, Tensor):
            declared = padding if isinstance(padding, int) and padding >= 0 else None
            self.embedded.append(EmbeddedIds(ids.detach(), declared, table.size(-1), self.forward()))
