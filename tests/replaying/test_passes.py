"""Losses computed outside of the model, forwards that call backward() themselves, and failures after healthy steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard import Finding

from .steps import (
    Net,
    Reads,
    both,
    guarded,
    halt,
    halting,
    line,
    operation,
    root_at_zero,
    root_of_negative,
    said,
    same,
    sgd,
)


class LogOfZero(nn.Module):
    """Returns -inf, which no guard stops at: a mask looks like that."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x).clamp(max=0).mul(0).abs().log()
        return found


@both
def test_an_output_of_minus_infinity_is_followed_to_its_line(reads: Any) -> None:
    found = halt(LogOfZero(), reads)
    assert found.code == "GG102"
    assert found.operation is None
    assert "That comes from log of" in said(found)
    assert "test_passes.py" in said(found)
    assert "Unless the code between there and backward() leaves those elements out" in said(found)


@both
def test_a_finite_output_leaves_the_code_after_it(reads: Any) -> None:
    found = halt(Net(same), reads, lambda output: (output.detach() * 0 + output.sum() * 0).log().sum())
    assert "The code between there and backward() made the loss non-finite." in said(found)


def test_an_output_that_no_hook_could_see_is_not_said_to_have_been_finite() -> None:
    model = Net(lambda h: h / (h - h).norm())
    optimizer = sgd(model)
    with halting(guarded(model, optimizer)) as halted:
        stacked = {name: torch.stack([value, value]) for name, value in model.named_parameters()}
        x = torch.randn(3, 4)
        call = torch.vmap(lambda values: torch.func.functional_call(model, values, (x,)))
        call(stacked).mean().backward()
        optimizer.step()
    assert halted.finding.code == "GG102"
    assert "was finite" not in said(halted.finding)
    assert "That comes from division by" in said(halted.finding)


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


# After the fourth backward a hook waits only at the outputs that the loss is computed from.
_HEALTHY = 6


def halt_late(
    model: nn.Module,
    goes_bad: Callable[[], None],
    loss_of: Callable[[Any], Tensor] = torch.mean,
    reads: Reads = "immediate",
    *,
    last_loss_of: Callable[[Any], Tensor] | None = None,
) -> Finding:
    """The finding that halts the step after a number of healthy ones."""
    optimizer = sgd(model)
    guardian = guarded(model, optimizer, reads)
    with halting(guardian) as halted:
        for step in range(_HEALTHY + 1):
            if step == _HEALTHY:
                goes_bad()
                loss_of = last_loss_of or loss_of
            optimizer.zero_grad()
            loss_of(model(torch.randn(6, 4))).backward()
            optimizer.step()
    assert halted.finding.step == _HEALTHY
    return halted.finding


def second(output: Any) -> Tensor:
    loss: Tensor = output[1]
    return loss


LOSSES: list[Any] = [
    pytest.param(False, torch.mean, id="outside"),
    pytest.param(True, second, id="returned"),
    pytest.param(True, lambda output: output[1] / 4, id="divided"),
    pytest.param(True, lambda output: output[1].div_(4), id="divided in place"),
]


@both
@pytest.mark.parametrize(("with_loss", "loss_of"), LOSSES)
def test_a_forward_that_goes_bad_late(reads: Reads, with_loss: bool, loss_of: Any) -> None:
    model = Net(same, with_loss=with_loss)
    found = halt_late(model, lambda: setattr(model.second, "function", root_of_negative), loss_of, reads)
    assert operation(found).name == "sqrt"


@both
@pytest.mark.parametrize(("with_loss", "loss_of"), LOSSES)
def test_a_backward_that_goes_bad_late(reads: Reads, with_loss: bool, loss_of: Any) -> None:
    model = Net(same, with_loss=with_loss)
    found = halt_late(model, lambda: setattr(model.second, "function", root_at_zero), loss_of, reads)
    assert operation(found).name.startswith("sqrt"), found.replay


def test_a_loss_that_comes_from_elsewhere_for_the_first_time_is_not_guessed() -> None:
    model = Net(same, with_loss=True)
    found = halt_late(
        model,
        lambda: setattr(model.second, "function", root_at_zero),
        second,
        last_loss_of=lambda output: output[1] * 2,
    )
    assert "the gradient that reached output[1] of the model is no longer held" in said(found)


class OnlyInTraining(nn.Module):
    """Bad where it is in training mode, or only where it is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.bad_in: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.dropout(self.layer(x), 0.5, self.training)
        return y / (y - y) if self.bad_in == self.training else y


@pytest.mark.parametrize("by_call", [True, False])
def test_it_is_replayed_in_the_modes_that_it_had(by_call: bool) -> None:
    model = OnlyInTraining()

    def goes_bad() -> None:
        model.bad_in = False
        if by_call:
            model.eval()
        else:
            model.training = False

    found = halt_late(model, goes_bad)
    assert operation(found).name.startswith("div")
    assert said(found).endswith("with the same inputs, weights and random numbers.")
