from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from mini_gpt import MiniGPT, MiniGPTConfig

SMALL = MiniGPTConfig(vocab_size=11, block_size=8, embedding_dim=16, num_heads=2, num_layers=2, dropout=0.0)


@pytest.fixture
def model() -> MiniGPT:
    torch.manual_seed(0)
    return MiniGPT(SMALL)


def test_config_survives_a_plain_dict() -> None:
    assert MiniGPTConfig(**dataclasses.asdict(SMALL)) == SMALL
    assert MiniGPT(SMALL).config is SMALL


def test_logits_have_a_row_for_each_position_and_loss_needs_targets(model: MiniGPT) -> None:
    ids = torch.randint(11, (3, 5))
    logits, loss = model(ids)
    assert logits.shape == (3, 5, 11)
    assert loss is None
    again, loss = model(ids, ids)
    assert torch.equal(again, logits)
    expected = -logits.log_softmax(-1).gather(-1, ids[..., None]).mean()
    torch.testing.assert_close(loss, expected)


def test_untrained_loss_is_that_of_an_even_guess() -> None:
    torch.manual_seed(0)
    model = MiniGPT(MiniGPTConfig(vocab_size=100))
    _, loss = model(torch.randint(100, (16, 32)), torch.randint(100, (16, 32)))
    assert loss.item() == pytest.approx(math.log(100), abs=0.1)


def test_ignored_targets_do_not_count(model: MiniGPT) -> None:
    ids = torch.randint(11, (2, 6))
    targets = ids.clone()
    targets[:, 3:] = -100
    torch.testing.assert_close(model(ids, targets)[1], model(ids[:, :3], ids[:, :3])[1])


@pytest.mark.parametrize("position", range(1, 8))
def test_no_position_sees_a_later_one(model: MiniGPT, position: int) -> None:
    model.eval()
    ids = torch.randint(11, (2, 8))
    changed = ids.clone()
    changed[:, position:] = (changed[:, position:] + 1) % 11
    before, after = model(ids)[0], model(changed)[0]
    torch.testing.assert_close(before[:, :position], after[:, :position])
    assert not torch.allclose(before[:, position], after[:, position])


def test_rows_of_a_batch_do_not_mix(model: MiniGPT) -> None:
    model.eval()
    ids = torch.randint(11, (3, 8))
    torch.testing.assert_close(model(ids)[0][1:2], model(ids[1:2])[0])


def test_positions_matter(model: MiniGPT) -> None:
    logits, _ = model.eval()(torch.full((1, 8), 3))
    assert not torch.allclose(logits[0, 0], logits[0, 5])


def test_every_parameter_gets_a_gradient(model: MiniGPT) -> None:
    _, loss = model(torch.randint(11, (4, 8)), torch.randint(11, (4, 8)))
    loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_dropout_works_in_training_only() -> None:
    torch.manual_seed(0)
    model = MiniGPT(dataclasses.replace(SMALL, dropout=0.5))
    ids = torch.randint(11, (2, 8))
    assert not torch.equal(model(ids)[0], model(ids)[0])
    model.eval()
    assert torch.equal(model(ids)[0], model(ids)[0])


def test_rows_longer_than_the_block_are_refused(model: MiniGPT) -> None:
    with pytest.raises(ValueError, match=r"9 positions.*block_size 8"):
        model(torch.zeros(1, 9, dtype=torch.long))


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"num_heads": 3}, "16 cannot be shared out to 3 heads"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_layers": -1}, "num_layers is -1"),
        ({"dropout": 1.0}, "dropout is 1.0"),
    ],
)
def test_sizes_that_cannot_work_are_refused(sizes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(SMALL, **sizes)
