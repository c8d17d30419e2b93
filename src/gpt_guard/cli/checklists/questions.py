"""What answers each item from a run directory: what a run tells before, during and after training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from gpt_guard.cli.checklists.items import (
    UNKNOWN,
    Item,
    ItemAnswer,
    Phase,
    above_info,
    checklists,
    ends,
    listed,
    losses,
    many,
    no_finding,
)
from gpt_guard.cli.checklists.run_dir import REPORT_FILE, RunDir
from gpt_guard.records import Severity
from gpt_guard.records.render import learning_rate, number
from gpt_guard.report.run_log import RUN_FILE

Answering = Callable[[RunDir], ItemAnswer]

NEAR = 0.1
"""How far the first loss may be from log V: random logits of spread s add about s**2 / 2 to it."""
EARLY = 10
"""From this step on a loss says nothing of the untrained model."""
SLOWER = 1.5
"""A step that keeps every graph alive has doubled its time long before memory is full."""
RISEN = 0.02
"""Validation loss wavers by a percent or so from one time to the next."""
SKIPPED = 0.05
"""A gradient scaler skips a step in 2000 once it has found its scale (torch's growth_interval)."""
BELOW = 0.9
"""An untrained model is within a tenth of log V; what learned anything of a text is below that."""
STEP_NAMES = ("steps", "max_steps", "max_iters", "num_steps", "total_steps")


def environment(run: RunDir) -> ItemAnswer:
    """Device and versions, from the head of the run log."""
    header = run.log.headers[-1] if run.log is not None and run.log.headers else {}
    facts = header.get("environment")
    if not isinstance(facts, dict) or "device" not in facts:
        return UNKNOWN
    return ItemAnswer(True, f"{facts['device']}, torch {facts.get('torch', '?')}, Python {facts.get('python', '?')}")


def initial_loss(run: RunDir) -> ItemAnswer:
    """The loss of the first logged step against log V, V being the size of the run's vocabulary."""
    first = run.steps[0] if run.steps else None
    if first is None or first.loss is None or first.step >= EARLY or not run.tokens:
        return UNKNOWN
    even = math.log(len(run.tokens))
    near = abs(first.loss - even) <= NEAR * even  # False for NaN
    return ItemAnswer(near, f"{first.loss:.3f} at step {first.step}, log {len(run.tokens)} = {even:.3f}")


def log_is_whole(run: RunDir) -> ItemAnswer:
    """Steps follow one another from first to last."""
    if RUN_FILE in run.problems:
        return ItemAnswer(False, run.problems[RUN_FILE])
    numbers = sorted({seen.step for seen in run.steps})
    if not numbers:
        return UNKNOWN
    missing = numbers[-1] - numbers[0] + 1 - len(numbers)
    text = f"steps {numbers[0]} to {numbers[-1]}"
    return ItemAnswer(missing == 0, text if not missing else f"{text}, {missing} of them missing")


def finite(run: RunDir) -> ItemAnswer:
    """No loss is NaN or infinite."""
    bad = [seen.step for seen in run.steps if seen.loss is not None and not math.isfinite(seen.loss)]
    if bad:
        return ItemAnswer(False, f"{len(bad)} are not, the first at step {bad[0]}")
    count = len(losses(run))
    return ItemAnswer(True, f"{count} loss{'es' if count != 1 else ''}") if count else UNKNOWN


def falls(run: RunDir) -> ItemAnswer:
    """The last tenth of the steps has a lower loss than the first."""
    both = ends(losses(run))
    if both is None:
        return UNKNOWN
    return ItemAnswer(both[1] < both[0], f"{both[0]:.3f} in the first tenth, {both[1]:.3f} in the last")


def errors(run: RunDir) -> ItemAnswer:
    """No finding of severity error."""
    if run.log is None:
        return UNKNOWN
    found = [finding for finding in above_info(run) if finding.severity is Severity.ERROR]
    return ItemAnswer(not found, listed(found) if found else f"{many(len(run.log.findings), 'finding')} in all")


def skipped(run: RunDir) -> ItemAnswer:
    """The share of steps that a gradient scaler skipped."""
    if not run.steps:
        return UNKNOWN
    share = sum(seen.skipped for seen in run.steps) / len(run.steps)
    return ItemAnswer(share <= SKIPPED, f"{share:.1%} of {len(run.steps)}")


def validated(run: RunDir) -> ItemAnswer:
    """There are validation losses."""
    values = run.validation
    if not values:
        return UNKNOWN
    last = max(values)
    return ItemAnswer(True, f"{many(len(values), 'time')}, the last at step {last}")


def near_best(run: RunDir) -> ItemAnswer:
    """The newest validation loss is at most 2 % above the lowest."""
    values = run.validation
    if not values:
        return UNKNOWN
    best, last = min(values, key=lambda step: values[step]), max(values)
    ok = values[last] <= values[best] * (1 + RISEN)
    return ItemAnswer(ok, f"{values[last]:.3f} at step {last}, the lowest was {values[best]:.3f} at step {best}")


def saved(run: RunDir) -> ItemAnswer:
    """The newest checkpoint is of the second half of what was trained."""
    newest = run.newest
    if newest is None:
        return ItemAnswer(False, "no checkpoint so far") if len(run.steps) > 1000 else UNKNOWN
    stored = run.stored(newest)
    if isinstance(stored, str):
        return ItemAnswer(False, stored)
    if stored.step is None or not run.steps:
        return ItemAnswer(True, f"{newest.name}, of a step it does not tell")
    # A checkpoint counts the steps done, the log numbers them from 0.
    behind = max(0, run.steps[-1].step + 1 - stored.step)
    return ItemAnswer(behind * 2 <= run.steps[-1].step + 1, f"{newest.name} is {many(behind, 'step')} behind")


def pace(run: RunDir) -> ItemAnswer:
    """Even the fastest steps of the last tenth take longer: other programs slow some steps down, a leak slows all."""
    times = [seen.step_time for seen in run.steps if seen.step_time is not None]
    size = len(times) // 10
    if size < 10:
        return UNKNOWN
    first, last = (sorted(part)[size // 10] for part in (times[:size], times[-size:]))
    return ItemAnswer(
        last <= first * SLOWER, f"{first * 1000:.1f} ms in the first tenth, {last * 1000:.1f} ms in the last"
    )


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


def finished(run: RunDir) -> ItemAnswer:
    """No halt at its end; the last step against the number that the checkpoint's settings name."""
    if run.halt is not None:
        return ItemAnswer(False, f"halted by {listed([run.halt])}")
    newest = run.newest
    if newest is None or not run.steps:
        return UNKNOWN
    stored = run.stored(newest)
    asked = None if isinstance(stored, str) else _asked_steps({**(stored.config or {}), **_settings(stored.extra)})
    if asked is None:
        return UNKNOWN
    done = run.steps[-1].step + 1
    return ItemAnswer(done >= asked, f"{done} of {asked} steps")


def loads(run: RunDir) -> ItemAnswer:
    """The first checkpoint, which is the best where one is named so, reads as data and holds finite weights."""
    if not run.checkpoints:
        return UNKNOWN
    path = run.checkpoints[0]
    stored = run.stored(path)
    if isinstance(stored, str):
        return ItemAnswer(False, stored)
    from gpt_guard.checkpoint.weights import non_finite

    bad = list(non_finite(stored.weights))
    text = f"{path.name}: {many(len(stored.weights), 'tensor')}"
    return ItemAnswer(not bad, f"{text}, not finite: {', '.join(bad[:3])}" if bad else text)


def repeatable(run: RunDir) -> ItemAnswer:
    """The checkpoint holds the model's config, and the log's head the versions."""
    if not run.checkpoints:
        return UNKNOWN
    stored = run.stored(run.checkpoints[0])
    if isinstance(stored, str):
        return UNKNOWN
    header = run.log.headers[0] if run.log is not None and run.log.headers else {}
    parts = {"config": stored.config, "versions": header.get("environment")}
    absent = [name for name, value in parts.items() if not value]
    return ItemAnswer(not absent, f"not kept: {', '.join(absent)}" if absent else f"{', '.join(parts)} are kept")


def tokenizer(run: RunDir) -> ItemAnswer:
    """By content: the digest of the tokenizer's file against the checkpoint's."""
    if not run.checkpoints or run.tokenizer is None:
        return UNKNOWN
    from gpt_guard.checkpoint.fingerprint import tokenizer_digest

    stored = run.stored(run.checkpoints[0])
    theirs = None if isinstance(stored, str) else stored.stamp.parts.get("tokenizer")
    if theirs is None:
        return ItemAnswer(None, f"{run.checkpoints[0].name} carries no fingerprint of a tokenizer")
    ours = tokenizer_digest(run.tokenizer.raw)
    same = ours == theirs
    return ItemAnswer(
        same, f"{ours[:12]} in both" if same else f"{ours[:12]} beside it, {theirs[:12]} in the checkpoint"
    )


def best(run: RunDir) -> ItemAnswer:
    """The step of a checkpoint is that of the lowest validation loss in the log."""
    values = run.validation
    if not values or not run.checkpoints:
        return UNKNOWN
    lowest = min(values, key=lambda step: values[step])
    steps = {path.name: _step(run, path) for path in run.checkpoints}
    # A checkpoint counts the steps done, the log numbers them from 0.
    kept = [name for name, step in steps.items() if step is not None and step - lowest in (0, 1)]
    text = f"the lowest, {values[lowest]:.3f}, was at step {lowest}"
    if kept:
        return ItemAnswer(True, f"{text}: {kept[0]}")
    known = [f"{name} is of step {step}" for name, step in steps.items() if step is not None]
    return ItemAnswer(False, f"{text}; {', '.join(known)}") if known else UNKNOWN


def below_even(run: RunDir) -> ItemAnswer:
    """The lowest validation loss against log V."""
    values = run.validation
    if not values or not run.tokens:
        return UNKNOWN
    lowest, even = min(values.values()), math.log(len(run.tokens))
    return ItemAnswer(lowest < BELOW * even, f"{lowest:.3f}, log {len(run.tokens)} = {even:.3f}")


def tested(run: RunDir) -> ItemAnswer:
    """A metric with "test" in its name, logged once."""
    values = run.test
    if not values:
        return UNKNOWN
    last = values[max(values)]
    often = len(values) > 1
    return ItemAnswer(
        not often, f"{len(values)} times: a choice made by it is no test any more" if often else f"{last:.3f}"
    )


def unresolved(run: RunDir) -> ItemAnswer:
    """No finding of severity warning or error."""
    if run.log is None:
        return UNKNOWN
    found = above_info(run)
    return ItemAnswer(not found, listed(found) if found else "none")


def report_kept(run: RunDir) -> ItemAnswer:
    """report.json is there and has checks in it."""
    if REPORT_FILE in run.problems:
        return ItemAnswer(False, run.problems[REPORT_FILE])
    if run.report is None or not run.report.checks:
        return UNKNOWN
    return ItemAnswer(True, f"{REPORT_FILE} with {many(len(run.report.checks), 'line')}")


def _asked_steps(settings: dict[str, Any]) -> int | None:
    found = [settings[name] for name in STEP_NAMES if isinstance(settings.get(name), int)]
    return found[0] if found else None


def _settings(extra: dict[str, Any]) -> dict[str, Any]:
    """What a training script stored of its options, under any of the usual names."""
    found = [extra[name] for name in ("settings", "args", "hparams", "config") if isinstance(extra.get(name), dict)]
    return found[0] if found else {}


def _step(run: RunDir, path: Any) -> int | None:
    stored = run.stored(path)
    return None if isinstance(stored, str) else stored.step


ANSWERS: dict[Phase, dict[str, Answering]] = {
    "before": {
        "environment": environment,
        "initial-loss": initial_loss,
        "gradients": no_finding("GradNormMonitor", "GG201", "GG202", "GG208", "GG220"),
        "optimizer": no_finding("ParamDeltaProbe", "GG301", "GG302", "GG303", "GG304", "GG307", "GG310", "GG320"),
    },
    "during": {
        "log": log_is_whole,
        "finite": finite,
        "falls": falls,
        "findings": errors,
        "grad-norm": no_finding("GradNormMonitor", "GG2", figures=_norms),
        "lr": no_finding("LRTracker", "GG4", figures=_rates),
        "updates": no_finding("ParamDeltaProbe", "GG301", "GG304", "GG305", "GG308", "GG309", figures=_ratios),
        "skipped": skipped,
        "validated": validated,
        "validation-best": near_best,
        "saved": saved,
        "pace": pace,
    },
    "after": {
        "finished": finished,
        "loads": loads,
        "repeatable": repeatable,
        "tokenizer": tokenizer,
        "best": best,
        "overfitted": near_best,
        "below-even": below_even,
        "test": tested,
        "unresolved": unresolved,
        "report": report_kept,
    },
}


def answers(phase: Phase, run: RunDir | None) -> Iterator[tuple[Item, ItemAnswer]]:
    """Each item of one list with its answer; without a run directory none is known."""
    for item in checklists()[phase]:
        yield item, UNKNOWN if run is None else _answer(item, ANSWERS[phase].get(item.key), run)


def _answer(item: Item, own: Answering | None, run: RunDir) -> ItemAnswer:
    reported = _reported(item.stage, run) if item.stage is not None else UNKNOWN
    return own(run) if reported.ok is None and own is not None else reported


def _reported(stage: str, run: RunDir) -> ItemAnswer:
    """What preflight found: failed if one line of the stage did, passed if one did and none failed."""
    lines = [line for line in run.report.checks if line.stage == stage] if run.report is not None else []
    failed = [line for line in lines if line.status == "failed"]
    passed = [line for line in lines if line.status == "passed"]
    if failed:
        return ItemAnswer(False, "; ".join(f"{line.title}: {line.measured}" for line in failed) + f" ({REPORT_FILE})")
    if passed:
        text = f"{len(passed)} lines passed" if len(passed) > 1 else passed[0].measured
        return ItemAnswer(True, f"{text} ({REPORT_FILE})")
    return UNKNOWN
