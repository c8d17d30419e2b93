"""What is told next: where the evidence points to one cause, its own test and fix; what it excludes comes last."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard import Finding, FiniteGuard, Guardian, NonFiniteError
from gpt_guard.catalogue import entry

Make = Callable[[Tensor], Tensor]
OF_HALF = ["overflow_half", "eps_lost"]


class Own(nn.Module):
    """A layer, and code of the model's own behind it."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        self.layer, self.make = nn.Linear(4, 4), make

    def forward(self, x: Tensor) -> Tensor:
        return self.make(self.layer(x))


def halt(model: nn.Module, loss: Make = lambda out: out.square().mean(), between: Any = None) -> Finding:
    """What stops a step without a replay."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loop() -> None:
        with Guardian(model, optimizer, guards=[FiniteGuard()], sinks=[], summary=False, replay=False):
            for _ in range(3):
                optimizer.zero_grad()
                loss(model(torch.randn(3, 4))).backward()
                if between is not None:
                    between(model, optimizer)
                optimizer.step()

    with pytest.raises(NonFiniteError) as caught:
        loop()
    return caught.value.finding


def causes(code: str) -> dict[str, str]:
    return {cause.text: cause.key for cause in entry(code).causes}


def told(found: Finding, key: str) -> None:
    """Its own words, before all others, in the finding and in what is printed of it."""
    way = entry(found.code).ways[key]
    assert causes(found.code)[found.causes[0]] == key
    assert (found.next_test, found.fix) == (way.next_test, way.fix)


SHOWN_INSIDE: list[tuple[str, Make]] = [
    ("all_masked_row", lambda h: h.masked_fill(torch.ones(3, 4, dtype=torch.bool), -math.inf).softmax(-1)),
    ("log_or_div_zero", lambda h: -(h * 0).log()),
    ("log_or_div_zero", lambda h: h / (h * 0).sum()),
    ("negative_root", lambda h: (-h.square() - 1).sqrt()),
    ("exp_overflow", lambda h: (h.square() * 1e6 + 100).exp()),
    ("zero_std", lambda h: h / h[:1, :1].std()),
]


@pytest.mark.parametrize(("key", "make"), SHOWN_INSIDE)
@pytest.mark.filterwarnings("ignore:std\\(\\)")
def test_an_output_of_which_the_graph_shows_the_operation(key: str, make: Make) -> None:
    found = halt(Own(make))
    assert found.code == "GG101"
    told(found, key)
    # Nothing here is float16.
    assert [causes("GG101")[text] for text in found.causes[-2:]] == OF_HALF


def test_rows_of_minus_infinity_are_told_without_a_graph() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.softmax = nn.Linear(4, 4), nn.Softmax(-1)

        @torch.no_grad()
        def forward(self, x: Tensor) -> Tensor:
            return self.softmax(self.layer(x).masked_fill(torch.ones(3, 4) > 0, -math.inf))  # type: ignore[no-any-return]

    found = halt(Masked())
    assert "3 rows are -inf throughout: softmax makes of that 0/0" in found.seen
    told(found, "all_masked_row")
    assert "float16" not in found.next_test + found.fix


def test_minus_infinity_used_as_a_number() -> None:
    class Used(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.layer(x)
            hidden = hidden.masked_fill(hidden.detach() == hidden.detach().max(), -math.inf)
            return self.last(hidden)  # type: ignore[no-any-return]  # a module call is Any

    told(halt(Used()), "neg_inf_input")


def test_where_nothing_is_shown_the_test_is_that_of_the_code() -> None:
    found = halt(Own(lambda h: h * torch.full((3, 4), math.inf)))
    known = entry("GG101")
    assert (found.next_test, found.fix) == (known.next_test, known.fix)


def test_float16_keeps_its_place_where_it_is_in_play() -> None:
    with torch.autocast("cpu", dtype=torch.float16):
        found = halt(Own(lambda h: -(h.float() * 0).log()))
    told(found, "log_or_div_zero")
    assert "overflow_half" not in [causes("GG101")[text] for text in found.causes[-2:]]


SHOWN_OUTSIDE: list[tuple[str, Make]] = [
    ("all_labels_ignored", lambda out: F.cross_entropy(out, torch.full((3,), -100))),
    ("log_of_zero", lambda out: -((out * 1e4).softmax(-1)).log().mean()),
    ("division_by_zero", lambda out: out.sum() / (out.detach() > 1e9).sum()),
    ("overflow", lambda out: (out.square() * 1e6 + 100).exp().mean()),
    ("bad_target", lambda out: F.mse_loss(out, torch.full((3, 4), math.nan))),
    ("own_loss_code", lambda out: (-out.square() - 1).sqrt().mean()),
]


@pytest.mark.parametrize(("key", "loss"), SHOWN_OUTSIDE)
def test_a_loss_of_which_the_graph_shows_the_operation(key: str, loss: Make) -> None:
    found = halt(nn.Linear(4, 4), loss)
    assert found.code == "GG102"
    told(found, key)


SHOWN_BACKWARD: list[tuple[str, Make]] = [
    ("sqrt_at_zero", lambda out: (out * 0).sqrt().mean()),
    ("norm_at_zero", lambda out: (out * 0).square().sum(-1).sqrt().mean()),
    ("where_unselected", lambda out: torch.where(out > 9e9, (out * 0).sqrt(), out).mean()),
]


@pytest.mark.parametrize(("key", "loss"), SHOWN_BACKWARD)
def test_a_gradient_with_a_steep_operation_on_its_way(key: str, loss: Make) -> None:
    found = halt(nn.Linear(4, 4), loss)
    assert found.code == "GG104"
    told(found, key)
    assert causes("GG104")[found.causes[-1]] == "half_overflow"


def test_a_gradient_that_code_before_the_step_has_spoilt() -> None:
    def divide(model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= 0

    told(halt(nn.Linear(4, 4), between=divide), "hook_or_manual")


def test_a_softmax_on_the_way_of_a_gradient_proves_nothing() -> None:
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0] * math.nan

    found = halt(nn.Linear(4, 4), lambda out: Bad.apply(out.softmax(-1)).square().mean())  # type: ignore[no-untyped-call]
    assert (found.code, found.next_test) == ("GG104", entry("GG104").next_test)


def test_a_step_that_its_settings_explain() -> None:
    def schedule(_model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = math.nan

    found = halt(nn.Linear(4, 4), between=schedule)
    assert found.code == "GG106"
    told(found, "lr_nonfinite")
    assert causes("GG106")[found.causes[-1]] == "adam_eps_half"
