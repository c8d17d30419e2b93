"""An exception that leaves the loop gets a note: the module, what it was given, what it most likely is."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard import Guardian
from gpt_guard.catalogue.raised import meaning_of, raised_errors

Loop = Callable[[nn.Module, torch.optim.Optimizer], None]


class Text(nn.Module):
    """Tokens and positions, one block, a head; `change` is applied to the hidden states."""

    def __init__(self, change: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(10, 8), nn.Embedding(6, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.head = nn.Linear(8, 10)
        self.change = change

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        logits: Tensor = self.head(self.change(self.block(x)))
        return logits


def noted(loop: Loop, model: nn.Module | None = None) -> tuple[Exception, str]:
    model = Text() if model is None else model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)
    guardian = Guardian(model, optimizer, sinks=[], summary=False, inspect_steps=0)
    with pytest.raises(Exception) as raised, guardian:  # noqa: PT011  # any may leave a loop
        loop(model, optimizer)
    (note,) = getattr(raised.value, "__notes__", [""])
    return raised.value, note


def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor | None = None) -> None:
    ids = torch.randint(10, (2, 5)) if ids is None else ids
    optimizer.zero_grad()
    F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    optimizer.step()


def outside(ids: list[list[int]]) -> Loop:
    return lambda model, optimizer: step(model, optimizer, torch.tensor(ids))


def test_an_id_without_a_row_is_named_with_its_table() -> None:
    error, note = noted(outside([[1, 2, 3], [4, 12, 5]]))
    assert type(error) is IndexError
    assert "raised in  `tokens` (Embedding), given input[0] [2, 3] int64 on cpu" in note
    assert "id 12 at [1, 1]; the table has 10 rows, 0 to 9. 1 of 6 ids are outside" in note
    assert "self.tokens(ids)" in note


def test_a_row_that_is_longer_than_the_position_table() -> None:
    _, note = noted(outside([[1] * 8]))
    assert "`positions` (Embedding)" in note
    assert "They are positions: the row has 8, the table 6." in note


def test_a_label_that_is_no_class() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        F.cross_entropy(model(torch.ones(1, 2).long()).flatten(0, 1), torch.tensor([3, 10])).backward()

    error, note = noted(loop)
    assert "out of bounds" in str(error)
    assert "a label outside of 0 ... classes - 1" in note


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda x: x[..., :7],
            ["`head` (Linear), given input[0] [2, 5, 7] float32", "weight [10, 8]", "not have the shape"],
        ),
        (lambda x: x.double(), ["`head` (Linear), given input[0] [2, 5, 8] float64", "Two dtypes meet"]),
        (lambda x: x.to("meta"), ["`head` (Linear), given input[0] [2, 5, 8] float32 on meta", "Two devices meet"]),
        (lambda x: x.view(3, -1, 7), ["the model (Text), given input[0] [2, 5] int64", "not have the shape"]),
    ],
    ids=["width", "dtype", "device", "view"],
)
def test_what_does_not_fit_is_told_with_both_sides(change: Callable[[Tensor], Tensor], said: list[str]) -> None:
    _, note = noted(step, Text(change))
    assert [each for each in said if each not in note] == []


def add_in_place(x: Tensor) -> Tensor:
    x += 1.0
    return x


@pytest.mark.parametrize(
    "change",
    [add_in_place, lambda x: x.mul_(2.0), lambda x: x.clamp_(max=0.5)],
    ids=["+=", "mul_", "clamp_"],
)
def test_the_line_that_changed_a_saved_tensor_is_found_by_running_again(change: Callable[[Tensor], Tensor]) -> None:
    model = Text(lambda x: change(x.exp()))
    error, note = noted(step, model)
    assert "modified by an inplace operation" in str(error)
    assert "the model (Text) changes a tensor of that shape in place" in note
    assert __file__ in note


def test_a_change_outside_of_the_model_is_not_laid_to_it() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        scores = model(torch.ones(1, 2).long()).exp()
        scores *= 2.0
        scores.sum().backward()

    _, note = noted(loop)
    assert "nothing inside of the model writes to a tensor of shape [1, 2, 10] in place" in note


def test_a_graph_that_is_gone_and_a_loss_without_one() -> None:
    def twice(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        loss = model(torch.ones(1, 2).long()).square().sum()
        loss.backward()
        loss.backward()

    def without(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            loss = model(torch.ones(1, 2).long()).sum()
        loss.backward()

    assert "A part of the graph is left over" in noted(twice)[1]
    note = noted(without)[1]
    assert "6 of 6 parameters require a gradient; the last forward of the model ran without gradients" in note


def test_a_distribution_of_nan_and_memory_that_is_not_there() -> None:
    def sample(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        torch.multinomial(torch.tensor([torch.nan, 1.0]), 1)

    def grow(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        kept = torch.zeros(2**20)
        torch.empty(2**60)
        del kept

    assert "A distribution was made from NaN" in noted(sample)[1]
    note = noted(grow)[1]
    assert "alive" in note
    assert "[1048576] float32 on cpu: 4 MiB" in note


def test_state_on_another_device_is_named_in_the_step() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        step(model, optimizer)
        for state in optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].to("meta")
        step(model, optimizer)

    _, note = noted(loop)
    assert "raised in  step() of Adam" in note
    assert "exp_avg of `tokens.weight` is on meta, the parameter on cpu" in note


class Own(ValueError):
    """An error of the user's own."""


def test_an_error_of_the_users_own_in_the_model_gets_its_place_and_no_guess() -> None:
    def refuse(x: Tensor) -> Tensor:
        raise Own("no")

    error, note = noted(step, Text(refuse))
    assert type(error) is Own
    assert str(error) == "no"
    assert "the model (Text), given input[0] [2, 5] int64 on cpu" in note
    assert "likely" not in note


def test_an_error_that_has_nothing_to_do_with_it_gets_no_note() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        step(model, optimizer)
        raise KeyError("a file of the user's")

    assert noted(loop)[1] == ""


def test_no_tensor_lives_longer_by_the_note() -> None:
    kept: list[weakref.ref[Any]] = []

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        ids = torch.tensor([[1, 99]])
        kept.append(weakref.ref(ids))
        step(model, optimizer, ids)

    error, _ = noted(loop)
    error.__traceback__ = None
    del error
    gc.collect()
    assert kept[0]() is None


def test_every_kind_is_known_by_each_of_its_texts() -> None:
    for each in raised_errors():
        for text in each.texts:
            assert text == text.lower()
            found = meaning_of(f"... {text.upper()} ...")
            assert found is not None
            assert found.key == each.key
