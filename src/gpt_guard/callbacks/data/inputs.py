"""What a model was called with, by the names of its arguments: the data, and the targets among them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpt_guard.checkpoint.fingerprint import unwrap
from gpt_guard.hooks.tensors import walk, watchable

TARGET_NAMES = frozenset({"y", "ys", "y_true", "target", "targets", "label", "labels", "decoder_labels"})
"""Names under which models take what their own loss compares with: nanoGPT, Hugging Face, torch's loss functions."""


class Inputs(NamedTuple):
    """Tensors by name; `data["x"]`, or `data["batch['ids']"]` where they lie in a structure."""

    data: dict[str, Tensor]
    targets: dict[str, Tensor]

    @property
    def first(self) -> Tensor | None:
        """The main one: the first that has a batch dimension."""
        return next((tensor for tensor in self.data.values() if tensor.dim()), None)


class InputNames:
    """Knows the names of a model's arguments; asked once, since reading a signature is slow."""

    def __init__(self, model: nn.Module) -> None:
        self._names: list[str] = []
        try:
            kinds = inspect.signature(unwrap(model).forward).parameters.values()
        except (TypeError, ValueError):
            return
        self._names = [each.name for each in kinds if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """Sort the tensors of a call; those without elements, or without values of their own here, are left out."""
        found = Inputs({}, {})
        for name, value in self._arguments(args, kwargs):
            for position, tensor in walk(value):
                if tensor.numel() and is_plain(tensor):
                    last = position.rpartition("['")[2].removesuffix("']") if position else name
                    side = found.targets if TARGET_NAMES & {name, last} else found.data
                    side[name + position] = tensor
        return found

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        for place, value in enumerate(args):
            yield self._names[place] if place < len(self._names) else f"input[{place}]", value
        yield from kwargs.items()


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has strided values of its own that can be hashed here."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and watchable(tensor)
