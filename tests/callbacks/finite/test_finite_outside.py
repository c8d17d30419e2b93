"""A bad loss after a model whose outputs were not seen: said to be so, and not blamed on the loss's own code."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpt_guard import Finding, FiniteGuard, Guardian, NonFiniteError

from ...runtime.loop_kit import net

# Among the first steps, which are measured in full, and among the light ones.
EARLY, LATE = 6, 30
Call = Callable[[nn.Module, Tensor], Tensor]
OUTSIDE = "Every watched module output was finite"


class Parts(nn.Module):
    """A model that a loop calls in parts, never as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def encode(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())  # type: ignore[no-any-return]  # a module call is Any


def halt(
    model: nn.Module,
    *,
    last: int = EARLY,
    spoil: Callable[[], None] | None = None,
    at_last: Callable[[], None] = lambda: None,
    call: Call = lambda model, x: model(x),
    guard: FiniteGuard | None = None,
    reads: Any = "auto",
) -> tuple[Finding, Guardian]:
    """What a loop is halted with at step `last`: `spoil` runs before the forward, or the loss's code makes NaN."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guards = None if guard is None else [guard]
    guardian = Guardian(model, optimizer, guards=guards, sinks=[], summary=False, reads=reads)

    def loop() -> None:
        for step in range(last + 1):
            if step == last:
                at_last()
                if spoil is not None:
                    spoil()
            optimizer.zero_grad()
            loss = call(model, torch.randn(4, 8)).square().mean()
            if step == last and spoil is None:
                loss = loss * math.nan
            loss.backward()
            optimizer.step()

    with guardian, pytest.raises(NonFiniteError) as caught:
        loop()
    assert caught.value.finding.step == last
    return caught.value.finding, guardian


def spoils(parameter: Tensor) -> Callable[[], None]:
    def act() -> None:
        with torch.no_grad():
            parameter.view(-1)[0] = math.nan

    return act


def first(found: Finding) -> str:
    return found.causes[0]


@pytest.fixture(params=[EARLY, LATE], ids=["early", "late"])
def last(request: pytest.FixtureRequest) -> int:
    assert isinstance(request.param, int)
    return request.param


@pytest.fixture(autouse=True)
def reset() -> Iterator[None]:
    yield
    torch.compiler.reset()


def compiled(model: nn.Module) -> Callable[[], None]:
    return lambda: model.compile(backend="eager")


def test_a_model_compiled_in_mid_run_is_said_to_be_unseen_and_is_not_cleared(last: int) -> None:
    model = net()
    found, guardian = halt(model, last=last, at_last=compiled(model))
    assert found.code == "GG102"
    assert found.origin is not None
    assert "compiled in place" in found.origin
    assert first(found).startswith("The model itself")
    (told,) = [each for each in guardian.findings if each.code == "GG901"]
    assert told.step == last
    assert "Neither inputs nor outputs" in told.seen
    assert any("compiled" in spot for spot in guardian.report().not_watched)


def test_a_weight_that_was_spoilt_inside_of_it_is_named(last: int) -> None:
    model = net()
    weight = model.get_parameter("4.weight")
    found, _ = halt(model, last=last, at_last=compiled(model), spoil=spoils(weight))
    assert (found.code, found.parameter) == ("GG105", "4.weight")
    assert found.origin is not None
    assert "not known" in found.origin


def test_a_part_compiled_in_mid_run_is_told_of_by_the_next_full_step() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guardian = Guardian(model, optimizer, sinks=[], summary=False)
    with guardian:
        for step in range(60):
            if step == LATE:
                compiled(model[1])()
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
    (told,) = [each for each in guardian.findings if each.code == "GG901"]
    assert told.step is not None
    assert LATE <= told.step <= LATE + 16
    assert "hooked: 1." in told.seen


SEEN: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "as ever": lambda _: {},
    "a part is left out": lambda _: {"guard": FiniteGuard(ignore="0")},
    "a part is compiled": lambda model: {"at_last": compiled(model[0])},  # type: ignore[index]  # a Sequential
}


@pytest.mark.parametrize("how", SEEN)
def test_where_the_models_own_output_was_seen_it_was_the_code_after_it(how: str, last: int) -> None:
    model = net()
    found, _ = halt(model, last=last, **SEEN[how](model))
    assert found.code == "GG102"
    assert found.origin is not None
    assert found.origin.startswith(OUTSIDE)
    assert not first(found).startswith("The model itself")


@pytest.mark.parametrize("options", [{"outputs": False}, {"ignore": "*"}], ids=["switched_off", "left_out"])
@pytest.mark.parametrize("reads", ["auto", "per_step"])
def test_outputs_that_are_not_watched_are_not_called_finite(options: dict[str, Any], reads: str) -> None:
    found, _ = halt(net(), reads=reads, guard=FiniteGuard(**options))
    assert found.code == "GG102"
    assert found.origin is not None
    assert "as asked" in found.origin
    assert first(found).startswith("The model itself")


@pytest.mark.parametrize("last_part", [True, False])
def test_a_part_left_out_of_a_model_that_is_called_in_parts(last_part: bool) -> None:
    model = Parts()
    left_out = "head" if last_part else "body"
    call: Call = lambda model, x: model.encode(x)  # type: ignore[operator]  # noqa: E731  # short
    found, _ = halt(
        model, call=call, guard=FiniteGuard(ignore=left_out), spoil=spoils(model.get_parameter(f"{left_out}.weight"))
    )
    # What follows the body shows it; nothing follows the head but the loss.
    assert (found.code, found.parameter) == ("GG105", f"{left_out}.weight")


def test_a_call_that_goes_by_the_hooks_in_mid_run_is_missed_and_said_to_be(last: int) -> None:
    model = nn.Linear(8, 4)
    calls: list[Call] = [lambda model, x: model(x)]
    found, _ = halt(
        model, last=last, call=lambda model, x: calls[-1](model, x), at_last=lambda: calls.append(around(model))
    )
    assert found.code == "GG102"
    assert found.origin is not None
    assert found.origin.startswith("No call of the model was seen before this backward")


def around(model: nn.Module) -> Call:
    return lambda _model, x: model.forward(x)


def test_a_second_backward_through_the_same_forward_is_not_taken_for_a_missed_one() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Guardian(model, optimizer, sinks=[]):
        output = model(torch.randn(4, 8))
        output.square().mean().backward(retain_graph=True)
        with pytest.raises(NonFiniteError) as caught:
            (output.abs().mean() * math.nan).backward()
    found = caught.value.finding
    assert (found.code, found.micro_batch) == ("GG102", 1)
    assert found.origin is not None
    assert found.origin.startswith(OUTSIDE)
