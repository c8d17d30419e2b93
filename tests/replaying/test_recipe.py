"""What a loss function was given besides the model's output is named by the function's own parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gpt_guard.hooks.capture.execution_context import Surroundings
from gpt_guard.replaying.recipe import LossRecipe

from .steps import Net, guarded, halt, halting, operation, sgd


def weighted(output: Tensor, batch: dict[str, Tensor], weight: Tensor | float = 1.0) -> Tensor:
    return ((output - batch["label"]).square() * weight).mean()


class Criterion(nn.Module):
    def forward(self, output: Tensor, label: Tensor) -> Tensor:
        return (output - label).square().mean()


def named(function: Any, *args: Any, **kwargs: Any) -> list[str]:
    return list(LossRecipe(function, args, kwargs, Surroundings(nn.Identity()).take()).named())


def test_tensors_without_a_history_go_by_the_names_of_parameters() -> None:
    output, label = torch.ones(3, requires_grad=True), torch.ones(3)
    assert named(weighted, output, {"label": label}) == ["`batch['label']` of weighted"]
    assert named(weighted, output, {"label": label}, weight=label) == [
        "`batch['label']` of weighted",
        "`weight` of weighted",
    ]
    assert named(Criterion(), output, label) == ["`label` of Criterion"]


def test_a_function_without_a_signature_is_counted_through() -> None:
    output, label = torch.ones(3, requires_grad=True), torch.ones(3)
    assert named(torch.dist, output, label) == ["`argument 2` of dist"]


def test_without_any_history_labels_cannot_be_told_from_outputs() -> None:
    assert named(Criterion(), torch.ones(3), torch.ones(3)) == []


def test_a_bad_label_is_told_by_its_name() -> None:
    label = torch.zeros(6, 1)
    label[4] = float("nan")
    model = Net(torch.tanh)
    optimizer = sgd(model)
    guardian = guarded(model, optimizer)
    loss_of = guardian.watch_loss(Criterion())
    with halting(guardian) as halted:
        loss_of(model(torch.randn(6, 4)), label).backward()
    found = operation(halted.finding)
    assert (found.kind, found.name, found.cause) == ("input", "`label` of Criterion", "bad_batch")
    assert "a part of the batch, was non-finite before any operation ran: 1 of 6" in found.shows
    assert found.output is not None
    assert found.output.bad_rows == (4,)


def test_what_the_function_closes_over_is_none_of_its_arguments() -> None:
    label = torch.full((6, 1), float("nan"))
    found = operation(halt(Net(torch.tanh), loss_of=lambda output: (output - label).mean(), watched=True))
    assert found.kind == "constant"
