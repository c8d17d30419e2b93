"""Functions that are finite while their derivative is not: the marked line, and what is to be told of it."""

from __future__ import annotations

import torch
from torch import Tensor

from .parts import FULL, HALF, INF, Fault


def sqrt_at_zero(h: Tensor) -> Tensor:
    return (h * 0).sqrt()  # fault


def distance_by_hand(h: Tensor) -> Tensor:
    return (h - h.detach()).pow(2).sum(-1).sqrt()  # fault


def deviation_by_hand(h: Tensor) -> Tensor:
    return (h * 0 + 1).var(-1).sqrt()  # fault


def root_by_power(h: Tensor) -> Tensor:
    return (h * 0) ** 0.5  # fault


def where_over_log(h: Tensor) -> Tensor:
    x = h * 0
    out = x.log()  # fault
    return torch.where(x > 0, out, 0.0)


def where_over_division(h: Tensor) -> Tensor:
    x = h * 0
    out = h / x  # fault
    return torch.where(x > 0, out, 0.0)


def where_over_sqrt(h: Tensor) -> Tensor:
    x = h * 0
    return torch.where(x > 0, x.sqrt(), 0.0)  # fault


def where_over_exp(h: Tensor) -> Tensor:
    x = h * 0 + 1000
    return torch.where(x < 10, x.exp(), x)  # fault


def logsumexp_left_out(h: Tensor) -> Tensor:
    scores = h + torch.tensor([[0.0], [-INF], [0.0]]).to(h.dtype)
    rows = torch.logsumexp(scores, -1)  # fault
    return rows[rows.isfinite()]


def masked_rows_left_out(h: Tensor) -> Tensor:
    scores = h.masked_fill(torch.tensor([[True], [False], [False]]), -INF)
    weights = scores.softmax(-1)  # fault
    return (weights @ h.t())[1:]


def product_with_a_mask(h: Tensor) -> Tensor:
    keep = torch.tensor([[1.0], [0.0], [1.0]]).to(h.dtype)
    return ((h * h * keep).sum(-1).sqrt() * keep[:, 0]).mean()  # fault


def acos_at_one(h: Tensor) -> Tensor:
    return (h * 0 + 1).acos()  # fault


def eigenvectors_of_identity(h: Tensor) -> Tensor:
    out: Tensor = torch.linalg.eigh(torch.eye(4) + h.sum() * 0)[1]  # fault
    return out


def gradient_beyond_half(h: Tensor) -> Tensor:
    small = h * 300  # fault
    return small.float() * 1e4


FAULTS = (
    Fault(sqrt_at_zero, "sqrt", "sqrt_at_zero", "backward"),
    Fault(distance_by_hand, "sqrt", "norm_at_zero", "backward"),
    Fault(deviation_by_hand, "sqrt", "std_at_zero", "backward"),
    Fault(root_by_power, "pow", "pow_at_zero", "backward"),
    Fault(where_over_log, "log", "where_unselected", "backward"),
    Fault(where_over_division, "division", "where_unselected", "backward"),
    Fault(where_over_sqrt, "sqrt", "where_unselected", "backward"),
    # exp is the one that fails in the forward, is masked there, and is met again by its derivative.
    Fault(where_over_exp, "exp", "where_unselected", "again", dtypes=FULL),
    Fault(logsumexp_left_out, "logsumexp", "where_unselected", "backward"),
    Fault(masked_rows_left_out, "softmax", "fully_masked_row", "again"),
    Fault(product_with_a_mask, "sqrt", "where_unselected", "backward"),
    Fault(acos_at_one, "acos", "edge_of_domain", "backward"),
    Fault(eigenvectors_of_identity, "eigh", "decomposition", "backward", dtypes=FULL),
    Fault(gradient_beyond_half, "multiplication", "gradient_overflow", "backward", dtypes=HALF),
)
