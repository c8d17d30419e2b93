"""All loops whose losses are given something else than they take, and their healthy twins, as data."""

from __future__ import annotations

from . import loss_dims, loss_healthy, loss_order, loss_scores, loss_sums, loss_targets, loss_text
from .loss_parts import CASES, Case, run

FILES = (loss_dims, loss_healthy, loss_order, loss_scores, loss_sums, loss_targets, loss_text)
BUGS = [case for case in CASES if case.code is not None]
HEALTHY = [case for case in CASES if case.code is None]

__all__ = ["BUGS", "CASES", "HEALTHY", "Case", "run"]
