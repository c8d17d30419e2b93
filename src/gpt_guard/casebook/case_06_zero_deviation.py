"""NaN in the very first batch, and every tensor of the model is to blame.

One feature is constant in the training split. Standardising divides by its standard deviation, which is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard.casebook.book import Expected
from gpt_guard.errors import GuardError
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding

EXPECTED = Expected("GG150", "zero_std", "standardise")


def standardise(features: Tensor, *, eps: float) -> Tensor:
    """Mean 0 and standard deviation 1 for each feature."""
    return (features - features.mean(0)) / (features.std(0) + eps)


def train(*, broken: bool) -> tuple[Finding, ...]:
    """Train for a few steps, with the bug or without it, and return what was found."""
    torch.manual_seed(0)
    raw = torch.randn(256, 5) * torch.tensor([1.0, 50.0, 0.1, 3.0, 0.0]) + torch.tensor([0.0, 9.0, 1.0, 0.0, 7.0])
    wanted = raw[:, :1] - 0.02 * raw[:, 1:2]
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    guardian = Guardian(model, optimizer, sinks=[])

    try:
        with guardian:
            raw = guardian.stage("load", raw)
            features = guardian.stage("standardise", standardise(raw, eps=0.0 if broken else 1e-6))  # the bug: no eps
            for _ in range(20):
                rows = torch.randint(256, (32,))
                loss = F.mse_loss(model(features[rows]), wanted[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    except GuardError:
        pass  # halted, which is what the findings say
    return guardian.findings
