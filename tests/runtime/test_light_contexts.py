"""Steps that wait are judged in the middle of whatever the loop is doing: neither changes the other."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from gpt_guard import Guardian, NonFiniteError
from gpt_guard.hooks.neutral import neutral, transformed

STEPS = 70


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 4))


def batch(step: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(step)
    return torch.randn(16, 8), torch.randint(4, (16,))


def inference(model: nn.Module, _guardian: Guardian) -> None:
    with torch.inference_mode():
        model(batch(0)[0])


def asking_inside(_model: nn.Module, guardian: Guardian) -> None:
    with torch.inference_mode():
        guardian.log(metric=1.0)
        assert guardian.latest is not None


def per_sample(model: nn.Module, guardian: Guardian) -> None:
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        assert guardian.findings == ()
        output: Tensor = functional_call(model, weights, (x[None],))
        return output.square().mean()

    vmap(grad(loss), (None, 0), randomness="different")(weights, batch(0)[0])


class Seen(TorchFunctionMode):
    """Counts the calls of torch inside."""

    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # torch's own
        self.calls += 1
        return func(*args, **(kwargs or {}))


def in_a_mode_of_its_own(_model: nn.Module, guardian: Guardian) -> None:
    with Seen() as seen:
        assert guardian.latest is not None
    assert not seen.calls


@pytest.mark.parametrize("act", [inference, asking_inside, per_sample, in_a_mode_of_its_own])
@pytest.mark.parametrize("every", [1, 5, 13])
def test_figures_are_right_wherever_they_are_asked_for(act: Callable[..., None], every: int) -> None:
    ratios: list[list[float]] = []
    for policy in (None, {"GG906": "record"}):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        found: list[float] = []
        guardian = Guardian(model, optimizer, sinks=[], policy=policy)
        with guardian:
            for step in range(STEPS):
                x, y = batch(step)
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                if step % every == every - 1:
                    model.eval()
                    act(model, guardian)
                    model.train()
                if step > 60 and guardian.latest is not None:
                    found.append(guardian.latest.update_ratio or math.nan)
        ratios.append(found)
    assert ratios[0] == pytest.approx(ratios[1], rel=1e-5)
    assert len(ratios[0]) == STEPS - 61


def test_neutral_is_neither_inference_nor_a_graph() -> None:
    with torch.inference_mode(), neutral():
        made = torch.ones(2)
        assert not made.is_inference()
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()


def test_inside_of_a_transform_is_known() -> None:
    inside: list[bool] = []

    def f(x: Tensor) -> Tensor:
        inside.append(transformed())
        return x * 2

    vmap(f)(torch.ones(3))
    assert inside == [True]
    assert not transformed()


def poisoning(model: nn.Module, optimizer: torch.optim.Optimizer, start: int) -> None:
    for step in range(STEPS):
        x, y = batch(step)
        # In place once: the counts of that step are others than those of the next.
        optimizer.zero_grad(set_to_none=step != start - 1)
        F.cross_entropy(model(x), y).backward()
        weight = next(model.parameters())
        if step == start and weight.grad is not None:
            weight.grad.mul_(2)
            weight.grad.mul_(math.nan)
        optimizer.step()


@pytest.mark.parametrize("start", range(36, 42))
def test_gradients_that_a_full_step_left_with_other_counts_hide_nothing(start: int) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with pytest.raises(NonFiniteError) as halt, Guardian(model, optimizer, sinks=[], replay=False):
        poisoning(model, optimizer, start)
    assert (halt.value.finding.code, halt.value.finding.step) == ("GG104", start)


@pytest.mark.parametrize("missed", range(34, 44))
def test_micro_batches_after_a_missed_clearing_are_all_counted(missed: int) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Guardian(model, optimizer, sinks=[], replay=False) as guardian:
        for step in range(missed + 3):
            if step != missed:
                optimizer.zero_grad()
            parts = 2 if step == missed + 1 else 1
            for part in range(parts):
                x, y = batch(step + 100 * part)
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if step > missed:
                assert guardian.latest is not None
                assert guardian.latest.micro_batches == parts


def test_a_compiled_call_of_a_watched_model_is_one_graph() -> None:
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(1)
        return graph.forward

    model = net().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Guardian(model, optimizer, sinks=[], inspect_steps=0):
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        for step in range(12):
            compiled(batch(step)[0])
    assert len(graphs) == 1
