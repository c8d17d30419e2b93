"""One forward and backward pass, and what it left: the norm of each gradient, the calls of the modules, the leaves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gpt_guard.checks.gradients.calls import Calls
from gpt_guard.checks.runner.forward import loss_of
from gpt_guard.hooks.autograd_graph.reach import leaves
from gpt_guard.hooks.gradients import Gradients, exact_norm, total_norm

LossFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Pass:
    """What one backward pass gave: `norms` by parameter, None where there is no gradient; exact about 0 and NaN."""

    loss: float
    has_graph: bool
    norms: dict[str, float | None] = field(default_factory=dict)
    calls: Calls = field(default_factory=Calls)
    leaves: list[Tensor] = field(default_factory=list)

    @property
    def norm(self) -> float:
        """L2 norm over all gradients."""
        return total_norm([norm for norm in self.norms.values() if norm is not None])

    @property
    def missing(self) -> list[str]:
        """Parameters without a gradient."""
        return [name for name, norm in self.norms.items() if norm is None]

    @property
    def zero(self) -> list[str]:
        """Parameters whose gradient is exactly zero."""
        return [name for name, norm in self.norms.items() if norm == 0.0]

    @property
    def nonfinite(self) -> list[str]:
        """Parameters with NaN or infinity in their gradient."""
        return [name for name, norm in self.norms.items() if norm is not None and not math.isfinite(norm)]


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that can learn, by name: not frozen, not empty; a tied one once, under its first name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel()}


@dataclass
class Task:
    """A batch `(x, y)` and how its loss is computed."""

    x: Tensor
    y: Tensor
    loss_fn: LossFunction | None = None
    ignore_index: int = -100

    def loss(self, model: nn.Module) -> Tensor:
        """The scalar loss of this batch; one that the model left unreduced is averaged."""
        loss = loss_of(model, self.x, self.y, self.loss_fn, self.ignore_index)
        return loss if loss.dim() == 0 else loss.mean()


def run_backward(model: nn.Module, task: Task) -> Pass:
    """Clear the gradients, run forward and backward in the modes as they are, and measure. Reads the device.

    Errors of the model pass through; a loss without a graph is no error, but `has_graph=False`.
    """
    parameters = trainable(model)
    for parameter in model.parameters():
        parameter.grad = None
    with torch.enable_grad(), Calls().listening(model) as calls:
        loss = task.loss(model)
        result = Pass(float(loss.detach()), loss.requires_grad, calls=calls)
        if loss.requires_grad:
            result.leaves = leaves(loss)
            loss.backward()
    result.norms = gradient_norms(dict(parameters))
    return result


def gradient_norms(parameters: dict[str, Tensor]) -> dict[str, float | None]:
    """The norm of each gradient, None where there is none; 0 only if every element is, infinite only if one is."""
    measured = Gradients(parameters).measure(None, immediate=True)
    norms: dict[str, float | None] = dict.fromkeys(parameters)
    for name, norm in zip(measured.names, measured.norms, strict=True):
        grad = parameters[name].grad
        if grad is not None and (norm == 0.0 or not math.isfinite(norm)):
            norm = exact_norm(grad)  # squares of finite values overflow, and those of tiny ones vanish
        norms[name] = norm
    return norms
