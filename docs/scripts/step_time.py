"""A guard of one's own: steps that take far longer than usual."""

import time
from collections import deque
from statistics import median

import torch
from torch import nn

from gpt_guard import Finding, Guard, Guardian, Severity


class StepTime(Guard):
    """Says when a step took ten times as long as the steps before it: a loader that waits, a disk, a neighbour."""

    def __init__(self, factor=10.0, window=20):
        self.factor = factor
        self.seconds = deque(maxlen=window)
        self.began = None

    def after_step(self, optimizer):
        now = time.perf_counter()
        if self.began is not None:
            self.seconds.append(now - self.began)
        self.began = now

    def judge(self, seen):
        if len(self.seconds) == self.seconds.maxlen and self.seconds[-1] > self.factor * median(self.seconds):
            yield Finding(
                code="MY201",
                title="A slow step",
                severity=Severity.WARNING,
                seen=f"{self.seconds[-1]:.2f} s, where {median(self.seconds):.4f} s is usual",
                step=seen.step,
                causes=("The loader had to wait for the disk.", "Another process took the cores."),
                next_test="Time next(batches) alone.",
                fix="More workers, or prefetch_factor above 2.",
            )


model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with Guardian(model, optimizer, guards=[StepTime()], summary=False):
    for step in range(40):
        if step == 30:
            time.sleep(0.5)
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
