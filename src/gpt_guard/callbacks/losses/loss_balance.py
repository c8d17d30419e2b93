"""Gradient norms of several losses on the parameters that they share, and whether they pull the same way."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from gpt_guard.errors import GuardUsageError
from gpt_guard.records.render import number

Gradients = Sequence[Tensor | None]


@dataclass(frozen=True)
class LossBalance:
    """What each loss asks of the shared parameters: gradient norms by name, cosines by pair, how many are shared.

    All norms are L2 norms over the same parameters, of the losses as they were given, weights included. A cosine of -1
    means that two losses pull in opposite directions, 0 that they do not touch each other; NaN without a gradient.
    `unshared` are the names of losses that reach none of the shared parameters.
    """

    norms: dict[str, float]
    cosines: dict[tuple[str, str], float]
    shared: int
    unshared: tuple[str, ...] = ()

    @property
    def ratio(self) -> float:
        """The largest norm over the smallest that is not zero; 1 for a single one."""
        positive = [norm for norm in self.norms.values() if norm > 0]
        return max(positive) / min(positive) if positive else 1.0

    def __str__(self) -> str:
        width = max((len(name) for name in self.norms), default=0)
        lines = [f"gradient norms on {self.shared} shared parameters"]
        lines += [f"  {name:<{width}}  {number(norm)}" for name, norm in self.norms.items()]
        lines += [f"  cosine of {one} and {other}: {value:.3f}" for (one, other), value in self.cosines.items()]
        return "\n".join(lines)


def loss_balance(losses: Mapping[str, Tensor], parameters: nn.Module | Iterable[Tensor]) -> LossBalance:
    """Compare what several losses of one batch ask of the parameters that they share; for a notebook or a test.

    Each loss is a scalar with a graph, which is kept, so that `backward()` can follow; gradients in `.grad` are not
    touched, but hooks of your own in the graph run. Costs one backward for each loss, and reads the device. Equal
    norms are no goal in themselves (GradNorm, Chen et al. 2018, makes them one); factors of a thousand are a mistake.
    Raises GuardUsageError for a loss that is no scalar or has no graph, and where no parameter is shared.
    """
    wanted = _checked(losses, parameters)
    gradients = {
        name: torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True) for name, loss in losses.items()
    }
    balance = balanced(gradients)
    if not balance.shared:
        raise GuardUsageError(f"no parameter gets a gradient from two of these losses: {', '.join(losses)}")
    return balance


def _checked(losses: Mapping[str, Tensor], parameters: nn.Module | Iterable[Tensor]) -> list[Tensor]:
    if not isinstance(losses, Mapping) or len(losses) < 2:
        raise GuardUsageError('loss_balance takes two losses or more by name: loss_balance({"a": a, "b": b}, model)')
    for name, loss in losses.items():
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            kind = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise GuardUsageError(
                f"loss_balance: {name!r} is no scalar with a graph ({kind}); give it before backward()"
            )
    given: Any = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    wanted = [each for each in given if isinstance(each, Tensor) and each.requires_grad]
    if not wanted:
        raise GuardUsageError("loss_balance: none of these parameters requires a gradient")
    return wanted


def balanced(gradients: Mapping[str, Gradients]) -> LossBalance:
    """Norms and cosines over the parameters that at least two losses reach; reads the device."""
    count = len(next(iter(gradients.values()), ()))
    shared = [k for k in range(count) if sum(each[k] is not None for each in gradients.values()) > 1]
    # In float64, a square neither overflows nor vanishes.
    norms = {name: math.sqrt(_dot(each, each, shared)) for name, each in gradients.items()}
    cosines = {}
    for one, other in combinations(gradients, 2):
        product = norms[one] * norms[other]
        dot = _dot(gradients[one], gradients[other], shared)
        cosines[one, other] = max(-1.0, min(1.0, dot / product)) if product > 0 else math.nan
    unshared = tuple(name for name, each in gradients.items() if all(each[k] is None for k in shared))
    return LossBalance(norms, cosines, len(shared), unshared)


def _dot(one: Gradients, other: Gradients, shared: Iterable[int]) -> float:
    parts = []
    for k in shared:
        left, right = one[k], other[k]
        if left is not None and right is not None:
            dense = [each.to_dense() if each.layout is not torch.strided else each for each in (left, right)]
            parts.append((dense[0].detach().double() * dense[1].detach().double()).sum())
    return float(torch.stack([part.cpu() for part in parts]).sum()) if parts else 0.0
