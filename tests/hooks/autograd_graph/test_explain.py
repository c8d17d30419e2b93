"""The autograd graph tells which operation made a bad tensor, and tells nothing where it proves nothing.

Beside it: the labels of a loss, and where float16 is in play.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt_guard.callbacks.base import Guard
from gpt_guard.guardian import Guardian
from gpt_guard.hooks.autograd_graph.explain import Labels, explain, labels_of, no_half
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Observation

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


@pytest.mark.parametrize(("ignored", "given"), [(-100, -100), (2, 2)])
def test_labels_are_counted_from_the_loss_s_own_targets(ignored: int, given: int) -> None:
    logits = torch.randn(4, 5, requires_grad=True)
    loss = F.cross_entropy(logits, torch.tensor([0, ignored, ignored, 1]), ignore_index=given)
    assert labels_of(loss * 2.0) == Labels(4, 2, ignored)


def test_labels_of_an_image_are_counted_too() -> None:
    logits = torch.randn(2, 5, 3, 3, requires_grad=True)
    loss = F.cross_entropy(logits, torch.full((2, 3, 3), -100))
    assert labels_of(loss) == Labels(18, 0, -100)


def test_no_labels_where_there_are_none_or_they_are_gone() -> None:
    logits = torch.randn(4, 5, requires_grad=True)
    assert labels_of(logits.sum()) is None
    loss = F.cross_entropy(logits, torch.zeros(4, dtype=torch.long))
    loss.backward()
    assert labels_of(loss) is None


MakeByModel = Callable[[nn.Module, Tensor], Tensor]


class Keeping(Guard):
    """Keeps what guards are given."""

    def attach(self, watch: Watch) -> None:
        super().attach(watch)
        self.given = watch

    def judge(self, seen: Observation) -> Iterable[Finding]:
        return ()


def answer(make: MakeByModel, model: nn.Module | None = None, context: Any = None, reads: Any = "immediate") -> bool:
    """What `no_half` says of the tensor that `make` gives, asked outside of the context in which it was made."""
    model = model or nn.Linear(4, 4)
    guard = Keeping()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Guardian(model, optimizer, guards=[guard], sinks=[], reads=reads):
        with context or nullcontext():
            tensor = make(model, torch.randn(2, 4))
        return no_half(guard.given, tensor)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return torch.log(model(x).float().square()).sum()


@torch.no_grad()
def without_graph(model: nn.Module, x: Tensor) -> Tensor:
    return loss(model, x)


def half(dtype: torch.dtype) -> torch.autocast:
    return torch.autocast("cpu", dtype=dtype)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (lambda: answer(loss), True),
        (lambda: answer(loss, reads="per_step"), True),
        (lambda: answer(loss, context=half(torch.bfloat16)), True),
        (lambda: answer(loss, context=half(torch.float16)), False),
        (lambda: answer(lambda model, x: model(x).half().float().sum()), False),
        (lambda: answer(lambda model, x: torch.zeros(3), nn.Linear(4, 4).half()), False),
        (lambda: answer(without_graph), True),
        (lambda: answer(without_graph, reads="per_step"), False),
    ],
    ids=["float32", "late", "bfloat16", "autocast", "cast in between", "weights", "no graph", "no graph, late"],
)
def test_what_speaks_of_float16(made: Callable[[], bool], expected: bool) -> None:
    assert made() is expected


def test_autocast_that_is_on_now() -> None:
    model, guard = nn.Linear(4, 4), Keeping()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Guardian(model, optimizer, guards=[guard], sinks=[]):
        with half(torch.float16):
            assert not no_half(guard.given, torch.zeros(2))
        assert no_half(guard.given, torch.zeros(2))
        assert not no_half(guard.given, None)
        guard.given.scaling = True
        assert not no_half(guard.given, torch.zeros(2))
