from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mini_gpt import MiniGPT, MiniGPTConfig, next_token_probabilities

SMALL = MiniGPTConfig(vocab_size=11, block_size=8, embedding_dim=16, num_heads=2, num_layers=1, dropout=0.5)
LOGITS = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0]])
NOTHING = torch.tensor([[4]])


@pytest.fixture
def model() -> MiniGPT:
    torch.manual_seed(0)
    return MiniGPT(SMALL)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


@pytest.mark.parametrize("training", [True, False])
def test_mode_is_put_back(model: MiniGPT, training: bool) -> None:
    model.train(training)
    output = model.generate(torch.zeros(1, 1, dtype=torch.long), 3)
    assert [module.training for module in model.modules()] == [training] * len(list(model.modules()))
    assert not output.requires_grad


def test_mode_is_put_back_after_an_error(model: MiniGPT, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(model.head, "forward", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        model.generate(torch.zeros(1, 1, dtype=torch.long), 1)
    assert model.training


def test_it_runs_without_dropout_and_keeps_the_prompt(model: MiniGPT) -> None:
    prompt = torch.randint(11, (2, 3))
    first = model.generate(prompt, 20, generator=generator())
    assert first.shape == (2, 23)
    assert torch.equal(first[:, :3], prompt)
    assert torch.equal(first, model.generate(prompt, 20, generator=generator()))
    assert 0 <= int(first.min()) <= int(first.max()) < 11


def test_only_the_last_block_is_looked_at(model: MiniGPT) -> None:
    long = torch.randint(11, (1, 30))
    whole = model.generate(long, 5, generator=generator())
    cropped = model.generate(long[:, -8:], 5, generator=generator())
    assert torch.equal(whole[:, -5:], cropped[:, -5:])


def test_temperature_zero_is_greedy(model: MiniGPT) -> None:
    prompt = torch.randint(11, (3, 4))
    model.eval()
    expected = model(prompt)[0][:, -1].argmax(-1)
    assert torch.equal(model.generate(prompt, 1, temperature=0)[:, -1], expected)
    assert torch.equal(model.generate(prompt, 1, top_k=1)[:, -1], expected)


def test_generation_leaves_training_as_it_was(model: MiniGPT) -> None:
    ids = torch.randint(11, (2, 8))
    model.generate(ids, 4, generator=generator())
    _, loss = model(ids, ids)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def _probabilities(**options: Any) -> Tensor:
    return next_token_probabilities(LOGITS, options.pop("token_ids", NOTHING), **options)


def test_plain_probabilities_are_the_softmax() -> None:
    torch.testing.assert_close(_probabilities(), LOGITS.softmax(-1))


def test_temperature_sharpens_and_flattens() -> None:
    torch.testing.assert_close(_probabilities(temperature=0.5), (2 * LOGITS).softmax(-1))


def test_top_k_keeps_k_also_among_equals() -> None:
    assert (_probabilities(top_k=2) > 0).tolist() == [[True, True, False, False, False]]
    equal = next_token_probabilities(torch.zeros(1, 5), NOTHING, top_k=2)
    assert int((equal > 0).sum()) == 2
    torch.testing.assert_close(_probabilities(top_k=50), LOGITS.softmax(-1))


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    # softmax: 0.636 0.234 0.086 0.032 0.012
    assert int((_probabilities(top_p=0.5) > 0).sum()) == 1
    assert int((_probabilities(top_p=0.7) > 0).sum()) == 2
    assert int((_probabilities(top_p=0.9) > 0).sum()) == 3
    assert int((_probabilities(top_p=1.0) > 0).sum()) == 5
    torch.testing.assert_close(_probabilities(top_p=0.7).sum(), torch.tensor(1.0))


def test_top_p_reads_ids_not_ranks() -> None:
    turned = next_token_probabilities(LOGITS.flip(-1), NOTHING, top_p=0.7)
    torch.testing.assert_close(turned, _probabilities(top_p=0.7).flip(-1))


def test_repetition_penalty_lowers_what_was_seen_whatever_its_sign() -> None:
    seen = _probabilities(token_ids=torch.tensor([[0, 4, 0]]), repetition_penalty=2.0)
    torch.testing.assert_close(seen, torch.tensor([[1.5, 2.0, 1.0, 0.0, -2.0]]).softmax(-1))
    greedy = _probabilities(token_ids=torch.tensor([[0]]), repetition_penalty=2.0, temperature=0.0)
    assert greedy.argmax().item() == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"token_ids": torch.zeros(4, dtype=torch.long)}, r"shape \[4\]"),
        ({"token_ids": torch.zeros(1, 0, dtype=torch.long)}, r"shape \[1, 0\]"),
        ({"token_ids": torch.zeros(1, 2)}, "torch.float32"),
        ({"token_ids": torch.tensor([[3, 11]])}, "from 3 to 11, the vocabulary from 0 to 10"),
    ],
)
def test_options_out_of_range_are_refused(model: MiniGPT, options: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"token_ids": torch.zeros(1, 1, dtype=torch.long), "max_new_tokens": 1} | options
    with pytest.raises(ValueError, match=said):
        model.generate(**given)
    assert model.training
