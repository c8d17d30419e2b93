"""One of two tasks does not learn.

A price in euros and a class are learned together. The squared error of the price is in the millions, the cross entropy
is about 1: on the layers they share, the gradient of the class is lost.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard.casebook.book import Expected
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding

EXPECTED = Expected("GG678", "units", "mse_loss")


class TwoHeads(nn.Module):
    """A price `[B]` and logits `[B, 3]` from shared features."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.price = nn.Linear(32, 1)
        self.kind = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.shared(x)
        return self.price(features).squeeze(-1), self.kind(features)


def train(*, broken: bool) -> tuple[Finding, ...]:
    """Train for a few steps, with the bug or without it, and return what was found."""
    torch.manual_seed(0)
    x = torch.randn(512, 8)
    euros = 20_000 + 4_000 * x[:, 0]
    kinds = (x[:, 1] > 0).long() + (x[:, 2] > 0).long()
    # The bug is what is not done here: the price in units of its own spread.
    price = euros if broken else (euros - euros.mean()) / euros.std()

    model = TwoHeads()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with Guardian(model, optimizer, sinks=[]) as guardian:
        for _ in range(20):
            rows = torch.randint(512, (64,))
            out, logits = model(x[rows])
            price_loss = F.mse_loss(out, price[rows])
            kind_loss = F.cross_entropy(logits, kinds[rows])
            optimizer.zero_grad()
            (price_loss + kind_loss).backward()
            optimizer.step()
    return guardian.findings
