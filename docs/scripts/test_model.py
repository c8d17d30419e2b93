"""Tests of a model and of a short training, in one's own suite."""

import torch

from gpt_guard import Guardian, assert_causal, assert_gradients_reach_all, assert_overfits, assert_shifted
from mini_gpt import MiniGPT, MiniGPTConfig

CONFIG = MiniGPTConfig(vocab_size=20, block_size=16, embedding_dim=32)
IDS = torch.randint(20, (2000,), generator=torch.Generator().manual_seed(0))


def batch():
    rows = IDS[torch.randint(len(IDS) - 17, (4, 1)) + torch.arange(17)]
    return rows[:, :-1], rows[:, 1:]


def test_the_targets_are_one_token_on():
    assert_shifted(*batch())


def test_the_model_sees_no_future_and_trains_all_of_itself():
    assert_causal(MiniGPT(CONFIG), vocab_size=20, block_size=16)
    assert_gradients_reach_all(MiniGPT(CONFIG), *batch())


def test_it_learns_one_batch_by_heart():
    assert_overfits(lambda: MiniGPT(CONFIG), *batch(), lr=1e-2)


def test_a_short_training_is_clean():
    model = MiniGPT(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Guardian(model, optimizer, strict=True, summary=False) as guardian:
        for _ in range(20):
            optimizer.zero_grad()
            _, loss = model(*batch())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
    assert not [found for found in guardian.findings if found.severity != "info"]
