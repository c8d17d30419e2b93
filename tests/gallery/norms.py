"""Normalisation of one's own that goes wrong: deviations, statistics, an eps that is lost, whitening."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .nets import BATCH, GPT, Encoder, features, shifted
from .parts import ALL, FULL, HALF, MIXED, WIDE, Case, Training


class Standardised(nn.Module):
    """Each feature over the batch, by hand."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.std(0) + 1e-5)


class Tabular(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.net = norm, Encoder(outputs=1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.net(self.norm(x)), y)


class ScaledByDeviation(nn.Module):
    """The same without an eps, for a feature that may be constant."""

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(0)
        return centred / x.std(dim=0)


class TinyEps(nn.Module):
    """A layer norm by hand with the eps of a paper."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return self.gain * centred / (centred.std(-1, keepdim=True) + 1e-8)


class FrozenNorm(nn.Module):
    """A batch norm whose statistics come from a checkpoint, folded to one factor; no eps."""

    mean: Tensor
    variance: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("variance", torch.ones(width))
        self.variance[0] = 0

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) * self.variance.rsqrt()


class Moments(nn.Module):
    """A variance as the difference of two moments, of values far from 0."""

    def forward(self, x: Tensor) -> Tensor:
        far = x * 0.01 + 1000
        variance = (far * far).mean(0) - far.mean(0) ** 2
        return (far - far.mean(0)) / (variance.sqrt() + 1e-3)


class ZeroInitialised(nn.Module):
    """Weight norm round a layer whose weight begins at 0."""

    def __init__(self) -> None:
        super().__init__()
        last = nn.Linear(8, 8)
        nn.init.zeros_(last.weight)
        self.last = nn.utils.parametrizations.weight_norm(last)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.last(x)
        return out


class Whitening(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(8, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.hidden(x)
        centred = h - h.mean(0)
        values, vectors = torch.linalg.eigh(centred.T @ centred + 1e-3 * torch.eye(6))
        return F.mse_loss(self.out(h @ vectors / values.sqrt()), y)


def last_batch_of_one() -> Training:
    """A standard deviation over the batch, and a last batch of one sample."""
    batches = [((features(count), features(count, 1)), ()) for count in (4, 4, 1)]
    return Training(Tabular(Standardised()), batches)


def constant_feature() -> Training:
    """A feature that is the same in each sample, divided by its standard deviation."""
    x = features()
    x[:, 3] = 1.5
    return Training(Tabular(ScaledByDeviation()), [((x, features(BATCH, 1)), ())])


def eps_lost_in_half() -> Training:
    """An eps of 1e-8, which float16 does not have, and an embedding of padding that is 0."""
    model = GPT(norm=TinyEps)
    with torch.no_grad():
        model.tokens.weight[1], model.positions.weight[0] = 0, 0
    inputs, targets = shifted()
    inputs[0, 0] = 1
    return Training(model, [((inputs, targets), ())])


def frozen_norm_without_eps() -> Training:
    """Statistics of a checkpoint in which a channel never had a signal."""
    return Training(Tabular(FrozenNorm(8)), [((features(), features(BATCH, 1)), ())])


def negative_running_var() -> Training:
    """A frozen batch norm whose running variance an average of checkpoints has made negative."""
    norm = nn.BatchNorm1d(8).eval()
    assert norm.running_var is not None
    norm.running_var[2] = -0.1
    return Training(Tabular(norm), [((features(), features(BATCH, 1)), ())])


def variance_by_moments() -> Training:
    """mean(x²) - mean(x)² is below 0 by rounding."""
    return Training(Tabular(Moments()), [((features(), features(BATCH, 1)), ())])


def weight_norm_of_zero() -> Training:
    """A weight of 0 has no direction: weight norm divides by its length."""
    return Training(Tabular(ZeroInitialised()), [((features(), features(BATCH, 1)), ())])


def equal_eigenvalues() -> Training:
    """Whitening of equal samples: the eigenvalues are equal too, and the derivative divides by their differences."""
    return Training(Whitening(), [((features(1).expand(4, 8).clone(), features(4, 1)), ())])


CASES = (
    Case(last_batch_of_one, "std", "norm", "(x.std(0) + 1e-5)", "std_of_one", runs=ALL),
    Case(constant_feature, "division", "norm", "centred / x.std(dim=0)", "zero_std", runs=ALL),
    Case(eps_lost_in_half, "division", "blocks.0.norm1", "keepdim=True) + 1e-8)", "eps_lost", runs=HALF),
    Case(frozen_norm_without_eps, "rsqrt", "norm", "self.variance.rsqrt()", "division_by_zero", runs=ALL),
    Case(negative_running_var, "batch norm", "norm", "self.net(self.norm(x))", "running_var", runs=WIDE),
    Case(
        weight_norm_of_zero,
        "weight norm",
        "norm.last.parametrizations.weight.0",
        "x + self.last(x)",
        "norm_zero",
        runs=FULL,
    ),
    Case(
        variance_by_moments,
        "sqrt",
        "norm",
        "variance.sqrt() + 1e-3",
        "root_of_negative",
        runs=MIXED,
    ),
    Case(equal_eigenvalues, "eigh", "", "torch.linalg.eigh(", "decomposition", "backward", runs=FULL),
)
