"""assert_checkpoint_roundtrip, as a person's own test suite would call it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gpt_guard.checks.asserts.checkpoint import assert_checkpoint_roundtrip
from gpt_guard.checks.asserts.failed import CheckFailed
from gpt_guard.errors import GuardUsageError
from mini_gpt import MiniGPT, MiniGPTConfig

V, T = 11, 6


def mini() -> MiniGPT:
    return MiniGPT(MiniGPTConfig(V, block_size=T, embedding_dim=8, num_heads=2))


class Listed(nn.Module):
    """Its layer is in a list, which is neither trained nor saved."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.layers = nn.Embedding(V, V), [nn.Linear(V, V)]

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.layers[0](self.tokens(ids))
        return logits


def test_a_healthy_model_a_factory_and_own_ids_pass() -> None:
    assert_checkpoint_roundtrip(mini())
    assert_checkpoint_roundtrip(mini)
    assert_checkpoint_roundtrip(mini(), torch.randint(V, (2, T)))
    assert_checkpoint_roundtrip(nn.Sequential(nn.Embedding(V, V)), make_model=lambda: nn.Sequential(nn.Embedding(V, V)))


def test_a_layer_in_a_list_fails_and_says_which() -> None:
    with pytest.raises(CheckFailed, match=r"layers \(a list of 1 Linear\)") as caught:
        assert_checkpoint_roundtrip(Listed)
    assert caught.value.finding.code == "GG720"
    assert isinstance(caught.value, AssertionError)


def test_a_model_that_cannot_be_built_anew_needs_a_factory() -> None:
    with pytest.raises(GuardUsageError, match="make_model"):
        assert_checkpoint_roundtrip(Listed())
    model = mini()
    with pytest.raises(GuardUsageError, match="the model itself"):
        assert_checkpoint_roundtrip(model, make_model=lambda: model)


def test_state_and_random_numbers_are_left_alone() -> None:
    model = mini().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    assert_checkpoint_roundtrip(model)
    assert model.training
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
