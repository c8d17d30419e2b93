"""AutocastUse: products that autocast does not reach."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard import Guardian, GuardUsageError
from gpt_guard.callbacks.precision.autocast import AutocastUse
from gpt_guard.records import Finding

Context = Callable[[], AbstractContextManager[Any]]


def bfloat16() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


class IntoBuffer(torch.autograd.Function):
    """A product written into a buffer: autocast does not know this form."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        out = torch.empty(x.shape[0], weight.shape[1])
        for place in range(0, weight.shape[1], 4):
            torch.matmul(x, weight[:, place : place + 4].contiguous(), out=out[:, place : place + 4])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight.t(), x.t() @ grads[0]


class Own(nn.Module):
    """A layer with a function of its own, inside of `context`."""

    def __init__(self, context: Context = nullcontext) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.context = context

    def forward(self, x: Tensor) -> Tensor:
        with self.context():
            out: Tensor = IntoBuffer.apply(x.float(), self.weight)  # type: ignore[no-untyped-call]  # torch has no types for it
        return out


def run(layer: nn.Module, *, model: Context, loss: Context, steps: int = 4) -> tuple[Finding, ...]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, 8))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with Guardian(net, optimizer, guards=[AutocastUse()], sinks=[]) as guardian:
        for _ in range(steps):
            optimizer.zero_grad()
            with model():
                out = net(torch.randn(4, 8))
            with loss():
                value = F.mse_loss(out.float(), torch.ones(4, 8))
            value.backward()
            optimizer.step()
    return guardian.findings


def test_a_model_called_outside_of_the_context_is_told_with_the_line_of_the_loss() -> None:
    (found,) = run(nn.ReLU(), model=nullcontext, loss=bfloat16)
    assert (found.code, found.step) == ("GG510", 0)
    assert "called outside of the context" in found.seen
    assert found.where is not None
    assert found.where.text.startswith("value = F.mse_loss(")


def test_a_function_that_autocast_does_not_know_is_told_with_its_module() -> None:
    (found,) = run(Own(), model=bfloat16, loss=bfloat16)
    assert (found.code, found.module, found.module_class) == ("GG510", "1", "Own")
    assert found.where is not None
    assert found.where.text.startswith("torch.matmul(x")


def test_a_context_for_another_device_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    enabled = torch.is_autocast_enabled
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda" or enabled(kind))
    (found,) = run(nn.ReLU(), model=nullcontext, loss=nullcontext)
    assert "autocast is on for cuda, and the model computes on cpu" in found.seen


@pytest.mark.parametrize(
    ("layer", "model", "loss"),
    [
        (nn.ReLU(), bfloat16, bfloat16),
        (nn.ReLU(), bfloat16, nullcontext),
        (nn.ReLU(), nullcontext, nullcontext),
        (nn.LayerNorm(8), bfloat16, bfloat16),
        (Own(lambda: torch.autocast("cpu", enabled=False)), bfloat16, bfloat16),
    ],
)
def test_a_healthy_use_is_silent(layer: nn.Module, model: Context, loss: Context) -> None:
    assert run(layer, model=model, loss=loss) == ()


def test_settings_are_checked() -> None:
    with pytest.raises(GuardUsageError, match="least is 0"):
        AutocastUse(least=0)
