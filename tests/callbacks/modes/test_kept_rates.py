"""A dropout rate that a forward in an evaluation changes for good; schedules and local changes are silent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard import Finding, Guardian


class Net(nn.Module):
    """Functional dropout by an attribute; `before` may write to the module as its forward begins."""

    def __init__(self, before: Callable[[Net], None] = lambda net: None) -> None:
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(4, 16), nn.Dropout(0.2), nn.Linear(16, 2)
        self.dropout_p = 0.2
        self.p_seen = 0.0
        self.before = before

    def forward(self, x: Tensor) -> Tensor:
        self.before(self)
        hidden = F.dropout(self.first(x), self.dropout_p, self.training)
        out: Tensor = self.second(self.drop(hidden))
        return out


def zero(net: Net) -> None:
    if not net.training:
        net.dropout_p = 0.0


def zero_module(net: Net) -> None:
    if not net.training:
        net.drop.p = 0.0


def said(net: Net, between: Callable[[Net], None] = lambda net: None) -> list[Finding]:
    torch.manual_seed(0)
    model = nn.Sequential(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Guardian(model, optimizer, sinks=[], summary=False) as guardian:
        for _epoch in range(3):
            for _ in range(5):
                optimizer.zero_grad()
                model(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()
            with guardian.evaluating():
                model(torch.randn(8, 4))
                model(torch.randn(8, 4))
            between(net)
    return [each for each in guardian.findings if each.code == "GG513"]


@pytest.mark.parametrize(("before", "name"), [(zero, "0.dropout_p"), (zero_module, "0.drop.p")])
def test_it_is_told_in_the_first_step_after_the_evaluation(before: Callable[[Net], None], name: str) -> None:
    (found,) = said(Net(before))
    assert (found.code, found.step) == ("GG513", 5)
    assert f"`{name}` 0.2 -> 0" in found.seen
    assert found.where is not None


def restored(net: Net) -> None:
    net.dropout_p = 0.2


def scheduled(net: Net) -> None:
    net.dropout_p *= 0.5
    net.drop.p = max(0.0, net.drop.p - 0.05)


def counts(net: Net) -> None:
    net.p_seen = min(1.0, net.p_seen + 0.01)


@pytest.mark.parametrize(
    ("net", "between"),
    [(Net(), scheduled), (Net(zero), restored), (Net(counts), lambda net: None), (Net(), lambda net: None)],
    ids=["a schedule between epochs", "put back after the evaluation", "a counter", "nothing"],
)
def test_schedules_and_what_is_put_back_are_silent(net: Net, between: Callable[[Net], None]) -> None:
    assert said(net, between) == []
