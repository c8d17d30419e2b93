"""The same fault as in scorer.py, under torch's own anomaly mode."""

import torch
from scorer import Scorer

torch.manual_seed(0)
scorer = Scorer()
adam = torch.optim.AdamW(scorer.parameters())
with torch.autograd.detect_anomaly():
    for step in range(5):
        mask = torch.ones(4, 8, dtype=torch.bool)
        mask[2] = step < 3
        adam.zero_grad()
        scorer(torch.randn(4, 8), mask).backward()
        adam.step()
