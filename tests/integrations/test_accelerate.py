"""accelerate needs no integration: a plain Guardian round the loop takes what `prepare` has returned."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gpt_guard import Guardian, NonFiniteError

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed here")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """An Accelerator keeps its settings for the process."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


class Loop:
    """An accelerate loop as its documentation has it, with the norms that it sees itself."""

    def __init__(self, *, steps: int = 1, clip: float | None = None, **settings: Any) -> None:
        torch.manual_seed(0)
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=steps, **settings)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        data = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8)
        prepared = self.accelerator.prepare(model, optimizer, scheduler, data)
        self.model, self.optimizer, self.scheduler, self.data = prepared
        self.clip = clip
        self.norms: list[float] = []
        self.before: list[Tensor] = []

    def run(self, spoilt: int | None = None) -> None:
        torch.manual_seed(1)
        for index, (x,) in enumerate(self.data):
            if index == spoilt:
                with torch.no_grad():
                    self.inner[0].weight[0, 0] = float("nan")
                self.before = self.weights()
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(nn.functional.mse_loss(self.model(x), x))
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip or 1e9)
                    self.norms.append(float(norm))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()

    @property
    def inner(self) -> Any:
        return self.accelerator.unwrap_model(self.model)

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.inner.parameters()]


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"steps": 4},
    "clipped": {"clip": 0.1},
    "bf16": {"mixed_precision": "bf16"},
    "stepped": {"step_scheduler_with_optimizer": False},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_healthy_loop_is_silent_and_bit_identical_and_its_norms_are_the_loops_own(settings: dict[str, Any]) -> None:
    bare = Loop(**settings)
    bare.run()
    loop = Loop(**settings)
    with Guardian(loop.model, loop.optimizer, scheduler=loop.scheduler, sinks=[]) as guardian:
        loop.run()
    assert guardian.findings == ()
    assert guardian.step == len(loop.norms) == 8 // settings.get("steps", 1)
    assert guardian.latest is not None
    assert guardian.latest.grad_norm == pytest.approx(loop.norms[-1], rel=1e-4)
    assert guardian.latest.grad_norm_clipped == pytest.approx(settings.get("clip", loop.norms[-1]), rel=1e-3)
    assert guardian.latest.micro_batches == settings.get("steps", 1)
    for ours, theirs in zip(loop.weights(), bare.weights(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("steps", [1, 4])
def test_a_halt_comes_before_the_update_and_names_the_place_without_a_wrapper(steps: int) -> None:
    loop = Loop(steps=steps)
    with pytest.raises(NonFiniteError) as halted, Guardian(loop.model, loop.optimizer, sinks=[]):
        loop.run(spoilt=5)
    assert halted.value.finding.parameter == "0.weight"
    assert halted.value.finding.step == 5 // steps
    assert halted.value.finding.micro_batch == 5 % steps
    for ours, before in zip(loop.weights(), loop.before, strict=True):
        assert torch.equal(ours.nan_to_num(7.0), before.nan_to_num(7.0))


def test_the_prepared_optimizer_is_stepped_as_before_afterwards() -> None:
    loop = Loop()
    with Guardian(loop.model, loop.optimizer, sinks=[]):
        pass
    loop.run()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in loop.inner.modules())
