"""Before training: what a run that has begun tells of the things preflight would have asked."""

from __future__ import annotations

import math
from collections.abc import Callable

from gpt_guard.cli.checklists.evidence import UNKNOWN, quiet
from gpt_guard.cli.checklists.lists import Answer
from gpt_guard.cli.checklists.run_dir import RunDir

NEAR = 0.1
"""How far the first loss may be from log V: random logits of spread s add about s**2 / 2 to it."""
EARLY = 10
"""From this step on a loss says nothing of the untrained model."""


def environment(run: RunDir) -> Answer:
    """Device and versions, from the head of the run log."""
    header = run.log.headers[-1] if run.log is not None and run.log.headers else {}
    facts = header.get("environment")
    if not isinstance(facts, dict) or "device" not in facts:
        return UNKNOWN
    return Answer(True, f"{facts['device']}, torch {facts.get('torch', '?')}, Python {facts.get('python', '?')}")


def initial_loss(run: RunDir) -> Answer:
    """The loss of the first logged step against log V, V being the size of the run's vocabulary."""
    first = run.steps[0] if run.steps else None
    if first is None or first.loss is None or first.step >= EARLY or not run.tokens:
        return UNKNOWN
    even = math.log(len(run.tokens))
    near = abs(first.loss - even) <= NEAR * even  # False for NaN
    return Answer(near, f"{first.loss:.3f} at step {first.step}, log {len(run.tokens)} = {even:.3f}")


ANSWERS: dict[str, Callable[[RunDir], Answer]] = {
    "environment": environment,
    "initial-loss": initial_loss,
    "gradients": quiet("GradNormMonitor", "GG201", "GG202", "GG208", "GG220"),
    "optimizer": quiet("ParamDeltaProbe", "GG301", "GG302", "GG303", "GG304", "GG307", "GG310", "GG320"),
}
