"""A forward that calls backward() itself, and loops that call parts or methods of a model: the model has no result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpt_guard import Finding

from .steps import both, guarded, halting, line, operation, said, sgd


class Trains(nn.Module):
    """Its forward goes to the end of backward(), as some trainers write it."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor, optimizer: torch.optim.Optimizer | None = None) -> dict[str, float]:
        loss = self.function(self.layer(x)).mean()
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        return {"loss": loss.item()}


def bad_loss(h: Tensor) -> Tensor:
    found: Tensor = h / (h - h).norm()  # the line
    return found


def bad_gradient(h: Tensor) -> Tensor:
    return (h - h.detach()).square().sum(0).sqrt()  # the line


@pytest.mark.parametrize(("function", "word"), [(bad_loss, "division"), (bad_gradient, "sqrt")])
@pytest.mark.parametrize("steps", [False, True])
def test_a_backward_inside_of_the_forward_is_replayed_up_to_what_was_bad(
    function: Callable[[Tensor], Tensor], word: str, steps: bool
) -> None:
    model = Trains(function)
    optimizer = sgd(model)
    before = [parameter.clone() for parameter in model.parameters()]
    with halting(guarded(model, optimizer)) as halted:
        model(torch.randn(3, 4), optimizer if steps else None)
        optimizer.step()
    seen = operation(halted.finding)
    assert seen.name == word
    assert "the line" in line(halted.finding)
    assert said(halted.finding).startswith("Reproduced")
    assert all(torch.equal(parameter, old) for parameter, old in zip(model.parameters(), before, strict=True))


class StepsAnother(nn.Module):
    """Steps an optimizer of its own, of which Guardian knows nothing, before it fails."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.free = nn.Linear(4, 4), [torch.zeros(1, requires_grad=True)]
        self.own = torch.optim.AdamW(self.free)

    def forward(self, x: Tensor) -> Tensor:
        (self.free[0] - 1).square().backward()
        self.own.step()
        found: Tensor = self.layer(x) * float("nan")
        return found


@both
def test_a_replay_does_not_step_an_optimizer(reads: Any) -> None:
    model = StepsAnother()
    optimizer = sgd(model)
    with halting(guarded(model, optimizer, reads)) as halted:
        model(torch.randn(3, 4)).mean().backward()
        optimizer.step()
    assert "the forward steps an optimizer itself (AdamW)" in said(halted.finding)
    assert float(model.own.state[model.free[0]]["step"]) == 1.0


class Parts(nn.Module):
    """Without a forward of its own."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.encoder, self.decoder, self.function = nn.Linear(4, 4), nn.Linear(4, 4), function

    def loss(self, x: Tensor) -> Tensor:
        found: Tensor = self.decoder(self.function(self.encoder(x))).mean()
        return found


def overflow(h: Tensor) -> Tensor:
    return torch.exp(h.abs() * 1e4)  # the line


def root(h: Tensor) -> Tensor:
    return (h * 0).sqrt()  # the line


def halted_loop(function: Callable[[Tensor], Tensor], reads: Any, *, watched: bool) -> Finding:
    model = Parts(function)
    optimizer = sgd(model)
    guardian = guarded(model, optimizer, reads)
    loss_of = guardian.watch_loss(model.loss) if watched else model.loss
    with halting(guardian) as halted:
        loss_of(torch.randn(3, 4)).backward()
        optimizer.step()
    return halted.finding


@both
@pytest.mark.parametrize(("function", "word"), [(overflow, "exp"), (root, "sqrt")])
def test_a_loss_function_that_is_told_of_is_replayed_where_the_model_has_no_forward(
    function: Callable[[Tensor], Tensor], word: str, reads: Any
) -> None:
    found = halted_loop(function, reads, watched=True)
    assert operation(found).name == word
    assert "the line" in line(found)
    assert said(found).startswith("Reproduced: ")
    assert "directly, as a penalty" not in said(found)


@both
def test_without_it_the_answer_says_what_to_do(reads: Any) -> None:
    found = halted_loop(overflow, reads, watched=False)
    assert found.operation is None
    assert "the loop calls parts or methods of the model" in said(found)
    assert "guardian.watch_loss(function)" in said(found)


def test_a_loop_that_catches_the_halt_is_halted_again_and_holds_no_batch() -> None:
    model = Parts(lambda h: overflow(h) if float(h.detach().abs().max()) > 50 else h)
    optimizer = sgd(model)
    guardian = guarded(model, optimizer)
    loss_of, caught = guardian.watch_loss(model.loss), []
    with guardian:
        for scale in (1.0, 1e4, 1e4, 1.0, 1e4):
            optimizer.zero_grad()
            try:
                loss_of(torch.randn(3, 4) * scale).backward()
                optimizer.step()
            except FloatingPointError as error:
                caught.append(error.finding.operation.name)  # type: ignore[attr-defined]  # a NonFiniteError has one
        capture = guardian._replayer.capture
        assert capture is not None
        assert capture.now is None
        assert not capture.calls
    assert caught == ["exp"] * 3
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
