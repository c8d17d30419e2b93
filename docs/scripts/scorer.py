"""A model that scores its tokens, and meets a row of nothing but padding from step 3 on."""

import torch
from torch import nn

from gpt_guard import Guardian


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weigh = nn.Linear(8, 8)

    def forward(self, x, mask):
        scores = self.weigh(x).masked_fill(~mask, float("-inf"))
        return scores.softmax(-1).square().mean()


if __name__ == "__main__":
    # --8<-- [start:training]
    torch.manual_seed(0)
    scorer = Scorer()
    adam = torch.optim.AdamW(scorer.parameters())
    with Guardian(scorer, adam, run_dir="runs/nan", summary=False):
        for step in range(5):
            mask = torch.ones(4, 8, dtype=torch.bool)
            mask[2] = step < 3
            adam.zero_grad()
            scorer(torch.randn(4, 8), mask).backward()
            adam.step()
    # --8<-- [end:training]
