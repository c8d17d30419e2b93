"""The loss is NaN from the first step on, or the model does not learn at all.

Only the answer of each prompt is to be learned, so the prompt's labels are -100. The answer's length is taken from the
wrong end, and nothing is left: cross_entropy takes the mean over no positions.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from gpt_guard.casebook.book import Expected, SmallGPT, token_ids, windows
from gpt_guard.errors import GuardError
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding

EXPECTED = Expected("GG606", "marker", "loss = F.cross_entropy(")
ANSWER = 6


def train(*, broken: bool) -> tuple[Finding, ...]:
    """Train for a few steps, with the bug or without it, and return what was found."""
    torch.manual_seed(0)
    ids, generator = token_ids(4000), torch.Generator().manual_seed(1)
    model = SmallGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    guardian = Guardian(model, optimizer, sinks=[])

    try:
        with guardian:
            for _ in range(20):
                x, y = windows(ids, 16, 16, generator)
                labels = y.clone()
                labels[:, :-ANSWER] = -100
                if broken:
                    labels[:, ANSWER:] = -100  # the bug: the answer starts at -ANSWER
                    labels[:, :ANSWER] = -100
                loss = F.cross_entropy(model(x).flatten(0, 1), labels.flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    except GuardError:
        pass  # halted, which is what the findings say
    return guardian.findings
