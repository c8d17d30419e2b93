"""The dashboard says that the updates are tiny, and raising the learning rate breaks the run.

The curve named "update" is lr times the gradient norm. The optimizer is AdamW: what it really changes has little to do
with the size of the gradient.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from gpt_guard.casebook.book import Expected, SmallGPT, token_ids, windows
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding

EXPECTED = Expected("GG313", "sgd_formula")


def train(*, broken: bool) -> tuple[Finding, ...]:
    """Train for a few steps, with the bug or without it, and return what was found."""
    torch.manual_seed(0)
    ids, generator = token_ids(4000), torch.Generator().manual_seed(1)
    model = SmallGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    with Guardian(model, optimizer, sinks=[]) as guardian:
        for _ in range(20):
            x, y = windows(ids, 16, 16, generator)
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).clamp(max=1.0)
            optimizer.step()
            if broken:
                guardian.log(update=optimizer.param_groups[0]["lr"] * grad_norm)  # the bug
            elif guardian.latest is not None and guardian.latest.update_ratio is not None:
                guardian.log(update=guardian.latest.update_ratio)
    return guardian.findings
