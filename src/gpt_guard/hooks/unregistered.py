"""Find trainable tensors that a loss depends on and that the model holds where torch does not look for parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from gpt_guard.hooks.attributes import kind_of, plain_attributes, tensors_in
from gpt_guard.hooks.autograd_graph.nodes import leaves as leaves_of

_MOST_ITEMS = 1000
_MAX_DEPTH = 4
_MOST_OBJECTS = 10_000


@dataclass
class Hidden:
    """An attribute that hides trainable tensors: its full path (`blocks.0.experts`), its module, what is in it.

    `indirect` where an object that is no module or container holds them, as a helper or a trainer does.
    """

    name: str
    module: str
    module_class: str
    kind: str
    tensors: list[Tensor] = field(default_factory=list)
    indirect: bool = False

    @property
    def shapes(self) -> str:
        """The shapes, the first few of them, e.g. `16x16, 16`."""
        return shapes_of(self.tensors)


def shapes_of(tensors: Sequence[Tensor]) -> str:
    """The shapes of tensors, the first few of them, e.g. `16x16, 16`."""
    shown = ["x".join(str(length) for length in tensor.shape) or "scalar" for tensor in tensors[:6]]
    return ", ".join(shown) + (", ..." if len(tensors) > 6 else "")


def find_hidden(model: nn.Module, leaves: Sequence[Tensor], *, deep: bool = False) -> list[Hidden]:
    """The attributes of the model's modules that hold any of these tensors; each tensor is found once.

    With `deep`, what no container or module in an attribute holds is looked for in other objects, and behind tensors
    that were computed from it: there, an nn.Parameter only. A trainer may be such an object, and hold what another
    optimizer trains: ask for it where that can be told apart.
    """
    wanted = {id(leaf): leaf for leaf in leaves}
    found = _search(model, wanted, _trainable)
    wanted = {key: leaf for key, leaf in wanted.items() if deep and isinstance(leaf, nn.Parameter)}
    seen: set[int] = set()
    for hidden in _search(model, wanted, lambda value: _within(value, seen)) if wanted else ():
        hidden.indirect = "computed" not in hidden.kind
        found.append(hidden)
    return found


def _search(model: nn.Module, wanted: dict[int, Tensor], look: Callable[[Any], Iterator[Tensor]]) -> list[Hidden]:
    found = []
    for name, value, module, path in plain_attributes(model):
        if not wanted:
            break
        hidden = Hidden(name, path, type(module).__name__, kind_of(value))
        for tensor in look(value):
            if wanted.pop(id(tensor), None) is not None:
                hidden.tensors.append(tensor)
        if hidden.tensors:
            found.append(hidden)
    return found


def _trainable(value: Any) -> Iterator[Tensor]:
    return (tensor for tensor in tensors_in(value) if tensor.requires_grad)


def _within(value: Any, seen: set[int], depth: int = 0) -> Iterator[Tensor]:
    """Trainable tensors in the attributes of any object, and the leaves that a tensor was computed from."""
    if isinstance(value, (str, bytes, int, float, type)) or id(value) in seen or len(seen) > _MOST_OBJECTS:
        return
    if isinstance(value, Tensor):
        # A cached result of a forward hangs on the model as a whole; a scaled Parameter on one leaf.
        behind = leaves_of(value) if value.grad_fn is not None else []
        yield from behind if len(behind) == 1 else ()
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        yield from _trainable(value)
        return
    if isinstance(value, (list, tuple, set, Mapping)):
        inner = list(value.values() if isinstance(value, Mapping) else value)[:_MOST_ITEMS]
    elif type(value).__module__.partition(".")[0] in ("torch", "builtins"):
        # An optimizer holds what it trains, and that is no hiding place.
        return
    else:
        inner = list(getattr(value, "__dict__", {}).values())
    for item in inner if depth < _MAX_DEPTH else ():
        if isinstance(item, Tensor) and item.grad_fn is None:
            yield from _trainable(item)
        else:
            yield from _within(item, seen, depth + 1)
