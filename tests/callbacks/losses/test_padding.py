"""Padding among the targets, where a step has several micro-batches whose ids have one shape and other paddings."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard import Guardian, LossInputs

LENGTHS = ((9, 6, 4, 8), (5, 9, 7, 3), (8, 4, 9, 6))


def padded(lengths: tuple[int, ...], seed: int) -> Tensor:
    ids = torch.randint(1, 20, (len(lengths), 9), generator=torch.Generator().manual_seed(seed))
    return ids.masked_fill(torch.arange(9) >= torch.tensor(lengths)[:, None], 0)


def accumulates(labels: Callable[[Tensor], Tensor], *, kept: bool = False) -> list[str]:
    """All batches of a step one after the other; `kept` computes the losses when all outputs are there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 20))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Guardian(model, optimizer, guards=[LossInputs()], sinks=[]) as guardian:
        for step in range(3):
            optimizer.zero_grad()
            batches = [padded(lengths, 10 * step + place) for place, lengths in enumerate(LENGTHS)]
            outputs = [model(ids) for ids in batches] if kept else []
            for place, ids in enumerate(batches):
                logits = outputs[place] if kept else model(ids)
                targets = F.pad(labels(ids), (0, 1), value=-100)[:, 1:]
                (F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / len(batches)).backward()
            optimizer.step()
    return [found.code for found in guardian.findings]


@pytest.mark.parametrize("kept", [False, True], ids=["in-turn", "all-forwards-first"])
def test_ignored_padding_is_never_judged_by_the_ids_of_another_batch(kept: bool) -> None:
    assert accumulates(lambda ids: ids.masked_fill(ids == 0, -100), kept=kept) == []


@pytest.mark.parametrize("kept", [False, True], ids=["in-turn", "all-forwards-first"])
def test_padding_that_counts_is_found_all_the_same(kept: bool) -> None:
    assert accumulates(lambda ids: ids, kept=kept) == ["GG608"]
