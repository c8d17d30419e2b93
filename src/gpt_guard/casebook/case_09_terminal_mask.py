"""The policy learns to end the episode early.

The return bootstraps from the value of the state after a terminal one: what comes after the end of an episode is
counted as if it had been earned.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpt_guard.casebook.book import Expected
from gpt_guard.checks.returns import check_returns
from gpt_guard.records import Finding

EXPECTED = Expected("GG617", "index", "step before")
GAMMA = 0.9


def returns(rewards: Tensor, next_values: Tensor, terminated: Tensor, truncated: Tensor) -> Tensor:
    """Discounted returns `[T]`: nothing after a terminal, the value of the last state at a time limit."""
    following, found = next_values[-1], []
    for step in reversed(range(len(rewards))):
        if truncated[step]:
            following = next_values[step]
        following = rewards[step] + GAMMA * following * (1.0 - terminated[step].float())
        found.append(following)
    return torch.stack(found[::-1])


def shifted(rewards: Tensor, next_values: Tensor, terminated: Tensor, truncated: Tensor) -> Tensor:
    """The same, with the terminals of the step before."""
    late = torch.cat([torch.zeros_like(terminated[:1]), terminated[:-1]])  # the bug
    return returns(rewards, next_values, late, truncated)


def train(*, broken: bool) -> tuple[Finding, ...]:
    """Ask the function, with the bug or without it, and return what was found."""
    return check_returns(shifted if broken else returns, gamma=GAMMA).findings
