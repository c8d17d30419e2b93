from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gpt_guard.callbacks.updates.guard import ParamDeltaProbe
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding, Severity


class Net(nn.Module):
    """Two layers and, between them, what a function makes of their activations."""

    def __init__(self, middle: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(4, 8), nn.Linear(8, 1)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.middle(self.inp(x)))
        return y


class Helper:
    """Holds a layer, and is no module."""

    def __init__(self) -> None:
        self.layers = {"mid": nn.Linear(8, 8)}

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers["mid"](x).tanh()
        return y


Loss = Callable[[Tensor, Tensor], Tensor]


def watched(
    model: nn.Module,
    steps: int = 20,
    loss_of: Loss = functional.mse_loss,
    after: Callable[[int], None] = lambda step: None,
    inputs: Callable[[Tensor], Tensor] = lambda x: x,
) -> list[Finding]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guardian = Guardian(model, optimizer, guards=[ParamDeltaProbe()], sinks=[])
    with guardian:
        for step in range(steps):
            x = torch.randn(16, 4)
            optimizer.zero_grad()
            loss_of(model(inputs(x)), x.sum(1, keepdim=True)).backward()
            optimizer.step()
            after(step)
    return list(guardian.findings)


# Held by an object of the model.


@pytest.mark.parametrize("steps", [4, 20])
def test_layers_in_a_helper_object_are_named_by_its_attribute(steps: int) -> None:
    (found,) = watched(Net(Helper()), steps)
    assert (found.code, found.parameter, found.severity) == ("GG303", "middle", Severity.ERROR)
    assert "a Helper object" in found.seen
    assert found.evidence["tensors"] == 2


def test_a_helper_with_an_optimizer_of_its_own_is_quiet() -> None:
    helper = Helper()
    own = torch.optim.SGD(helper.layers["mid"].parameters(), lr=0.01)

    def after(step: int) -> None:
        # Held is enough: it need not step in all these steps.
        if step == 15:
            own.step()

    assert watched(Net(helper), after=after) == []


def test_a_tensor_computed_from_a_parameter_is_named() -> None:
    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8)) * 0.5

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.out(self.inp(x) * self.scale)
            return y

    # A single step is all there is: the second backward would go through buffers that the first has freed.
    (found,) = watched(Scaled(), 1)
    assert (found.code, found.parameter) == ("GG303", "scale")
    assert "computed from an nn.Parameter" in found.seen
    assert found.causes[0].startswith("The attribute is the result of an operation")


# Held by nothing of the model.


def test_a_layer_made_in_forward_is_said_after_three_passes() -> None:
    (found,) = watched(Net(lambda x: nn.Linear(8, 8)(x)), 10)
    assert (found.code, found.cause_id, found.step) == ("GG303", "fresh", 2)
    assert "8x8" in found.seen
    assert found.causes[0].startswith("A layer or Parameter is created inside forward()")


def test_perturbed_inputs_made_anew_each_step_are_quiet() -> None:
    assert watched(Net(), inputs=lambda x: x + nn.Parameter(torch.zeros_like(x))) == []


def test_a_copy_that_somebody_holds_and_that_is_made_anew_is_quiet() -> None:
    copies: list[nn.Module] = []

    def middle(x: Tensor) -> Tensor:
        copies.append(nn.Linear(8, 8))
        y: Tensor = copies[-1](x)
        return y

    assert watched(Net(middle)) == []


class Centres(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(4))

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(y, target) + ((y - self.centres) ** 2).min(1)[0].mean()


@pytest.mark.parametrize("steps", [4, 20])
def test_parameters_of_a_criterion_that_nobody_steps_are_named(steps: int) -> None:
    criterion = Centres()
    (found,) = watched(Net(), steps, criterion)
    assert (found.code, found.cause_id, found.severity) == ("GG303", "outside", Severity.WARNING)
    assert "`centres` of a Centres" in found.seen
    assert found.causes[0].startswith("A criterion with weights of its own")


def test_a_global_layer_is_named_by_its_class() -> None:
    layer = nn.Linear(8, 8)
    (found,) = watched(Net(lambda x: layer(x).tanh()))
    assert (found.code, found.cause_id) == ("GG303", "outside")
    assert "`weight` of a Linear" in found.seen


def test_a_criterion_with_an_optimizer_of_its_own_is_quiet() -> None:
    criterion = Centres()
    own = torch.optim.SGD(criterion.parameters(), lr=0.5)

    def after(step: int) -> None:
        own.step()
        own.zero_grad()

    assert watched(Net(), loss_of=criterion, after=after) == []


def test_centres_that_are_updated_by_hand_are_quiet() -> None:
    criterion = Centres()

    def after(step: int) -> None:
        if step % 5 == 4:
            with torch.no_grad():
                criterion.centres.mul_(0.9)

    assert watched(Net(), loss_of=criterion, after=after) == []


def test_a_second_phase_of_another_model_is_quiet() -> None:
    critic = nn.Linear(1, 1)
    # It is held by an optimizer that steps in another phase.
    own = torch.optim.SGD(critic.parameters(), lr=0.1)
    assert watched(Net(), 40, lambda y, target: -critic(y).mean()) == []
    assert own.param_groups


def test_a_teacher_in_eval_mode_is_only_worth_knowing() -> None:
    teacher = nn.Linear(1, 1).eval()
    (found,) = watched(Net(), loss_of=lambda y, target: teacher(y - target).square().mean())
    assert (found.code, found.severity) == ("GG303", Severity.INFO)
    assert "eval mode" in found.seen


def test_plain_tensors_with_gradients_are_quiet() -> None:
    prompt: Any = torch.zeros(4, requires_grad=True)
    assert watched(Net(), inputs=lambda x: x + prompt) == []
