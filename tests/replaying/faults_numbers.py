"""Functions of single numbers that fail: the marked line, and what is to be told of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .parts import HALF, Fault


def log_of_zero(h: Tensor) -> Tensor:
    gone = h * 0
    return gone.log()  # fault


def log_of_negative(h: Tensor) -> Tensor:
    return (-h.abs() - 1).log() * 2  # fault


def log_of_a_softmax(h: Tensor) -> Tensor:
    p = (h * 1000).softmax(-1)
    return p.log().mean()  # fault


def log1p_of_a_sigmoid(h: Tensor) -> Tensor:
    p = torch.sigmoid(h.abs() * 1000 + 200)
    return torch.log1p(-p)  # fault


def gumbel(h: Tensor) -> Tensor:
    noise = torch.rand_like(h) * 0
    return h - (-noise.log()).log()  # fault


def variance_by_hand(h: Tensor) -> Tensor:
    variance = h.mean() ** 2 - h.pow(2).mean() - 1e-3
    return variance.sqrt()  # fault


def tiny_divisor(h: Tensor) -> Tensor:
    return h / (h * 0 + 1e-6)  # fault


def logit_of_a_label(h: Tensor) -> Tensor:
    label = (h > 0).to(h.dtype)
    return h + torch.logit(label)  # fault


def powers_of_negatives(h: Tensor) -> Tensor:
    exponent = h * 0 + 0.5
    return (-h.abs() - 1) ** exponent  # fault


def cosine_in_half(h: Tensor) -> Tensor:
    return F.cosine_similarity(h * 0, h * 0)  # fault


def fractional_power(h: Tensor) -> Tensor:
    return torch.pow(-h.abs() - 1, 1.5)  # fault


def zero_to_minus_one(h: Tensor) -> Tensor:
    return (h * 0) ** -2  # fault


def constant_feature(h: Tensor) -> Tensor:
    same = h * 0 + 1
    return (same - same.mean(-1, keepdim=True)) / same.std(-1, keepdim=True)  # fault


def zero_vector(h: Tensor) -> Tensor:
    v = h * 0
    out: Tensor = v / v.norm(dim=-1, keepdim=True)  # fault
    return out


def masked_mean(h: Tensor) -> Tensor:
    mask = h > 1e4
    return (h * mask).sum(-1) / mask.sum(-1)  # fault


def one_over_zero(h: Tensor) -> Tensor:
    scale = h.detach() * 0
    return 1 / scale + h  # fault


def mean_of_a_selection(h: Tensor) -> Tensor:
    chosen = h[h > 1e4]
    return chosen.mean()  # fault


def eps_in_half(h: Tensor) -> Tensor:
    v = h * 0
    out: Tensor = v / (v.norm(dim=-1, keepdim=True) + 1e-8)  # fault
    return out


def normalize_in_half(h: Tensor) -> Tensor:
    return F.normalize(h * 0, dim=-1)  # fault


def rsqrt_of_zero(h: Tensor) -> Tensor:
    return torch.rsqrt((h * 0).pow(2).mean(-1, keepdim=True)) * h  # fault


FAULTS = (
    Fault(log_of_zero, "log", "log_of_zero"),
    Fault(log_of_negative, "log", "log_of_negative"),
    Fault(log_of_a_softmax, "log", "log_of_probability"),
    Fault(log1p_of_a_sigmoid, "log1p", "log_of_probability"),
    Fault(gumbel, "log", "log_of_random"),
    Fault(variance_by_hand, "sqrt", "root_of_negative"),
    Fault(tiny_divisor, "division", "tiny_divisor", dtypes=HALF),
    Fault(logit_of_a_label, "logit", "outside_domain"),
    Fault(powers_of_negatives, "pow", "pow_of_negative"),
    Fault(cosine_in_half, "division", "eps_lost", dtypes=HALF),
    Fault(fractional_power, "pow", "pow_of_negative"),
    Fault(zero_to_minus_one, "pow", "zero_to_negative"),
    Fault(constant_feature, "division", "zero_std"),
    Fault(zero_vector, "division", "norm_zero"),
    Fault(masked_mean, "division", "empty_count"),
    Fault(one_over_zero, "reciprocal", "division_by_zero"),
    Fault(mean_of_a_selection, "mean", "mean_of_nothing"),
    Fault(eps_in_half, "division", "eps_lost", dtypes=HALF),
    Fault(normalize_in_half, "division", "eps_lost", dtypes=HALF),
    Fault(rsqrt_of_zero, "rsqrt", "division_by_zero"),
)
