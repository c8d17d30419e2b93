"""Does what a model says depend on its prompt, and on more than the prompt's last token?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gpt_guard.catalogue import finding
from gpt_guard.checks.generation.decoding import last_logits
from gpt_guard.hooks.isolation.eval_no_grad import quiet
from gpt_guard.records import Finding, Severity

IGNORED = 0.01
"""Prompts count as ignored where the predictions after any two of them differ by less than this share of probability
(total variation distance, from 0 to 1); a bigram model of text is at 0.5 and above."""


@dataclass
class Influence:
    """The mean total variation distance between predictions after different prompts, and with the last token equal."""

    prompts: float
    earlier: float
    finding: Finding | None = None
    note: Finding | None = None


def influence(model: nn.Module, prompts: Tensor, ignored: float = IGNORED) -> Influence:
    """Compare the next-token probabilities after prompts `[B, T]`, and after the same with one last token for all.

    Eval mode, no gradient; reads the device. Nothing is sampled, so that a loop which all texts end in counts for
    nothing here.
    """
    same_end = prompts.clone()
    same_end[:, -1] = prompts[0, -1]
    with quiet(model):
        apart, earlier = _apart(last_logits(model, prompts)), _apart(last_logits(model, same_end))
    outcome = Influence(apart, earlier)
    evidence = {"distance": apart, "distance_same_last_token": earlier, "prompts": prompts.size(0)}
    if not apart >= ignored:
        seen = f"the predictions after {prompts.size(0)} different prompts differ by {apart:.2g} of 1 on average"
        outcome.finding = finding("GG686", seen, likely=["constant", "collapsed"], evidence=evidence)
    elif earlier < 1e-6 and prompts.size(1) > 1:
        seen = f"with the same last token all {prompts.size(0)} prompts give the same prediction"
        outcome.note = finding(
            "GG686",
            seen,
            title="Only the last token of the prompt counts",
            severity=Severity.WARNING,
            likely=["last_token"],
            evidence=evidence,
        )
    return outcome


def _apart(logits: Tensor) -> float:
    probabilities = logits.softmax(dim=-1)
    count = probabilities.size(0)
    distances = [
        float((probabilities[i] - probabilities[j]).abs().sum() / 2) for i in range(count) for j in range(i + 1, count)
    ]
    return float(torch.tensor(distances).mean()) if distances else 0.0
