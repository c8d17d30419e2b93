"""Weights that should be one tensor and are two, and one tensor that is stepped as two."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from gpt_guard.callbacks.updates.tied import TiedWeights
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding

VOCABULARY, WIDTH = 11, 6


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.body(self.embed(x))))
        return logits


def tied() -> Language:
    model = Language()
    model.head.weight = model.embed.weight
    return model


def copied() -> Language:
    model = Language()
    model.head.weight.data.copy_(model.embed.weight.data)
    return model


def deep_copied() -> Language:
    model = tied()
    model.head = copy.deepcopy(model.head)
    return model


def by_data() -> Language:
    model = Language()
    model.head.weight.data = model.embed.weight.data
    return model


def backward(model: nn.Module) -> None:
    x = torch.randint(VOCABULARY, (4, 7))
    F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()).backward()


def run(
    model: Language,
    optimizers: list[Optimizer],
    loop: Callable[[nn.Module, list[Optimizer]], None] | None = None,
    guard: TiedWeights | None = None,
) -> tuple[Finding, ...]:
    with Guardian(model, optimizers, guards=[guard or TiedWeights()], sinks=[]) as guardian:
        for _ in range(22):
            (loop or together)(model, optimizers)
    return guardian.findings


def together(model: nn.Module, optimizers: list[Optimizer]) -> None:
    """One backward, then every optimizer steps."""
    model.zero_grad()
    backward(model)
    for optimizer in optimizers:
        optimizer.step()


def in_turn(model: nn.Module, optimizers: list[Optimizer]) -> None:
    """A backward for each optimizer."""
    for optimizer in optimizers:
        model.zero_grad()
        backward(model)
        optimizer.step()


def adam(*parameters: Tensor) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


@pytest.mark.parametrize("make", [copied, deep_copied])
def test_a_copy_that_was_to_be_a_tie(make: Callable[[], Language]) -> None:
    model = make()
    (found,) = run(model, [adam(*model.parameters())])
    assert (found.code, found.step, found.module, found.parameter) == ("GG314", 0, "head", "head.weight")
    assert "embedding `embed`" in found.seen


def test_two_parameters_on_one_storage() -> None:
    model = by_data()
    (found,) = run(model, [adam(*model.parameters())])
    assert (found.code, found.step) == ("GG320", 0)
    assert found.evidence["parameters"] == ["embed.weight", "head.weight"]
    assert ".data" in found.causes[0]


def test_one_gradient_stepped_by_two_optimizers() -> None:
    model = tied()
    body = list(model.body.parameters())
    (found,) = run(model, [adam(model.embed.weight, *body), adam(model.head.weight)])
    assert (found.code, found.parameter) == ("GG320", "embed.weight")
    assert "two optimizers" in found.causes[0]


@pytest.mark.parametrize("loop", [together, in_turn])
def test_healthy_ties_are_silent(loop: Callable[[nn.Module, list[Optimizer]], None]) -> None:
    model = tied()
    body = list(model.body.parameters())
    assert run(model, [adam(model.embed.weight), adam(*body)], loop) == ()
    assert run(Language(), [adam(*model.parameters())], loop) == ()


def test_two_optimizers_that_take_turns_are_silent() -> None:
    model = tied()
    body = list(model.body.parameters())
    assert run(model, [adam(model.embed.weight, *body), adam(model.embed.weight)], in_turn) == ()


def test_copies_that_are_frozen_or_filled_with_one_number_are_silent() -> None:
    model = copied()
    model.embed.requires_grad_(False)
    assert run(model, [adam(*model.body.parameters(), model.head.weight)]) == ()
    model = Language()
    nn.init.ones_(model.embed.weight)
    nn.init.ones_(model.head.weight)
    assert run(model, [adam(*model.parameters())]) == ()


def test_parameters_without_elements_are_nowhere() -> None:
    model = Language()
    model.register_parameter("none", nn.Parameter(torch.empty(0)))
    model.register_parameter("nothing", nn.Parameter(torch.empty(0)))
    assert run(model, [adam(*model.parameters())]) == ()


def test_said_once_also_after_a_resume() -> None:
    model, guard = copied(), TiedWeights()
    assert len(run(model, [adam(*model.parameters())], guard=guard)) == 1
    assert guard._watch is None
    again = TiedWeights()
    again.load_state_dict(guard.state_dict())
    model = copied()
    assert run(model, [adam(*model.parameters())], guard=again) == ()
