"""Rows of scores are traced back to the positions that the model computed, however they were moved."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpt_guard.callbacks.losses.positions import moved_along, positions_of

B, T, C, V = 3, 5, 4, 7
ROW_BY_ROW = [(b, t) for b in range(B) for t in range(T)]
TIME_FIRST = [(b, t) for t in range(T) for b in range(B)]
Move = Callable[[Tensor], Tensor]


def scores(norm: bool = True) -> Tensor:
    """`[B, T, V]` from a linear layer on hidden states `[B, T, C]` that have a graph."""
    hidden = nn.Linear(2, C)(torch.randn(B, T, 2)).tanh()
    output: Tensor = nn.Linear(C, V)(nn.LayerNorm(C)(hidden) if norm else hidden)
    return output


def positions(tensor: Tensor, dim: int = 1) -> list[tuple[int, int]]:
    layout = positions_of(tensor, dim)
    assert layout is not None
    assert layout.classes == "whole"
    assert layout.features == V
    found = zip(layout.first.tolist(), layout.second.tolist(), strict=True)
    return list(found) if layout.shape == (B, T) else [(b, t) for t, b in found]


@pytest.mark.parametrize(
    ("move", "expected"),
    [
        (lambda y: y.view(-1, V), ROW_BY_ROW),
        (lambda y: y.flatten(0, 1).float() / 2.0, ROW_BY_ROW),
        (lambda y: y.transpose(0, 1).reshape(-1, V), TIME_FIRST),
        (lambda y: y.permute(1, 0, 2).contiguous().view(-1, V), TIME_FIRST),
        (lambda y: y.transpose(1, 2), ROW_BY_ROW),
        (lambda y: y.permute(0, 2, 1), ROW_BY_ROW),
        (lambda y: y[:, :-1].reshape(-1, V), [(b, t) for b in range(B) for t in range(T - 1)]),
        (lambda y: y[:, 1:].reshape(-1, V), [(b, t) for b in range(B) for t in range(1, T)]),
        (lambda y: y[:, ::2].reshape(-1, V), [(b, t) for b in range(B) for t in (0, 2, 4)]),
        (lambda y: y[:, -1], [(b, T - 1) for b in range(B)]),
        (lambda y: y[torch.eye(B, T) > 0], [(0, 0), (1, 1), (2, 2)]),
        (lambda y: y[1].unsqueeze(0).reshape(-1, V), [(1, t) for t in range(T)]),
        (lambda y: torch.tanh(y / 30).mul(30).log_softmax(-1).view(-1, V), ROW_BY_ROW),
    ],
)
def test_positions_of_rows(move: Move, expected: list[tuple[int, int]]) -> None:
    assert positions(move(scores())) == expected


@pytest.mark.parametrize("turned", [False, True])
def test_through_hidden_states_that_were_flattened(turned: bool) -> None:
    hidden = nn.Linear(2, C)(torch.randn(B, T, 2)).tanh()
    rows = (hidden.transpose(0, 1) if turned else hidden).reshape(-1, C)
    output = nn.Linear(C, V)(nn.LayerNorm(C)(torch.relu(nn.Linear(C, C)(rows))))
    assert positions(output) == (TIME_FIRST if turned else ROW_BY_ROW)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_through_a_recurrent_layer(batch_first: bool, turned: bool) -> None:
    x = torch.randn(B, T, C) if batch_first else torch.randn(T, B, C)
    output = nn.Linear(C, V)(nn.LSTM(C, C, batch_first=batch_first)(x)[0])
    found = positions((output.transpose(0, 1) if turned else output).reshape(-1, V))
    assert found == (ROW_BY_ROW if batch_first != turned else TIME_FIRST)


def test_without_a_graph_below_the_layer() -> None:
    assert positions(nn.Linear(C, V)(torch.randn(B, T, C)).transpose(0, 1).reshape(-1, V)) == TIME_FIRST


def test_of_a_convolution_and_of_an_embedding() -> None:
    assert positions(nn.Conv1d(C, V, 1)(torch.randn(B, C, T))) == ROW_BY_ROW
    assert positions(nn.Embedding(9, V)(torch.randint(9, (B, T))).view(-1, V)) == ROW_BY_ROW


def test_under_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert positions(scores().float().view(-1, V)) == ROW_BY_ROW


@pytest.mark.parametrize(
    ("move", "classes"),
    [
        (lambda y: y.reshape(B, V, T), "mixed"),
        (lambda y: y.transpose(1, 2).reshape(-1, V), "mixed"),
        (lambda y: y, "positions"),
        (lambda y: y.transpose(1, 2), "whole"),
    ],
)
def test_where_classes_come_from(move: Move, classes: str) -> None:
    layout = positions_of(move(scores()), 1)
    assert layout is not None
    assert layout.classes == classes


def test_through_a_convolution_over_time() -> None:
    hidden = nn.Conv1d(2, C, 3, padding=1)(torch.randn(B, 2, T)).transpose(1, 2)
    assert positions(nn.Linear(C, V)(hidden).view(-1, V)) == ROW_BY_ROW
    assert positions(nn.Linear(C, V)(hidden).transpose(0, 1).reshape(-1, V)) == TIME_FIRST


def test_what_the_graph_does_not_tell_is_not_guessed() -> None:
    assert positions_of(scores().detach().view(-1, V), 1) is None
    assert positions_of((scores() + scores()).view(-1, V), 1) is None
    assert positions_of(scores().cumsum(1).view(-1, V), 1) is None
    assert positions_of(scores().view(-1, V)[:, :1], 1) is None


@pytest.mark.parametrize(("dim", "move"), [(0, lambda y: y), (1, lambda y: y.transpose(0, 1)), (2, lambda y: y)])
def test_along_which_dimension_of_a_softmax_the_classes_run(dim: int, move: Move) -> None:
    found = moved_along(move(scores().softmax(dim)).reshape(-1, V).clamp_min(1e-9).log(), 1, ("Softmax", "LogSoftmax"))
    assert found is not None
    assert found[1] == {2}
    assert found[0]._saved_dim == dim
    assert moved_along(scores().reshape(-1, V), 1, ("Softmax",)) is None


@pytest.mark.parametrize(
    ("move", "classes"),
    [
        (lambda y: y, "whole"),
        (lambda y: y.permute(0, 2, 3, 1).reshape(-1, V), "whole"),
        (lambda y: y.flatten(2), "whole"),
        (lambda y: y.reshape(-1, V), "mixed"),
        (lambda y: y.permute(0, 2, 3, 1), "positions"),
    ],
)
def test_pictures_of_scores(move: Move, classes: str) -> None:
    layout = positions_of(move(nn.Conv2d(2, V, 3, padding=1)(torch.randn(B, 2, 4, T))), 1)
    assert layout is not None
    assert (layout.classes, layout.features, layout.shape) == (classes, V, (B, 4 * T))
