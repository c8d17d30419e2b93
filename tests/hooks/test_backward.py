"""Each outermost backward is told once, with its losses, to everyone; whoever began also ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpt_guard.hooks.backward import BACKWARD, in_backward


class Listener:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.losses: list[tuple[Tensor, ...]] = []
        self.concerned = True
        self.fail_at = ""

    def _note(self, what: str) -> None:
        self.calls.append(what)
        if what == self.fail_at:
            raise ArithmeticError(what)

    def backward_begins(self, losses: tuple[Tensor, ...]) -> bool:
        self.losses.append(losses)
        self._note("begins")
        return self.concerned

    def backward_ended(self) -> None:
        self._note("ended")

    def backward_failed(self) -> None:
        self._note("failed")


@pytest.fixture
def pair() -> Iterator[tuple[Listener, Listener]]:
    first, second = Listener(), Listener()
    BACKWARD.add(first)
    BACKWARD.add(second)
    yield first, second
    BACKWARD.remove(second)
    BACKWARD.remove(first)


def leaf() -> Tensor:
    return torch.ones(2, requires_grad=True)


def test_both_spellings_and_every_kind_of_argument(pair: tuple[Listener, Listener]) -> None:
    x = leaf()
    x.sum().backward()
    torch.autograd.backward(x.sum())
    torch.autograd.backward(tensors=[x.sum(), x.prod()])
    iterator: Any = iter((x.sum(), x.prod()))
    torch.autograd.backward(iterator)
    torch.autograd.backward(torch.autograd.graph.get_gradient_edge(x.sum()), torch.ones(()))
    x.mul(2).backward(torch.ones(2), inputs=[x])
    assert [len(losses) for losses in pair[0].losses] == [1, 1, 2, 2, 0, 1]
    assert pair[0].calls == ["begins", "ended"] * 6
    assert pair[1].calls == pair[0].calls
    assert x.grad is not None
    assert x.grad.tolist() == [9.0, 9.0]


def test_reentrant_checkpointing_is_one_backward(pair: tuple[Listener, Listener]) -> None:
    layer = nn.Linear(2, 2)
    checkpoint(layer, leaf(), use_reentrant=True).sum().backward()
    assert pair[0].calls == ["begins", "ended"]
    assert layer.weight.grad is not None


def test_it_is_known_that_autograd_is_at_work() -> None:
    seen: list[bool] = []
    x = leaf()
    y = x.sum()
    y.register_hook(lambda grad: seen.append(in_backward()))
    y.backward()
    assert seen == [True]
    assert not in_backward()


@pytest.mark.parametrize("fails", ["begins", "ended"])
def test_one_that_halts_leaves_the_other_ready(pair: tuple[Listener, Listener], fails: str) -> None:
    first, second = pair
    first.fail_at = fails
    x = leaf()
    with pytest.raises(ArithmeticError, match=fails):
        x.sum().backward()
    assert second.calls in ([], ["begins", "failed"])
    assert (x.grad is None) == (fails == "begins")
    first.fail_at = ""
    second.calls.clear()
    x.sum().backward()
    assert second.calls == ["begins", "ended"]


def test_one_that_began_is_told_when_another_halts_or_torch_fails(pair: tuple[Listener, Listener]) -> None:
    first, second = pair
    second.fail_at = "begins"
    with pytest.raises(ArithmeticError):
        leaf().sum().backward()
    assert first.calls == ["begins", "failed"]
    second.fail_at = ""
    first.calls.clear()
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.ones(()).backward()
    assert first.calls == ["begins", "failed"]


def test_one_that_is_not_concerned_hears_no_more(pair: tuple[Listener, Listener]) -> None:
    pair[0].concerned = False
    leaf().sum().backward()
    assert pair[0].calls == ["begins"]
    assert pair[1].calls == ["begins", "ended"]


def test_somebody_elses_wrapper_between_does_not_double(
    pair: tuple[Listener, Listener], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours: Any = torch.autograd.backward
    with monkeypatch.context() as other:
        other.setattr(torch.autograd, "backward", lambda *args, **kwargs: ours(*args, **kwargs))
        third = Listener()
        BACKWARD.add(third)
        leaf().sum().backward()
        BACKWARD.remove(third)
        # Theirs calls ours, and a new one of ours is on top of it: still one event.
        assert third.calls == pair[0].calls == ["begins", "ended"]
