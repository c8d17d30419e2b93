"""Probabilities, log-probabilities and raw scores are told apart by value, in every dtype."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpt_guard.callbacks.losses.scores import MOST_ROWS, are_log_probabilities, are_probabilities, score_rows
from gpt_guard.hooks.autograd_graph.nodes import is_logistic, name_of, origin

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [2, 50, 5000])
def test_kinds_of_scores(dtype: torch.dtype, classes: int) -> None:
    raw = (3 * torch.randn(20, classes)).to(dtype)
    assert are_probabilities(raw.softmax(-1))
    assert are_log_probabilities(raw.log_softmax(-1))
    assert are_log_probabilities((raw.float().softmax(-1) + 1e-8).log())
    for other in (raw, raw.abs(), raw.sigmoid(), torch.zeros_like(raw)):
        assert not are_probabilities(other)
        assert not are_log_probabilities(other)
    assert not are_probabilities(raw.log_softmax(-1))
    assert not are_log_probabilities(raw.softmax(-1))


def test_rows_of_any_shape() -> None:
    scores = torch.arange(2.0 * 3 * 4 * 5).view(2, 3, 4, 5)
    rows = score_rows(scores, 1)
    assert rows.shape == (40, 3)
    assert torch.equal(rows[7], scores[0, :, 1, 2])
    assert score_rows(torch.randn(9000, 3), 1).shape == (MOST_ROWS, 3)
    assert score_rows(torch.randn(9000, 1_000_000 // 100), 1).size(0) < MOST_ROWS
    assert score_rows(torch.randn(5), 0).shape == (1, 5)


def test_only_rows_that_count() -> None:
    scores = torch.arange(10.0)[:, None].expand(10, 3)
    counted = torch.arange(10) % 3 == 0
    assert score_rows(scores, 1, counted)[:, 0].tolist() == [0, 3, 6, 9]
    assert len(score_rows(scores, 1, counted & False)) == 10


def test_the_origin_is_found_past_views_casts_and_selections() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    moved = x.softmax(-1).double().t()[1:].reshape(2, -1).contiguous().clamp(1e-7, 1)
    assert name_of(origin(moved)) == "Softmax"
    assert name_of(origin(torch.stack([x.sigmoid(), x.sigmoid()]))) == "Sigmoid"
    assert name_of(origin(x.sigmoid() * 2)) == "Mul"
    assert origin(x.detach()) is None


def test_a_sigmoid_written_out() -> None:
    x = torch.randn(4, requires_grad=True)
    assert is_logistic(origin(x.sigmoid()))
    assert is_logistic(origin(1 / (1 + torch.exp(-x))))
    assert is_logistic(origin(nn.Sigmoid()(x).view(2, 2)))
    for other in (1 / (1 + x.abs()), x.tanh(), x.exp(), 1 / x.exp()):
        assert not is_logistic(origin(other))
    assert not is_logistic(None)
