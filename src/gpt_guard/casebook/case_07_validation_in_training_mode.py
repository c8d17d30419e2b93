"""The validation loss jumps from check to check, and is worse than it should be.

Nobody calls `model.eval()` before validation, and dropout goes on.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from gpt_guard.casebook.book import Expected, SmallGPT, token_ids, windows
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding

EXPECTED = Expected("GG501", "eval_forgotten", "val_loss = F.cross_entropy(model(x)")


def train(*, broken: bool) -> tuple[Finding, ...]:
    """Train for a few steps, with the bug or without it, and return what was found."""
    torch.manual_seed(0)
    ids, val_ids = token_ids(4000), token_ids(800, seed=3)
    generator = torch.Generator().manual_seed(1)
    model = SmallGPT(dropout=0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    with Guardian(model, optimizer, sinks=[]) as guardian:
        for step in range(20):
            x, y = windows(ids, 16, 16, generator)
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

            if step % 10 == 9:
                if not broken:
                    model.eval()  # what the bug leaves out
                with torch.no_grad():
                    for _ in range(3):
                        x, y = windows(val_ids, 16, 16, generator)
                        val_loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
                guardian.log(val_loss=val_loss)
                model.train()
    return guardian.findings
