"""During training: answers from the run log as it stands."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median

from gpt_guard.cli.checklists.evidence import UNKNOWN, ends, listed, losses, many, quiet, spoken
from gpt_guard.cli.checklists.lists import Answer
from gpt_guard.cli.checklists.run_dir import RunDir
from gpt_guard.records import Severity
from gpt_guard.records.render import learning_rate, number
from gpt_guard.report.run_log import RUN_FILE

SLOWER = 1.5
"""A step that keeps every graph alive has doubled its time long before memory is full."""
RISEN = 0.02
"""Validation loss wavers by a percent or so from one time to the next."""
SKIPPED = 0.05
"""A gradient scaler skips a step in 2000 once it has found its scale (torch's growth_interval)."""


def log_is_whole(run: RunDir) -> Answer:
    """Steps follow one another from first to last."""
    if RUN_FILE in run.problems:
        return Answer(False, run.problems[RUN_FILE])
    numbers = sorted({seen.step for seen in run.steps})
    if not numbers:
        return UNKNOWN
    missing = numbers[-1] - numbers[0] + 1 - len(numbers)
    said = f"steps {numbers[0]} to {numbers[-1]}"
    return Answer(missing == 0, said if not missing else f"{said}, {missing} of them missing")


def finite(run: RunDir) -> Answer:
    """No loss is NaN or infinite."""
    bad = [seen.step for seen in run.steps if seen.loss is not None and not math.isfinite(seen.loss)]
    if bad:
        return Answer(False, f"{len(bad)} are not, the first at step {bad[0]}")
    count = len(losses(run))
    return Answer(True, f"{count} loss{'es' if count != 1 else ''}") if count else UNKNOWN


def falls(run: RunDir) -> Answer:
    """The last tenth of the steps has a lower loss than the first."""
    both = ends(losses(run))
    if both is None:
        return UNKNOWN
    return Answer(both[1] < both[0], f"{both[0]:.3f} in the first tenth, {both[1]:.3f} in the last")


def errors(run: RunDir) -> Answer:
    """No finding of severity error."""
    if run.log is None:
        return UNKNOWN
    found = [finding for finding in spoken(run) if finding.severity is Severity.ERROR]
    return Answer(not found, listed(found) if found else f"{many(len(run.log.findings), 'finding')} in all")


def skipped(run: RunDir) -> Answer:
    """The share of steps that a gradient scaler skipped."""
    if not run.steps:
        return UNKNOWN
    share = sum(seen.skipped for seen in run.steps) / len(run.steps)
    return Answer(share <= SKIPPED, f"{share:.1%} of {len(run.steps)}")


def validated(run: RunDir) -> Answer:
    """There are validation losses."""
    values = run.metric("val", "eval")
    if not values:
        return UNKNOWN
    last = max(values)
    return Answer(True, f"{many(len(values), 'time')}, the last at step {last}")


def near_best(run: RunDir) -> Answer:
    """The newest validation loss is at most 2 % above the lowest."""
    values = run.metric("val", "eval")
    if not values:
        return UNKNOWN
    best, last = min(values, key=lambda step: values[step]), max(values)
    ok = values[last] <= values[best] * (1 + RISEN)
    return Answer(ok, f"{values[last]:.3f} at step {last}, the lowest was {values[best]:.3f} at step {best}")


def saved(run: RunDir) -> Answer:
    """The newest checkpoint is of the second half of what was trained."""
    newest = run.newest
    if newest is None:
        return Answer(False, "no checkpoint so far") if len(run.steps) > 1000 else UNKNOWN
    stored = run.stored(newest)
    if isinstance(stored, str):
        return Answer(False, stored)
    if stored.step is None or not run.steps:
        return Answer(True, f"{newest.name}, of a step it does not tell")
    # A checkpoint counts the steps done, the log numbers them from 0.
    behind = max(0, run.steps[-1].step + 1 - stored.step)
    return Answer(behind * 2 <= run.steps[-1].step + 1, f"{newest.name} is {many(behind, 'step')} behind")


def pace(run: RunDir) -> Answer:
    """Even the fastest steps of the last tenth take longer: other programs slow some steps down, a leak slows all."""
    times = [seen.step_time for seen in run.steps if seen.step_time is not None]
    size = len(times) // 10
    if size < 10:
        return UNKNOWN
    first, last = (sorted(part)[size // 10] for part in (times[:size], times[-size:]))
    return Answer(last <= first * SLOWER, f"{first * 1000:.1f} ms in the first tenth, {last * 1000:.1f} ms in the last")


def _norms(run: RunDir) -> str:
    norms = [seen.grad_norm for seen in run.steps if seen.grad_norm is not None]
    clips = [seen.clipped for seen in run.steps if seen.clipped is not None]
    share = f", {sum(clips) / len(clips):.0%} of the steps clipped" if clips else ""
    return f"median {number(median(norms))}, at most {number(max(norms))}{share}" if norms else ""


def _rates(run: RunDir) -> str:
    rates = [max(seen.lr) for seen in run.steps if seen.lr]
    if not rates:
        return ""
    first, peak, last = (learning_rate(value) for value in (rates[0], max(rates), rates[-1]))
    return f"{first} at first, {peak} at its highest, {last} now"


def _ratios(run: RunDir) -> str:
    ratios = [seen.update_ratio for seen in run.steps if seen.update_ratio is not None]
    return f"update ratio {number(median(ratios))} in the median" if ratios else ""


ANSWERS: dict[str, Callable[[RunDir], Answer]] = {
    "log": log_is_whole,
    "finite": finite,
    "falls": falls,
    "findings": errors,
    "grad-norm": quiet("GradNormMonitor", "GG2", say=_norms),
    "lr": quiet("LRTracker", "GG4", say=_rates),
    "updates": quiet("ParamDeltaProbe", "GG301", "GG304", "GG305", "GG308", "GG309", say=_ratios),
    "skipped": skipped,
    "validated": validated,
    "validation-best": near_best,
    "saved": saved,
    "pace": pace,
}
