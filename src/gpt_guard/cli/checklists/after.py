"""After training: answers from the checkpoints, the tokenizer beside them, and the whole run log."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from gpt_guard.cli.checklists.during import near_best
from gpt_guard.cli.checklists.evidence import UNKNOWN, listed, many, spoken
from gpt_guard.cli.checklists.lists import Answer
from gpt_guard.cli.checklists.run_dir import REPORT_FILE, RunDir

BELOW = 0.9
"""An untrained model is within a tenth of log V; what learned anything of a text is below that."""
STEP_NAMES = ("steps", "max_steps", "max_iters", "num_steps", "total_steps")


def finished(run: RunDir) -> Answer:
    """No halt at its end; the last step against the number that the checkpoint's settings name."""
    if run.halt is not None:
        return Answer(False, f"halted by {listed([run.halt])}")
    newest = run.newest
    if newest is None or not run.steps:
        return UNKNOWN
    stored = run.stored(newest)
    asked = None if isinstance(stored, str) else _asked_steps({**(stored.config or {}), **_settings(stored.extra)})
    if asked is None:
        return UNKNOWN
    done = run.steps[-1].step + 1
    return Answer(done >= asked, f"{done} of {asked} steps")


def loads(run: RunDir) -> Answer:
    """The first checkpoint, which is the best where one is named so, reads as data and holds finite weights."""
    if not run.checkpoints:
        return UNKNOWN
    path = run.checkpoints[0]
    stored = run.stored(path)
    if isinstance(stored, str):
        return Answer(False, stored)
    from gpt_guard.checkpoint.weights import non_finite

    bad = list(non_finite(stored.weights))
    said = f"{path.name}: {many(len(stored.weights), 'tensor')}"
    return Answer(not bad, f"{said}, not finite: {', '.join(bad[:3])}" if bad else said)


def repeatable(run: RunDir) -> Answer:
    """The checkpoint holds the model's config, and the log's head the versions."""
    if not run.checkpoints:
        return UNKNOWN
    stored = run.stored(run.checkpoints[0])
    if isinstance(stored, str):
        return UNKNOWN
    header = run.log.headers[0] if run.log is not None and run.log.headers else {}
    parts = {"config": stored.config, "versions": header.get("environment")}
    absent = [name for name, value in parts.items() if not value]
    return Answer(not absent, f"not kept: {', '.join(absent)}" if absent else f"{', '.join(parts)} are kept")


def tokenizer(run: RunDir) -> Answer:
    """By content: the digest of the tokenizer's file against the checkpoint's."""
    if not run.checkpoints or run.tokenizer is None:
        return UNKNOWN
    from gpt_guard.checkpoint.fingerprint import tokenizer_digest

    stored = run.stored(run.checkpoints[0])
    theirs = None if isinstance(stored, str) else stored.stamp.parts.get("tokenizer")
    if theirs is None:
        return Answer(None, f"{run.checkpoints[0].name} carries no fingerprint of a tokenizer")
    ours = tokenizer_digest(run.tokenizer.raw)
    same = ours == theirs
    return Answer(same, f"{ours[:12]} in both" if same else f"{ours[:12]} beside it, {theirs[:12]} in the checkpoint")


def best(run: RunDir) -> Answer:
    """The step of a checkpoint is that of the lowest validation loss in the log."""
    values = run.metric("val", "eval")
    if not values or not run.checkpoints:
        return UNKNOWN
    lowest = min(values, key=lambda step: values[step])
    steps = {path.name: _step(run, path) for path in run.checkpoints}
    # A checkpoint counts the steps done, the log numbers them from 0.
    kept = [name for name, step in steps.items() if step is not None and step - lowest in (0, 1)]
    said = f"the lowest, {values[lowest]:.3f}, was at step {lowest}"
    if kept:
        return Answer(True, f"{said}: {kept[0]}")
    known = [f"{name} is of step {step}" for name, step in steps.items() if step is not None]
    return Answer(False, f"{said}; {', '.join(known)}") if known else UNKNOWN


def below_even(run: RunDir) -> Answer:
    """The lowest validation loss against log V."""
    values = run.metric("val", "eval")
    if not values or not run.tokens:
        return UNKNOWN
    lowest, even = min(values.values()), math.log(len(run.tokens))
    return Answer(lowest < BELOW * even, f"{lowest:.3f}, log {len(run.tokens)} = {even:.3f}")


def tested(run: RunDir) -> Answer:
    """A metric with "test" in its name, logged once."""
    values = run.metric("test")
    if not values:
        return UNKNOWN
    last = values[max(values)]
    often = len(values) > 1
    return Answer(
        not often, f"{len(values)} times: a choice made by it is no test any more" if often else f"{last:.3f}"
    )


def unresolved(run: RunDir) -> Answer:
    """No finding of severity warning or error."""
    if run.log is None:
        return UNKNOWN
    found = spoken(run)
    return Answer(not found, listed(found) if found else "none")


def report_kept(run: RunDir) -> Answer:
    """report.json is there and has checks in it."""
    if REPORT_FILE in run.problems:
        return Answer(False, run.problems[REPORT_FILE])
    if run.report is None or not run.report.checks:
        return UNKNOWN
    return Answer(True, f"{REPORT_FILE} with {many(len(run.report.checks), 'line')}")


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


ANSWERS: dict[str, Callable[[RunDir], Answer]] = {
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
}
