"""The autograd graph tells which operation made a bad tensor, and tells nothing where it proves nothing."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_guard.hooks.autograd_graph.explain import explain

Make = Callable[[Tensor], Tensor]

BAD: list[tuple[str, str, Make]] = [
    ("log", "log_of_zero", lambda w: -torch.log((w * 1e4).softmax(-1)).mean()),
    ("log", "negative_root", lambda w: torch.log(w).mean()),
    ("sqrt", "negative_root", lambda w: torch.sqrt(w).sum()),
    ("rsqrt", "log_or_div_zero", lambda w: torch.rsqrt(w * 0).sum()),
    ("division", "log_or_div_zero", lambda w: (w / (w * 0).sum()).sum()),
    ("exp", "exp_overflow", lambda w: torch.exp(w * 1e4).sum()),
    ("softmax", "all_masked_row", lambda w: (w + torch.full_like(w, -math.inf)).softmax(-1).sum()),
    ("softmax", "all_masked_row", lambda w: (w + torch.full_like(w, -math.inf)).log_softmax(0).sum()),
    ("std", "zero_std", lambda w: torch.var_mean(w[:1], 0)[0].sum() + w[:1].std(0).sum()),
    ("pow", "negative_root", lambda w: (w**0.5).sum()),
    ("pow", "log_or_div_zero", lambda w: ((w * 0) ** -1).sum()),
    ("cross entropy", "all_labels_ignored", lambda w: F.cross_entropy(w, torch.full((4,), -100))),
    ("cross entropy", "all_labels_ignored", lambda w: F.cross_entropy(w, torch.zeros(4).long(), ignore_index=0)),
    ("loss", "bad_target", lambda w: F.mse_loss(w, torch.full((4, 8), math.nan))),
    ("loss", "bad_target", lambda w: F.binary_cross_entropy_with_logits(w, torch.full((4, 8), math.nan))),
    ("matmul", "overflow_half", lambda w: ((w.half() * 300) @ (w.half() * 300).T).softmax(-1).sum()),
    ("matmul", "overflow_half", lambda w: torch.bmm(w.half()[None] * 400, w.half()[None].mT * 400)),
]


@pytest.mark.parametrize(("name", "cause", "make"), BAD)
@pytest.mark.filterwarnings("ignore:(std|var|var_mean)\\(\\)")
def test_the_operation_is_named(name: str, cause: str, make: Make) -> None:
    bad = make(torch.randn(4, 8, requires_grad=True))
    assert not torch.isfinite(bad).all()
    operation = explain(bad)
    assert operation is not None
    assert (operation.name, operation.cause) == (name, cause)


GOOD: list[Make] = [
    lambda w: F.cross_entropy(w, torch.tensor([1, 2, 3, -100])),
    lambda w: (w**2).sum().sqrt().log(),
    lambda w: (w / w.norm()).exp().softmax(-1).std(),
]


@pytest.mark.parametrize("make", GOOD)
def test_nothing_is_said_of_a_healthy_graph(make: Make) -> None:
    assert explain(make(torch.randn(4, 8, requires_grad=True))) is None


def test_numbers_of_the_evidence_are_those_of_the_tensor() -> None:
    weight = torch.tensor([1.0, 0.0, 0.0], requires_grad=True)
    operation = explain(torch.log(weight).sum())
    assert operation is not None
    assert operation.shows == "log of 2 zeros"


@pytest.mark.parametrize(
    ("shows", "make"),
    [
        ("log of 1 zero", lambda w: torch.log(w)),
        ("log of 1 negative number (lowest -0.5)", lambda w: torch.log(w - 0.5)),
        ("sqrt of 1 negative number", lambda w: torch.sqrt(w - 1)),
        ("1 / sqrt of 1 zero", lambda w: torch.rsqrt(w)),
        ("division by 1 zero", lambda w: torch.ones(2) / w),
        ("exp overflowed in 1 element", lambda w: torch.exp((w + 0.5) * 100)),
        ("softmax gave NaN in 1 row", lambda w: (w * 0 - math.inf).softmax(-1)),
        ("std over a single element, 1 time", lambda w: w[:1].std()),
        ("1 zero to the power of -1", lambda w: w**-1),
        ("1 negative number to the power of 0.5", lambda w: (w - 1) ** 0.5),
        ("1 of 2 targets is NaN or infinite", lambda w: F.mse_loss(w, torch.tensor([math.nan, 1.0]))),
    ],
)
@pytest.mark.filterwarnings("ignore:std\\(\\)")
def test_one_of_a_kind_is_said_in_the_singular(shows: str, make: Make) -> None:
    operation = explain(make(torch.tensor([0.0, 1.0], requires_grad=True)))
    assert operation is not None
    assert operation.shows == shows


def test_an_operation_on_values_that_were_bad_already_is_not_blamed() -> None:
    weight = torch.tensor([1.0, math.nan, 0.0], requires_grad=True)
    assert explain(torch.log(weight).sum()) is None


def test_a_freed_graph_and_a_tensor_without_one_are_no_trouble() -> None:
    weight = torch.zeros(3, requires_grad=True)
    loss = torch.log(weight).sum()
    loss.backward()
    assert explain(loss) is None
    assert explain(torch.tensor(math.nan)) is None
