"""The loss falls, but slowly, and never below a floor.

The model ends in a softmax, "so that it gives probabilities", and cross_entropy applies log_softmax to whatever it is
given. A softmax of probabilities is nearly flat: even a perfect answer has a large loss, and gradients are small.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from gpt_guard.casebook.book import Expected, SmallGPT, token_ids, windows
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding

EXPECTED = Expected("GG652", "in_loss", "loss = F.cross_entropy(")


def train(*, broken: bool) -> tuple[Finding, ...]:
    """Train for a few steps, with the bug or without it, and return what was found."""
    torch.manual_seed(0)
    ids, generator = token_ids(4000), torch.Generator().manual_seed(1)
    model = SmallGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    with Guardian(model, optimizer, sinks=[]) as guardian:
        for _ in range(20):
            x, y = windows(ids, 16, 16, generator)
            out = model(x)
            if broken:
                out = out.softmax(dim=-1)  # the bug
            loss = F.cross_entropy(out.flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return guardian.findings
