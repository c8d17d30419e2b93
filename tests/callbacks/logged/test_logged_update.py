"""LoggedUpdate: a logged lr * grad is told from the update it is taken for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard import Guardian, GuardUsageError
from gpt_guard.callbacks.logged.guards import LoggedUpdate
from gpt_guard.records import Finding

Log = Callable[[nn.Module, dict[str, Tensor], float], dict[str, Any]]
LR = 3e-3


def run(
    log: Log, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, steps: int = 4, **settings: Any
) -> tuple[Finding, ...]:
    """Train, and log what `log` makes of the model (gradients in place), its parameters before the step, and lr."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    stepper = optimizer(model.parameters(), lr=LR, **settings)
    with Guardian(model, stepper, guards=[LoggedUpdate()], sinks=[]) as guardian:
        for _ in range(steps):
            stepper.zero_grad()
            F.mse_loss(model(torch.randn(5, 6)), torch.randn(5, 2)).backward()
            before = {name: each.detach().clone() for name, each in model.named_parameters()}
            stepper.step()
            guardian.log(**log(model, before, LR))
    return guardian.findings


def grad(model: nn.Module, name: str) -> Tensor:
    found = model.get_parameter(name).grad
    assert found is not None
    return found


def total(model: nn.Module, _: object, lr: float) -> dict[str, Any]:
    return {
        "update": lr
        * math.sqrt(sum(float(each.grad.square().sum()) for each in model.parameters() if each.grad is not None))
    }


def ratio_of_deviations(model: nn.Module, before: dict[str, Tensor], lr: float) -> dict[str, Any]:
    return {"ud": ((lr * grad(model, "0.weight")).std() / before["0.weight"].std()).log10().item()}


def largest(model: nn.Module, _: object, lr: float) -> dict[str, Any]:
    return {"step": lr * grad(model, "2.bias").abs().max()}


@pytest.mark.parametrize(
    ("log", "parameter", "words"),
    [
        (total, None, "the norm of lr * grad over all parameters"),
        (ratio_of_deviations, "0.weight", "divided by that of the weights"),
        (largest, "2.bias", "the largest of lr * grad over `2.bias`"),
    ],
)
def test_lr_times_gradient_is_recognised_in_its_usual_forms(log: Log, parameter: str | None, words: str) -> None:
    (found,) = run(log)
    assert (found.code, found.parameter) == ("GG313", parameter)
    assert words in found.seen
    real, logged = found.evidence["real_update"], found.evidence["lr_times_gradient"]
    assert isinstance(real, float)
    assert isinstance(logged, float)
    assert real != pytest.approx(logged, rel=0.1)


def the_real_update(model: nn.Module, before: dict[str, Tensor], lr: float) -> dict[str, Any]:
    after = dict(model.named_parameters())
    return {
        "update": math.sqrt(sum(float((after[name].detach() - old).square().sum()) for name, old in before.items()))
    }


def the_gradient(model: nn.Module, before: dict[str, Tensor], lr: float) -> dict[str, Any]:
    return {name: each / lr for name, each in total(model, before, lr).items()} | {"lr": lr}


@pytest.mark.parametrize("log", [the_real_update, the_gradient])
def test_the_true_update_and_the_gradient_itself_are_fine(log: Log) -> None:
    assert run(log) == ()


def test_for_plain_sgd_it_is_the_update() -> None:
    assert run(total, torch.optim.SGD) == ()
    assert [found.code for found in run(total, torch.optim.SGD, momentum=0.9)] == ["GG313"]


def test_one_step_that_agrees_is_not_enough() -> None:
    steps = iter(range(9))

    def once(model: nn.Module, before: dict[str, Tensor], lr: float) -> dict[str, Any]:
        return total(model, before, lr if next(steps) == 1 else 7.0)

    assert run(once) == ()


def test_it_holds_nothing_after_the_inspected_steps_and_says_a_number_once() -> None:
    guard = LoggedUpdate()
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    with Guardian(model, optimizer, guards=[guard], sinks=[]) as guardian:
        for step in range(8):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
            guardian.log(**total(model, {}, LR))
            if step == 4:
                guardian.inspect_now(3)
    assert [found.code for found in guardian.findings] == ["GG313"]
    assert guardian.report().counts == {"GG313": 1}
    again = LoggedUpdate()
    again.load_state_dict(guard.state_dict())
    assert again.state_dict() == {"said": ["update"]}


def test_settings_are_checked() -> None:
    with pytest.raises(GuardUsageError, match="at least 2"):
        LoggedUpdate(least=1)


def test_a_parameter_taken_out_of_its_group_is_no_trouble() -> None:
    model = nn.Linear(6, 2)
    stepper = torch.optim.AdamW(model.parameters(), lr=LR)
    with Guardian(model, stepper, guards=[LoggedUpdate()], sinks=[]) as guardian:
        for step in range(3):
            stepper.zero_grad()
            model(torch.randn(5, 6)).square().mean().backward()
            if step == 1:
                stepper.param_groups[0]["params"].pop()
            stepper.step()
    assert not [found.code for found in guardian.findings if found.code == "GG906"]
