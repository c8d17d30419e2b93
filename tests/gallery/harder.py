"""Where the place is harder to see: random numbers, writes in place, hooks, functions of one's own, checkpointing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .nets import BATCH, GPT, WIDTH, Attention, Encoder, features, shifted
from .parts import ALL, FULL, HALVES, Case, Training


class Renormalised(Attention):
    """Dropout on the weights, which are then made to sum to 1 again: at times nothing is left of a row."""

    def weights(self, query: Tensor, key: Tensor, keep: Tensor | None) -> Tensor:
        weights = F.dropout(super().weights(query, key, keep), 0.5)
        return weights / weights.sum(-1, keepdim=True)


class InPlace(nn.Module):
    """Centred and scaled in place, to save memory."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x -= x.mean(0)
        x /= x.std(0)
        return x


class Unit(torch.autograd.Function):
    """A straight-through estimator whose backward makes the gradient one of length 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (grad,) = grads
        out: Tensor = grad / grad.norm(dim=-1, keepdim=True)
        return out


class Binary(nn.Module):
    """A net with a binary layer; samples of weight 0 send no gradient back."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        code = Unit.apply(self.hidden(x))  # type: ignore[no-untyped-call]  # torch gives it no types
        out: Tensor = (self.out(code)[:, 0].square() * weight).mean()
        return out


class Balanced(nn.Module):
    """Two tasks; the gradient that each sends into the shared layer is scaled to length 1 by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.first, self.second = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor, weight: float) -> Tensor:
        h = torch.tanh(self.shared(x))
        h1, h2 = h.clone(), h.clone()
        for each in (h1, h2):
            each.register_hook(lambda grad: grad / grad.norm())
        return F.mse_loss(self.first(h1), y) + weight * F.mse_loss(self.second(h2), y)


class Distant(nn.Module):
    """A block that is checkpointed: pairwise distances by hand, with 0 on the diagonal."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        h = self.lift(x)
        distance = (h[:, :, None] - h[:, None]).square().sum(-1).sqrt()
        out: Tensor = self.out((-distance).softmax(-1) @ h)
        return out


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(Distant)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.gpt.tokens(ids)
        for block in self.gpt.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return F.cross_entropy(self.gpt.head(x).flatten(0, 1), targets.flatten())


class Contrast(nn.Module):
    """A criterion that is a module of its own."""

    def forward(self, z: Tensor, labels: Tensor) -> Tensor:
        likeness = (z @ z.T).fill_diagonal_(-torch.inf).softmax(-1)
        return -(likeness.log() * (labels[:, None] == labels)).sum(-1).mean()


class Growing(nn.Module):
    """A recurrent net without a bound on its state."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.out = nn.Linear(8, 8), nn.Linear(8, 1)
        with torch.no_grad():
            self.step.weight.copy_(50 * torch.eye(8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for position in range(x.size(1)):
            state = F.relu(self.step(state) + x[:, position])
        return F.mse_loss(self.out(state), y)


class Alone(nn.Module):
    """Positions from 0 to 1, of a text that may be one token long."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Encoder(outputs=1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        length = x.size(1)
        places = torch.arange(length, dtype=x.dtype) / (length - 1)
        return F.mse_loss(self.net(x + places[:, None]).mean(1), y)


class FakeQuantised(nn.Module):
    """Weights rounded to 8 bits, with a scale for each channel; one channel was pruned to 0."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        with torch.no_grad():
            self.inner.weight[3] = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weight = self.inner.weight
        scale = weight.detach().abs().amax(1, keepdim=True) / 127
        steps = weight / scale
        rounded = (steps + (steps.round() - steps).detach()) * scale
        return F.mse_loss(F.linear(x, rounded, self.inner.bias), y)


def nothing_left_by_dropout() -> Training:
    """Rows of which dropout leaves nothing, divided by their sum."""
    return Training(GPT(Renormalised), [(shifted(), ())])


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.net = InPlace(), Encoder(outputs=1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.net(self.scale(x)), y)


def scaled_in_place() -> Training:
    """A constant feature, divided in place by a deviation of 0."""
    x = features()
    x[:, 1] = 2
    return Training(Scaled(), [((x, features(BATCH, 1)), ())])


def own_backward() -> Training:
    """A backward of one's own that divides by the length of a gradient of 0."""
    return Training(Binary(), [((features(), torch.tensor([1.0, 0, 1, 1])), ())])


def hook_on_gradient() -> Training:
    """A hook that scales a gradient to length 1, for a task whose weight is 0."""
    return Training(Balanced(), [((features(), features(BATCH, 1), 0.0), ())])


def checkpointed_distance() -> Training:
    """The root of a distance of 0, in a block that the backward runs a second time."""
    return Training(Checkpointed(), [(shifted(), ())])


def criterion_of_its_own() -> Training:
    """A criterion that is a module: the logarithm of a softmax whose diagonal was masked."""
    return Training(Encoder(), [((features(),), (torch.tensor([0, 0, 1, 1]),))], Contrast())


def state_without_bound() -> Training:
    """A state that is multiplied at each of 40 positions."""
    return Training(Growing(), [((torch.randn(BATCH, 40, 8), features(BATCH, 1)), ())])


def text_of_one_token() -> Training:
    """Positions divided by length - 1."""
    return Training(Alone(), [((torch.randn(BATCH, 1, 8), features(BATCH, 1)), ())])


def pruned_channel() -> Training:
    """A quantisation step of 0."""
    return Training(FakeQuantised(), [((features(), features()), ())])


FIRST = "blocks.0.attn"
CASES = (
    Case(nothing_left_by_dropout, "division", FIRST, "weights / weights.sum(-1", "division_by_zero", runs=ALL),
    Case(scaled_in_place, "division", "scale", "x /= x.std(0)", "zero_std", runs=ALL),
    Case(own_backward, "division", "", "grad / grad.norm(dim=-1", "norm_zero", "backward", runs=ALL),
    Case(hook_on_gradient, "division", "", "lambda grad: grad / grad.norm()", "norm_zero", "backward", runs=ALL),
    Case(
        checkpointed_distance,
        "sqrt",
        "gpt.blocks.1.attn",
        ".square().sum(-1).sqrt()",
        "norm_at_zero",
        "backward",
        runs=ALL,
    ),
    Case(criterion_of_its_own, "log", None, "likeness.log()", "log_of_probability", runs=ALL),
    Case(state_without_bound, "matmul", "step", "self.step(state)", "matmul_overflow", runs=FULL + HALVES),
    Case(text_of_one_token, "division", "", "/ (length - 1)", "division_by_zero", runs=ALL),
    Case(pruned_channel, "division", "", "weight / scale", "division_by_zero", runs=ALL),
)
