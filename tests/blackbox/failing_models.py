"""Models that fail in five ways, and their mended twins; another process imports this file by its name."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn


class LogOfZero(nn.Module):
    """A logarithm of what ReLU has set to zero; `eps` mends it."""

    def __init__(self, eps: float = 0.0) -> None:
        super().__init__()
        self.eps = eps
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.log(torch.relu(self.body(x)) + self.eps))
        return logits


class SqrtInBackward(nn.Module):
    """A square root of exact zeros: fine in the forward, infinite in the backward."""

    def __init__(self, eps: float = 0.0) -> None:
        super().__init__()
        self.eps = eps
        self.scale = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        lengths: Tensor = torch.sqrt(self.scale(x).square().sum(1) + self.eps)
        return lengths


class MaskedRows(nn.Module):
    """Attention in which a padded row may see nothing at all."""

    def __init__(self, keep_self: bool = False) -> None:
        super().__init__()
        self.keep_self = keep_self
        self.query = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, lengths: Tensor) -> Tensor:
        scores = self.query(x) @ x.transpose(1, 2)
        hidden = torch.arange(x.shape[1]) >= lengths[:, None]
        if self.keep_self:
            hidden = hidden & (torch.arange(x.shape[1]) > 0)
        weights = torch.softmax(scores.masked_fill(hidden[:, None], float("-inf")), -1)
        return weights @ x


class HalfOverflow(nn.Module):
    """A product that float16 cannot hold."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x) * self.factor
        squares: Tensor = (h * h).float()
        return squares


class DropoutToZero(nn.Module):
    """A mean over what dropout has left: it needs the very same random numbers to fail again."""

    def __init__(self, eps: float = 0.0) -> None:
        super().__init__()
        self.eps = eps
        self.drop = nn.Dropout(0.5)
        self.body = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.drop(torch.ones(3))
        weights = kept / (kept.sum() + self.eps)
        output: Tensor = self.body(x) * weights.sum()
        return output


class OwnLoss(nn.Module):
    """Its loss lies outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.body(x)
        return output


def log_loss(output: Tensor, target: Tensor) -> Tensor:
    return -(torch.softmax(output, -1).log() * target).sum()


def mended_loss(output: Tensor, target: Tensor) -> Tensor:
    return -(torch.log_softmax(output, -1) * target).sum()


def mended_log() -> nn.Module:
    return LogOfZero(eps=1e-3)


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()


class Power(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


class TwoFaults(nn.Module):
    """Fails in one place for large inputs, and in another for negative ones."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.root, self.power = nn.Linear(2, 2), Root(), Power()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.body(self.power(x) if float(x.max()) > 10 else self.root(x))
        return output


class MaskedLog(LogOfZero):
    """Leaves out what has no logarithm after it was taken: harmless in the forward."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.body(x))
        logits: Tensor = self.head(torch.where(h > 0, h.log(), 0.0))
        return logits


class SlowLog(LogOfZero):
    """Takes longer than a person waits."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(100):
            time.sleep(0.01)
            x = x + 0.0
        return super().forward(x)


def slow_log() -> nn.Module:
    return SlowLog()


def other_size() -> nn.Module:
    model = LogOfZero()
    model.head = nn.Linear(4, 3)
    return model


def half() -> nn.Module:
    return HalfOverflow().half()


def no_model() -> str:
    return "no model"


class OnlyMethods(nn.Module):
    """Has no forward: the loop calls a method."""

    def __init__(self, eps: float = 0.0) -> None:
        super().__init__()
        self.eps = eps
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def loss(self, x: Tensor) -> Tensor:
        loss: Tensor = self.head(torch.log(self.body(x).abs() * 0 + self.eps)).mean()
        return loss


def leaves() -> nn.Module:
    """Like a script that does not know the arguments it was called with."""
    raise SystemExit(3)


def broken_factory() -> nn.Module:
    raise RuntimeError("cannot be built")


CAUSES: dict[str, tuple[type[nn.Module], str]] = {
    "log": (LogOfZero, "LogOfZero"),
    "sqrt": (SqrtInBackward, "SqrtInBackward"),
    "mask": (MaskedRows, "MaskedRows"),
    "half": (HalfOverflow, "half"),
    "dropout": (DropoutToZero, "DropoutToZero"),
}
"""For each cause the class, and the name that `--model` takes."""


def inputs(cause: str, step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch of this cause that is healthy before step 2."""
    x = torch.randn(3, 4)
    if cause == "log":
        return (x.abs() + 1 if step < 2 else x * 100,), {}
    if cause == "sqrt":
        return (x if step < 2 else x * torch.tensor([[1.0], [0.0], [1.0]]),), {}
    if cause == "mask":
        lengths = [5, 5, 5] if step < 2 else [5, 0, 5]
        return (torch.randn(3, 5, 4),), {"lengths": torch.tensor(lengths)}
    if cause == "half":
        return (x.half() if step < 2 else x.half() * 3000,), {}
    return (x,), {}
