"""Training works after a fashion, and validation in other batches is worse.

The heads are split with `view` where a transpose is needed. Both give `[B, H, T, D]`, nothing complains, and attention
mixes positions, heads and, as the batch is folded in here, the samples of a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from gpt_guard.casebook.book import Attention, Expected, SmallGPT, token_ids, windows
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding

EXPECTED = Expected("GG661", "reshape")


class Reshaped(Attention):
    """Splits heads with the batch dimension in the wrong place."""

    def split(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        # The bug: [B, T, C] is read as if it were [T, B, C].
        return x.reshape(length, batch, self.heads, width // self.heads).permute(1, 2, 0, 3)


def train(*, broken: bool) -> tuple[Finding, ...]:
    """Train for a few steps, with the bug or without it, and return what was found."""
    torch.manual_seed(0)
    ids, generator = token_ids(4000), torch.Generator().manual_seed(1)
    model = SmallGPT(attention=Reshaped if broken else Attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    with Guardian(model, optimizer, sinks=[]) as guardian:
        for _ in range(20):
            x, y = windows(ids, 16, 8, generator)
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return guardian.findings
