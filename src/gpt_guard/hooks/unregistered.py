"""Find trainable tensors that a loss depends on and that the model holds where torch does not look for parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

# What nn.Module itself keeps in its __dict__: registered tensors and modules, and hooks.
_REGISTRIES = frozenset(vars(nn.Module()))
_MOST_ITEMS = 1000
_MAX_DEPTH = 4


@dataclass
class Hidden:
    """One attribute that hides trainable tensors: `path` of its module, its name and kind, and what is in it."""

    path: str
    module_class: str
    attribute: str
    kind: str
    tensors: list[Tensor] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The attribute's full path, e.g. `blocks.0.experts`."""
        return f"{self.path}.{self.attribute}" if self.path else self.attribute

    @property
    def shapes(self) -> str:
        """The shapes, the first few of them, e.g. `16x16, 16`."""
        shown = ["x".join(str(length) for length in tensor.shape) or "scalar" for tensor in self.tensors[:6]]
        return ", ".join(shown) + (", ..." if len(self.tensors) > 6 else "")


def find_hidden(model: nn.Module, leaves: Sequence[Tensor]) -> list[Hidden]:
    """The attributes of the model's modules that hold any of these tensors; each tensor is found once."""
    wanted = {id(leaf): leaf for leaf in leaves}
    found = []
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in _REGISTRIES or not wanted:
                continue
            hidden = Hidden(path, type(module).__name__, attribute, _kind(value))
            for tensor in _trainable(value):
                if wanted.pop(id(tensor), None) is not None:
                    hidden.tensors.append(tensor)
            if hidden.tensors:
                found.append(hidden)
    return found


def _trainable(value: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.requires_grad:
            yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
        if depth < _MAX_DEPTH:
            for module in value.modules():
                for attribute, inner in vars(module).items():
                    if attribute not in _REGISTRIES:
                        yield from _trainable(inner, depth + 1)
    elif depth < _MAX_DEPTH and isinstance(value, (list, tuple, set, Mapping)):
        items = value.values() if isinstance(value, Mapping) else value
        for place, item in enumerate(items):
            if place < _MOST_ITEMS:
                yield from _trainable(item, depth + 1)


def _kind(value: Any) -> str:
    """What the attribute is, e.g. `list of 2 Linear`."""
    if isinstance(value, Tensor):
        return "a plain tensor" if not isinstance(value, nn.Parameter) else "a Parameter set past nn.Module"
    if isinstance(value, nn.Module):
        return f"a {type(value).__name__} set past nn.Module"
    if not isinstance(value, (list, tuple, set, Mapping)):
        return type(value).__name__
    items = list(value.values() if isinstance(value, Mapping) else value)
    kinds = {f"{'nn.' if type(item).__module__.startswith('torch.nn.') else ''}{type(item).__name__}" for item in items}
    return f"a {type(value).__name__} of {len(items)} {kinds.pop() if len(kinds) == 1 else 'items'}"
