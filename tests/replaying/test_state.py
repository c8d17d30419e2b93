"""State that modules keep for themselves: noticed when it is written to, and lent out as copies."""

from __future__ import annotations

import torch
from torch import nn

from gpt_guard.replaying.state import OwnState, lend_copies


class Keeping(nn.Linear):
    """Keeps something of every kind."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls = 0
        self.seen = [1]
        self.cache: dict[str, int] = {}
        self.last = torch.ones(2)
        self.helper = object()


def model() -> tuple[nn.Sequential, Keeping]:
    keeping = Keeping()
    return nn.Sequential(keeping, nn.BatchNorm1d(2)), keeping


def test_a_module_that_is_left_alone_has_changed_nothing() -> None:
    net, keeping = model()
    state = OwnState(net)
    net.eval()
    net(torch.ones(3, 2))
    keeping.calls = 0
    lend_copies(net)
    assert state.changed() == []


def test_what_is_written_to_is_named() -> None:
    net, keeping = model()
    state = OwnState(net)
    net(torch.randn(3, 2))
    keeping.calls += 1
    keeping.seen.append(2)
    keeping.cache["x"] = 1
    keeping.last.add_(1)
    keeping.helper = object()
    names = ["0.calls", "0.seen", "0.cache", "0.last", "0.helper"]
    assert sorted(state.changed()) == sorted([*names, "1.running_mean", "1.running_var", "1.num_batches_tracked"])


def test_what_is_lent_is_the_same_in_two_places_and_not_the_original() -> None:
    first, second = Keeping(), Keeping()
    second.seen = seen = first.seen
    lend_copies(nn.Sequential(first, second))
    first.seen.append(2)
    assert second.seen == [1, 2]
    assert seen == [1]
