"""Recipe: a step that can be run again, whether it comes from a loop that is still running or from a file."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gpt_guard.hooks.capture.execution_context import Ambient
from gpt_guard.hooks.tensors import walk
from gpt_guard.records import Finding


@dataclass(frozen=True)
class LossRecipe:
    """The call of a loss function outside of the model, with the very tensors it was given.

    `gradients` are those that reached what it returned, by position in it ("" for a tensor alone); `calls_model` tells
    that the forward is part of it, and is run by it.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ambient: Ambient
    gradients: dict[str, Tensor] = field(default_factory=dict)
    calls_model: bool = False

    def named(self) -> dict[str, Tensor]:
        """The tensors it was given that nothing computes, such as labels, by the names of its parameters.

        Empty where none has a history: what the model returned cannot be told from labels then.
        """
        function = getattr(self.function, "forward", self.function)
        try:
            bound: dict[str, Any] = inspect.signature(function).bind(*self.args, **self.kwargs).arguments
        except (TypeError, ValueError):
            # A function without a signature, such as one written in C.
            bound = {**{f"argument {place}": each for place, each in enumerate(self.args, start=1)}, **self.kwargs}
        called = getattr(self.function, "__name__", type(self.function).__name__)
        found = {
            f"`{name}{position}` of {called}": tensor
            for name, value in bound.items()
            for position, tensor in walk(value)
        }
        labels = {name: tensor for name, tensor in found.items() if not tensor.requires_grad}
        return labels if len(labels) < len(found) else {}


@dataclass(frozen=True)
class Recipe:
    """What one forward, and the backward after it, were made of.

    - `args`, `kwargs`: what the model was called with.
    - `ambient`: generators' states by device, modes in the order of `model.modules()`, autocast, grad mode.
    - `reached`: positions of the outputs that the loss is computed from, where that is known.
    - `gradients`: those that reached the model's outputs from outside, by position in what it returned ("[1]" for
      the second of a tuple, ".loss", "" for a tensor alone); empty if no backward is part of the failure.
    - `also`: gradients of outputs that lie behind those and that the loss is computed from besides: not to be added.
    - `finding`: what was found, as a guard said it; None for a step that has not failed.
    - `loss`: the loss function outside of the model, where Guardian was told of it; never in a file.
    - `inside`: the forward was still running, so that it was the model itself which called `backward()`.
    - `alone`: the loop calls parts or methods of the model, so that there is nothing to be run but the loss function.
    - `notes`: what is known to differ by now, each as a sentence: a batch or parameters that were written to since.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ambient: Ambient
    reached: tuple[str, ...] = ()
    gradients: dict[str, Tensor] = field(default_factory=dict)
    also: dict[str, Tensor] = field(default_factory=dict)
    finding: Finding | None = None
    loss: LossRecipe | None = None
    notes: tuple[str, ...] = ()
    step: int = 0
    micro_batch: int = 0
    evaluation: bool = False
    inside: bool = False
    alone: bool = False
