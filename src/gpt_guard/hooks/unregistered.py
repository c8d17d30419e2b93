"""What modules hold outside of torch's registries, and which trainable tensors of a loss are hidden there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from gpt_guard.hooks.autograd_graph.nodes import leaves as leaves_of

REGISTRIES = frozenset(vars(nn.Module()))
"""What nn.Module itself keeps in its `__dict__`: registered tensors and modules, hooks, the mode."""
_MAX_DEPTH = 4
_MOST_ITEMS = 1000
_MOST_OBJECTS = 10_000


class Attribute(NamedTuple):
    """What a module holds past torch: its full path, e.g. `blocks.0.experts`, with the module and its path."""

    path: str
    value: Any
    owner: nn.Module
    owner_path: str


def own_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Names and values of what a module holds past torch."""
    return ((name, value) for name, value in vars(module).items() if name not in REGISTRIES)


def plain_attributes(model: nn.Module) -> Iterator[Attribute]:
    """What all modules of a model hold past torch."""
    for path, module in model.named_modules():
        for name, value in own_attributes(module):
            yield Attribute(f"{path}.{name}" if path else name, value, module, path)


def held_in(value: Any, depth: int = 0) -> Iterator[Tensor | nn.Module]:
    """The tensors and modules in a value, a few levels of lists, tuples, sets and mappings deep.

    After a module come those inside of it, and what they in turn hold past torch; not its registered tensors.
    """
    if isinstance(value, Tensor):
        yield value
    elif depth > _MAX_DEPTH:
        return
    elif isinstance(value, nn.Module):
        for module in value.modules():
            yield module
            for _, inner in own_attributes(module):
                yield from held_in(inner, depth + 1)
    elif isinstance(value, (list, tuple, set, Mapping)):
        for place, item in enumerate(value.values() if isinstance(value, Mapping) else value):
            if place >= _MOST_ITEMS:
                return
            yield from held_in(item, depth + 1)


def modules_in(value: Any) -> Iterator[nn.Module]:
    """The modules in a value, as `held_in` finds them."""
    return (each for each in held_in(value) if isinstance(each, nn.Module))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in a value, parameters and buffers of modules in it included."""
    for each in held_in(value):
        if isinstance(each, Tensor):
            yield each
        else:
            yield from each.parameters(recurse=False)
            yield from each.buffers(recurse=False)


def kind_of(value: Any) -> str:
    """What an attribute is, in words: `a list of 2 nn.Linear`."""
    if isinstance(value, Tensor) and value.grad_fn is not None:
        return "a tensor computed from an nn.Parameter"
    if isinstance(value, Tensor):
        return "a plain tensor" if not isinstance(value, nn.Parameter) else "a Parameter set past nn.Module"
    if isinstance(value, nn.Module):
        return f"a {type(value).__name__} set past nn.Module"
    if not isinstance(value, (list, tuple, set, Mapping)):
        return f"a {type(value).__name__} object"
    items = list(value.values() if isinstance(value, Mapping) else value)
    kinds = {f"{'nn.' if type(item).__module__.startswith('torch.nn.') else ''}{type(item).__name__}" for item in items}
    return f"a {type(value).__name__} of {len(items)} {kinds.pop() if len(kinds) == 1 else 'items'}"


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
