"""Names of tensors that were bad before any operation ran: parameters, buffers, the batch, and all others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import Tensor, nn

from gpt_guard.catalogue.operation_causes import likely
from gpt_guard.hooks.frames import running_calls
from gpt_guard.hooks.tensors import walk
from gpt_guard.records import Operand, OperationSeen
from gpt_guard.replaying.places import Place
from gpt_guard.replaying.values import many, measure

Kind = Literal["parameter", "buffer", "input", "constant"]
_WORDS: dict[Kind, str] = {
    "parameter": "parameter {} was non-finite before any operation ran",
    "buffer": "buffer {} was non-finite before any operation ran",
    "input": "{}, a part of the batch, was non-finite before any operation ran",
    "constant": "{} was non-finite before any operation ran",
}
_CAUSES: dict[Kind, tuple[str, ...]] = {
    "parameter": ("parameter_poisoned", "uninitialised", "lr_too_high"),
    "buffer": ("buffer_bad", "uninitialised"),
    "input": ("bad_batch", "uninitialised"),
    "constant": ("bad_constant", "bad_batch", "uninitialised"),
}
# A tensor with a history was computed by the model, in the part of the step that is not traced.
_COMPUTED = ("bad_constant", "lr_too_high")


class Leaves:
    """The names under which a model holds its tensors, found by their storage, so that a view has the name too.

    `given` are those that a function outside of the model was called with, by names such as "`target` of rmse".
    """

    def __init__(self, model: nn.Module, given: Mapping[str, Tensor] | None = None) -> None:
        self._known: dict[int, tuple[Kind, str, Tensor]] = {}
        for name, buffer in model.named_buffers():
            self._add("buffer", name, buffer)
        for name, parameter in model.named_parameters():
            self._add("parameter", name, parameter)
            if parameter.grad is not None:
                self._add("constant", f"the gradient of {name}", parameter.grad)
        for name, tensor in (given or {}).items():
            if _key(tensor) not in self._known:
                self._add("input", name, tensor)
        self._given = frozenset(given or ())
        self._model = model

    def _add(self, kind: Kind, name: str, tensor: Tensor) -> None:
        if (key := _key(tensor)) is not None:
            self._known[key] = kind, name, tensor

    def name(self, tensor: Tensor) -> tuple[Kind, str, Tensor]:
        """What a tensor is, by which name, and the whole tensor where this one is a view of a named one."""
        known = self._known.get(_key(tensor) or 0)
        if known is not None:
            return known
        for call in reversed(running_calls()):
            for position, given in walk(call.inputs or ()):
                if _key(given) == _key(tensor):
                    return "input", _position(position), given
        return "constant", f"a tensor of shape {list(tensor.shape)}", tensor

    def seen(self, tensor: Tensor, place: Place | None) -> OperationSeen:
        """What is said about a tensor that was bad from the start; `place` is where it was first read."""
        kind, name, whole = self.name(tensor)
        stats = measure(whole)
        owner = name.rpartition(".")[0] if kind in ("parameter", "buffer") else None
        shown = f"{name} of the model" if kind == "input" and name not in self._given else name
        return OperationSeen(
            kind=kind,
            name=name,
            module=owner if owner is not None else place.module if place and kind == "constant" else None,
            module_class=self._class_of(owner) if owner is not None else None,
            where=place.line if place else None,
            operands=(Operand(name=name, tensor=stats),),
            output=stats,
            shows=f"{_WORDS[kind].format(shown)}: {stats.bad} of {many(stats.numel, 'element')}",
            causes=likely(_COMPUTED if kind == "constant" and tensor.requires_grad else _CAUSES[kind]),
        )

    def unseen(self, tensor: Tensor, place: Place) -> OperationSeen:
        """What is said about a tensor that an operation wrote and something else wrote to afterwards."""
        stats = measure(tensor)
        bad = f"{stats.bad} of {many(stats.numel, 'element')} {'is' if stats.bad == 1 else 'are'}"
        name = f"a tensor of shape {list(tensor.shape)}"
        return OperationSeen(
            kind="constant",
            name=name,
            module=place.module,
            module_class=place.module_class,
            where=place.line,
            operands=(Operand(name=name, tensor=stats),),
            output=stats,
            shows=f"{name} was written to past torch: {bad} non-finite",
            causes=likely(("written_unseen", "uninitialised")),
        )

    def _class_of(self, path: str) -> str | None:
        try:
            return type(self._model.get_submodule(path)).__name__
        except AttributeError:
            return None


def _key(tensor: Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except RuntimeError:
        return None


def _position(position: str) -> str:
    """`[0][1]` is the second positional argument, `[1]['x']` the one by keyword."""
    return f"input{position[3:]}" if position.startswith(("[0]", "[1]")) else f"input{position}"
