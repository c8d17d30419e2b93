"""The validation loss is far too good.

The text was cut into windows, the windows were shuffled, and then split. Each window overlaps its neighbours, and every
tenth one was written twice by the sharding: the same samples stand in training and validation.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from gpt_guard.casebook.book import Expected, SmallGPT, token_ids
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding

EXPECTED = Expected("GG638", "duplicates", "val_loss = F.cross_entropy(model(val[:, :-1])")


def train(*, broken: bool) -> tuple[Finding, ...]:
    """Train for a few steps, with the bug or without it, and return what was found."""
    torch.manual_seed(0)
    samples = token_ids(17 * 80).view(80, 17)
    train_set, val = samples[:64], samples[64:]
    if broken:
        val = torch.cat([val[:12], train_set[:4]])  # the bug: four samples of 64 are in both

    model = SmallGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    with Guardian(model, optimizer, sinks=[]) as guardian:
        for step in range(12):
            order = torch.randperm(len(train_set))
            for rows in order.split(32):
                batch = train_set[rows]
                loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if step % 4 == 3:
                with guardian.evaluating():
                    val_loss = F.cross_entropy(model(val[:, :-1]).flatten(0, 1), val[:, 1:].flatten())
                guardian.log(val_loss=val_loss)
    return guardian.findings
