"""Assertions as they stand in a person's own tests: silent on what is sound, and on what is broken the error tells."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

from gpt_guard.catalogue import finding
from gpt_guard.checks.asserts import (
    CheckFailed,
    EvalNotDeterministic,
    InitialLossWrong,
    NotCausal,
    RowsNotIndependent,
    assert_batch_independent,
    assert_causal,
    assert_checkpoint_roundtrip,
    assert_eval_deterministic,
    assert_gradients_reach_all,
    assert_ids_in_range,
    assert_initial_loss,
    assert_overfits,
    assert_roundtrip,
    assert_shifted,
    assert_step_changes_parameters,
)
from gpt_guard.errors import GuardUsageError
from gpt_guard.records.render import render_finding
from mini_gpt import MiniGPT, MiniGPTConfig

from .small_gpt import GPT, Attention, LogitsOnly, T, V, batch
from .variants import Encoder

ROWS = torch.randint(50, (4, 12), generator=torch.Generator().manual_seed(0))
X, Y = ROWS[:, :-1], ROWS[:, 1:]
CONFIG = MiniGPTConfig(17, block_size=12, embedding_dim=32, num_heads=2, num_layers=1, dropout=0.1)


@pytest.fixture
def model() -> MiniGPT:
    return MiniGPT(CONFIG)


@pytest.fixture
def xy() -> tuple[Tensor, Tensor]:
    rows = torch.randint(17, (4, 13))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def test_what_holds_is_silent() -> None:
    assert_shifted(X, Y)
    assert_shifted(X[0], Y[0])
    assert_shifted(X[0].tolist(), Y[0].tolist())
    assert_shifted(X, X, shift=0)
    assert_shifted(X.int(), torch.where(Y > 9, Y, -1), ignore_index=-1)
    assert_ids_in_range(ROWS, 50)
    assert_ids_in_range(ROWS.numpy().astype(np.uint16), 50)
    assert_roundtrip(sorted(set("a text\n")), "text")


@pytest.mark.parametrize(
    ("x", "y", "code", "words"),
    [
        (X, X.clone(), "GG603", "the shift is 0"),
        (ROWS[:, :-2], ROWS[:, 2:], "GG603", "the shift is 2"),
        (Y, X, "GG603", "the shift is -1"),
        (X, Y.flip(1), "GG603", "no shift fits"),
        (X, Y[:, 1:], "GG600", "[4, 10]"),
        (X.float(), Y, "GG632", "float32"),
        (X, torch.full_like(Y, -100), "GG606", "0 of 44 targets"),
    ],
)
def test_assert_shifted_says_which_shift_it_found(x: Tensor, y: Tensor, code: str, words: str) -> None:
    with pytest.raises(CheckFailed) as caught:
        assert_shifted(x, y)
    assert caught.value.finding.code == code
    assert words in caught.value.finding.seen


def test_labels_for_a_model_that_shifts_inside() -> None:
    with pytest.raises(CheckFailed, match="the shift is 1"):
        assert_shifted(X, Y, shift=0)


def test_rows_too_short_to_tell() -> None:
    with pytest.raises(GuardUsageError, match="too short"):
        assert_shifted([[3]], [[4]], shift=2)
    with pytest.raises(GuardUsageError, match="no token ids"):
        assert_shifted(X[:0], Y[:0])


def test_assert_ids_in_range_names_the_first() -> None:
    ids = ROWS.clone()
    ids[1, 2] = ids[3, 0] = 50
    with pytest.raises(CheckFailed, match="2 of 48 are outside, the first is 50") as caught:
        assert_ids_in_range(ids, 50)
    assert caught.value.finding.evidence["first"] == [1, 2]
    with pytest.raises(CheckFailed, match="-1"):
        assert_ids_in_range([3, -1], 50)
    with pytest.raises(CheckFailed, match="floats"):
        assert_ids_in_range([3.0, 1.0], 50)


def test_assert_roundtrip_shows_where_they_part() -> None:
    class Lowers:
        def encode(self, text: str) -> list[int]:
            return [ord(char) for char in text.lower()]

        def decode(self, ids: Sequence[int]) -> str:
            return "".join(map(chr, ids))

    assert_roundtrip(Lowers(), "all small")
    with pytest.raises(CheckFailed, match="they part at character 4") as caught:
        assert_roundtrip(Lowers(), "all Small")
    assert "lower case" in caught.value.finding.causes[0]
    assert caught.value.finding.evidence["at"] == 4


def test_a_character_without_an_id_fails_the_assertion() -> None:
    with pytest.raises(CheckFailed, match="KeyError"):
        assert_roundtrip(["a", "b"], "abc")
    with pytest.raises(TypeError, match="tokenizer"):
        assert_roundtrip(3, "abc")


def test_check_failed_is_an_assertion_error_with_the_whole_evidence() -> None:
    found = [finding("GG603", "first"), finding("GG605", "second")]
    error = CheckFailed(found)
    assert isinstance(error, AssertionError)
    assert error.findings == tuple(found)
    assert error.finding is found[0]
    assert str(error) == f"{render_finding(found[0])}\n\n{render_finding(found[1])}"
    again = pickle.loads(pickle.dumps(error))
    assert again.findings == error.findings
    assert str(CheckFailed(found[0])) == render_finding(found[0])
    with pytest.raises(ValueError, match="at least one"):
        CheckFailed([])


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


def test_a_sound_model_passes_all_and_is_as_before(model: MiniGPT, xy: tuple[Tensor, Tensor]) -> None:
    model.eval()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    assert_gradients_reach_all(model, *xy)
    assert_step_changes_parameters(model, *xy)
    assert_step_changes_parameters(model, *xy, optimizer)
    assert_overfits(model, *xy)
    assert torch.equal(state, torch.get_rng_state())
    assert not any(module.training for module in model.modules())
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.dropout.p == 0.1


def test_also_where_gradients_are_switched_off(model: MiniGPT, xy: tuple[Tensor, Tensor]) -> None:
    with torch.no_grad():
        assert_gradients_reach_all(model, *xy)
        assert_step_changes_parameters(model, *xy)


def test_a_parameter_without_gradient(model: MiniGPT, xy: tuple[Tensor, Tensor]) -> None:
    model.extra = nn.Linear(3, 3)
    with pytest.raises(CheckFailed, match=r"extra\.weight") as caught:
        assert_gradients_reach_all(model, *xy)
    (found,) = caught.value.findings
    assert found.code == "GG202"
    assert str(caught.value).startswith("GG202 Trainable parameters without a gradient")
    with pytest.raises(AssertionError, match=r"extra\.weight"):
        assert_step_changes_parameters(model, *xy)


def test_a_parameter_that_is_not_held(model: MiniGPT, xy: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(CheckFailed) as caught:
        assert_step_changes_parameters(model, *xy, AdamW(model.blocks.parameters(), lr=1e-3))
    assert [found.code for found in caught.value.findings] == ["GG302"]


def test_a_model_that_is_trained_further_is_as_before_a_failure(model: MiniGPT, xy: tuple[Tensor, Tensor]) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.norm.register_forward_hook(lambda _module, _args, output: output * 0.0)
    with pytest.raises(CheckFailed) as caught:
        assert_overfits(model, *xy, steps=120)
    assert caught.value.findings[0].code == "GG670"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_function_that_makes_a_model(xy: tuple[Tensor, Tensor]) -> None:
    assert_overfits(lambda: MiniGPT(replace(CONFIG, dropout=0.0)), *xy, steps=300)
    with pytest.raises(CheckFailed) as caught:
        assert_overfits(lambda: MiniGPT(CONFIG).requires_grad_(False), *xy, steps=1)
    assert caught.value.findings[0].code == "GG310"


def test_steps_must_be_steps(model: MiniGPT, xy: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(GuardUsageError, match="steps is 0"):
        assert_overfits(model, *xy, steps=0)


def mini() -> MiniGPT:
    return MiniGPT(MiniGPTConfig(11, block_size=6, embedding_dim=8, num_heads=2))


class Listed(nn.Module):
    """Its layer is in a list, which is neither trained nor saved."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.layers = nn.Embedding(11, 11), [nn.Linear(11, 11)]

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.layers[0](self.tokens(ids))
        return logits


def test_a_healthy_model_a_factory_and_own_ids_pass() -> None:
    assert_checkpoint_roundtrip(mini())
    assert_checkpoint_roundtrip(mini)
    assert_checkpoint_roundtrip(mini(), torch.randint(11, (2, 6)))
    assert_checkpoint_roundtrip(
        nn.Sequential(nn.Embedding(11, 11)), make_model=lambda: nn.Sequential(nn.Embedding(11, 11))
    )


def test_a_layer_in_a_list_fails_and_says_which() -> None:
    with pytest.raises(CheckFailed, match=r"layers \(a list of 1 nn\.Linear\)") as caught:
        assert_checkpoint_roundtrip(Listed)
    assert caught.value.finding.code == "GG720"
    assert isinstance(caught.value, AssertionError)


def test_a_model_that_cannot_be_built_anew_needs_a_factory() -> None:
    with pytest.raises(GuardUsageError, match="make_model"):
        assert_checkpoint_roundtrip(Listed())
    model = mini()
    with pytest.raises(GuardUsageError, match="the model itself"):
        assert_checkpoint_roundtrip(model, make_model=lambda: model)


def test_a_saved_model_and_random_numbers_are_left_alone() -> None:
    model = mini().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    assert_checkpoint_roundtrip(model)
    assert model.training
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
