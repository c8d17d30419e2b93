"""LossInputs leaves no trace: not in the weights, not in hooks of the user's, nothing that is held after a step."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gpt_guard.callbacks.losses.guard import LossInputs
from gpt_guard.guardian import Guardian

from ...cases.loss_inputs import Case
from ...cases.loss_parts import features
from ...cases.loss_sums import Heads
from .loops import BY_NAME, alone, codes, two_heads


def weights(case: Case, *, guarded: bool, steps: int = 5) -> list[Tensor]:
    torch.manual_seed(0)
    model, loss_of = case.make()
    model = nn.Sequential(model, nn.Dropout(0.1)) if isinstance(model, nn.Sequential) else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def train() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()

    if guarded:
        with Guardian(model, optimizer, guards=[LossInputs()], sinks=[]):
            train()
    else:
        train()
    return [*(parameter.detach() for parameter in model.parameters()), torch.rand(3)]


@pytest.mark.parametrize(
    "name",
    [
        "pascals_beside_classes",
        "softmax_layer",
        "labels_are_the_input",
        "a_recurrent_model_repeats",
        "logits_transposed",
    ],
)
def test_weights_and_random_numbers_are_those_of_a_bare_run(name: str) -> None:
    bare, guarded = (weights(BY_NAME[name], guarded=each) for each in (False, True))
    assert all(torch.equal(one, other) for one, other in zip(bare, guarded, strict=True))


def test_hooks_of_the_users_run_once_in_each_step() -> None:
    for where in ("activation", "parameter", "module"):
        model, calls = Heads(), [0]

        def count(*_: Any, calls: list[int] = calls) -> None:
            calls[0] += 1

        on_hidden = None
        if where == "activation":
            on_hidden = lambda hidden, count=count: hidden.register_hook(count)  # noqa: E731  # one of three ways
        elif where == "parameter":
            model.number.weight.register_hook(count)
        else:
            model.kind.register_full_backward_hook(count)
        alone(model, lambda model=model, on_hidden=on_hidden: two_heads(model, on_hidden))  # type: ignore[misc]  # bound
        assert calls == [3], where


def retained(*, guarded: bool) -> list[Tensor | None]:
    torch.manual_seed(0)
    model, kept = Heads(), []

    def retain(hidden: Tensor) -> None:
        hidden.retain_grad()
        kept.append(hidden)

    alone(model, lambda: two_heads(model, retain), guards=[LossInputs()] if guarded else [])
    return [hidden.grad for hidden in kept]


def test_a_retained_gradient_is_that_of_the_bare_run() -> None:
    bare, guarded = (retained(guarded=each) for each in (False, True))
    assert len(bare) == 3
    for one, other in zip(bare, guarded, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_is_recomputed_once_in_each_step(reentrant: bool) -> None:
    model, calls = Heads(), [0]
    body = model.body

    def counted(x: Tensor) -> Tensor:
        calls[0] += 1
        hidden: Tensor = body(x)
        return hidden

    def loss_of() -> Tensor:
        x, y = features()
        hidden = checkpoint(counted, x.requires_grad_(), use_reentrant=reentrant)
        number = model.number(hidden).squeeze(-1)
        return F.mse_loss(number, 1e5 * (2 + x.detach().sum(1))) + F.cross_entropy(model.kind(hidden), y)

    guardian = alone(model, loss_of)
    assert codes(guardian) == []
    assert calls == [6]
    assert any("which of the added losses decides" in spot for spot in guardian.report().not_watched)


def test_a_function_of_the_users_own_goes_backward_once() -> None:
    calls = [0]

    class Counts(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            calls[0] += 1
            return gradients[0]

    model = Heads()
    model.body.append(Through(Counts))
    alone(model, lambda: two_heads(model))
    assert calls == [3]


class Through(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.function.apply(x)
        return result


class Trainer:
    """Trains in a method, whose frame lives as long as the loop."""

    def __init__(self) -> None:
        self.model = Heads()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def train(self) -> list[bool]:
        alive = []
        for _ in range(3):
            self.optimizer.zero_grad()
            x, y = features()
            number, kind = self.model(x)
            loss = F.mse_loss(number.squeeze(-1), x.sum(1)) + F.cross_entropy(kind.softmax(-1), y)
            loss.backward()
            self.optimizer.step()
            batch = weakref.ref(x)
            del x, y, number, kind, loss
            gc.collect()
            alive.append(batch() is not None)
        return alive


def test_nothing_of_a_step_is_held_after_it() -> None:
    trainer = Trainer()
    with Guardian(trainer.model, trainer.optimizer, guards=[LossInputs()], sinks=[]) as guardian:
        assert trainer.train() == [False, False, False]
    assert codes(guardian) == ["GG652"]
