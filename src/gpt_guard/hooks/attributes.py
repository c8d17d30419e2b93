"""What modules hold outside of torch's registries: numbers, tensors that are plain attributes, modules in lists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

REGISTRIES = frozenset(vars(nn.Module()))
"""What nn.Module itself keeps in its `__dict__`: registered tensors and modules, hooks, the mode."""
_MAX_DEPTH = 4
_MOST_ITEMS = 1000


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
