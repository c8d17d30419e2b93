"""Batches padded on the left: what a query without a key sees is no leak, and a leak is none the less found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard.callbacks.probes.guard import ModelProbe
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding, Severity

VOCABULARY, LENGTH, WIDTH, PAD = 64, 16, 32, 0
Padding = Callable[[], Tensor]


class Attention(nn.Module):
    """Written out, and masked with the lowest number there is: a row without a key becomes the mean over all."""

    def __init__(self, ahead: int) -> None:
        super().__init__()
        self.qkv, self.out, self.ahead = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), ahead

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        allowed = torch.ones(x.size(1), x.size(1), dtype=torch.bool).tril(self.ahead)[None] & keep[:, None, :]
        scores = (q @ k.transpose(1, 2) / WIDTH**0.5).masked_fill(~allowed, torch.finfo(x.dtype).min)
        mixed: Tensor = self.out(scores.softmax(-1) @ v)
        return mixed


class Decoder(nn.Module):
    """Two layers; the second one may look `ahead`. The mask of `hidden` tokens is the other way round."""

    def __init__(self, ahead: int = 0, *, hidden: bool = False, time_major: bool = False) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.first, self.second = Attention(0), Attention(ahead)
        self.hidden, self.time_major = hidden, time_major

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        if self.time_major:
            ids, mask = ids.t(), mask.t()
        x, keep = self.table(ids), ~mask.bool() if self.hidden else mask.bool()
        x = x + self.first(x, keep)
        logits: Tensor = self.head(x + self.second(x, keep))
        return logits.transpose(0, 1) if self.time_major else logits


def up_to_five() -> Tensor:
    """Tokens of padding in front of each of eight rows."""
    return torch.tensor([5, 3, 0, 2, 4, 1, 0, 3])


def one_at_most() -> Tensor:
    return torch.tensor([1, 0, 0, 1, 0, 1, 0, 1])


def train(model: Decoder, padding: Padding = up_to_five, *, right: bool = False, kind: str = "bool") -> list[Finding]:
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Guardian(model, optimizer, guards=[ModelProbe()], sinks=[]) as guardian:
        for _ in range(3):
            ids = torch.randint(1, VOCABULARY, (8, LENGTH + 1))
            keep = torch.arange(LENGTH + 1) >= padding()[:, None]
            keep = keep.flip(1) if right else keep
            ids, labels = ids.where(keep, torch.tensor(PAD)), ids.where(keep, torch.tensor(-100))
            mask = (keep != model.hidden)[:, :-1].to(getattr(torch, kind))
            inputs, targets = ids[:, :-1], labels[:, 1:]
            if model.time_major:
                inputs, mask, targets = inputs.t().contiguous(), mask.t().contiguous(), targets.t()
            optimizer.zero_grad()
            F.cross_entropy(model(inputs, mask).flatten(0, 1), targets.flatten()).backward()
            optimizer.step()
    # The rows are asked, too: no question was left out.
    assert not [spot for spot in guardian.report().not_watched if spot.startswith("ModelProbe")]
    return list(guardian.findings)


@pytest.mark.parametrize("padding", [up_to_five, one_at_most])
@pytest.mark.parametrize("kind", ["bool", "long", "float32"])
@pytest.mark.parametrize("hidden", [False, True], ids=["kept", "hidden"])
def test_the_last_padding_that_predicts_the_first_token_sees_no_future(
    padding: Padding, kind: str, hidden: bool
) -> None:
    assert train(Decoder(hidden=hidden), padding, kind=kind) == []


def test_with_time_in_front_it_is_silent_too() -> None:
    assert train(Decoder(time_major=True)) == []


@pytest.mark.parametrize("padding", [up_to_five, one_at_most])
@pytest.mark.parametrize("hidden", [False, True], ids=["kept", "hidden"])
@pytest.mark.parametrize("right", [False, True], ids=["on the left", "on the right"])
@pytest.mark.parametrize(("ahead", "words"), [(LENGTH, "at every distance"), (1, "the next token (+1) only")])
def test_a_leak_is_found_beside_padding(ahead: int, words: str, padding: Padding, hidden: bool, right: bool) -> None:
    (found,) = train(Decoder(ahead, hidden=hidden), padding, right=right)
    assert (found.code, found.severity, found.module) == ("GG660", Severity.ERROR, "second")
    assert words in found.seen


def test_right_padding_is_silent() -> None:
    assert train(Decoder(), right=True) == []
