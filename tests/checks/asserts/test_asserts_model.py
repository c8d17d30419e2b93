"""Assertions about a model: silent on a healthy one, and on a broken one the evidence is in the error."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gpt_guard.checks.asserts.model import (
    EvalNotDeterministic,
    InitialLossWrong,
    NotCausal,
    RowsNotIndependent,
    assert_batch_independent,
    assert_causal,
    assert_eval_deterministic,
    assert_initial_loss,
)
from gpt_guard.errors import GuardUsageError

from ..small_gpt import GPT, Attention, LogitsOnly, T, V, batch
from ..variants import Encoder


class NoMask(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class MeanOverRows(GPT):
    def logits(self, idx: Tensor) -> Tensor:
        out = super().logits(idx)
        return out - out.mean(0)


class Dropped(GPT):
    def logits(self, idx: Tensor) -> Tensor:
        return F.dropout(super().logits(idx), 0.1)


def zero_at_first() -> GPT:
    model = GPT(NoMask)
    for block in model.blocks:
        torch.nn.init.zeros_(block.attn.proj.weight)
    return model


def test_a_healthy_model_passes_them_all() -> None:
    model, (x, y) = GPT(dropout=0.1), batch()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert_causal(model, vocab_size=V, block_size=T)
    assert_causal(model)
    assert_causal(model, x=x)
    assert_batch_independent(model, vocab_size=V, block_size=T)
    assert_initial_loss(model, x, y)
    assert_initial_loss(LogitsOnly(), x, y)
    assert_eval_deterministic(model, x)
    assert model.training
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_random_numbers_are_not_used_up() -> None:
    model, (x, y) = GPT(), batch()
    random = torch.get_rng_state()
    assert_causal(model)
    assert_batch_independent(model)
    assert_initial_loss(model, x, y)
    assert_eval_deterministic(model, x)
    assert torch.equal(torch.get_rng_state(), random)


def test_the_error_is_an_assertion_with_the_evidence() -> None:
    with pytest.raises(NotCausal) as raised:
        assert_causal(GPT(NoMask), vocab_size=V, block_size=T)
    assert isinstance(raised.value, AssertionError)
    assert [found.code for found in raised.value.findings] == ["GG660"]
    assert "module blocks.0.attn (NoMask)" in str(raised.value)
    assert "no causal mask" in str(raised.value)


def test_a_leak_that_opens_in_training() -> None:
    assert_causal(zero_at_first(), trained=False)
    with pytest.raises(NotCausal, match="begins at zero"):
        assert_causal(zero_at_first())


def test_rows() -> None:
    assert_causal(MeanOverRows(), trained=False)
    with pytest.raises(RowsNotIndependent, match="GG661"):
        assert_batch_independent(MeanOverRows())


def test_initial_loss() -> None:
    x, y = batch()
    with pytest.raises(InitialLossWrong, match="GG653"):
        assert_initial_loss(GPT(), x, x)
    with pytest.raises(InitialLossWrong, match="GG655"):
        assert_initial_loss(
            GPT(), x, y, loss_fn=lambda logits, y: F.cross_entropy(logits.transpose(1, 2), y, reduction="sum")
        )
    assert_initial_loss(Encoder(), x, x, causal=False)


def test_eval() -> None:
    with pytest.raises(EvalNotDeterministic, match="Functional dropout"):
        assert_eval_deterministic(Dropped(), batch()[0])


def test_what_cannot_be_asked_is_no_success() -> None:
    with pytest.raises(GuardUsageError, match="which ids"):
        assert_causal(torch.nn.Linear(2, 2))
    with pytest.raises(GuardUsageError, match="no suffix"):
        assert_causal(GPT(), x=torch.zeros(2, 1, dtype=torch.long))
