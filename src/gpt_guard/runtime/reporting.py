"""Gather the report of a run: where it ran, what was watched, what was found."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from pydantic import JsonValue
from torch import nn
from torch.optim import Optimizer

from gpt_guard.callbacks.base import Guard
from gpt_guard.checks.environment.facts import surroundings
from gpt_guard.records import Report
from gpt_guard.runtime.dispatch import Dispatch
from gpt_guard.runtime.progress import Progress
from gpt_guard.sinks.files import JsonlSink


def make_report(
    model: nn.Module | None, guards: Sequence[Guard], dispatch: Dispatch, progress: Progress, not_watched: Sequence[str]
) -> Report:
    """The report as of now; reads nothing from the device. `model` is None where it no longer exists."""
    digests, unseen = _fingerprint(guards)
    logs = [str(sink.path) for sink in dispatch.sinks if isinstance(sink, JsonlSink) and sink.trouble is None]
    return Report(
        environment=surroundings(model),
        model=type(model).__name__ if model is not None else "",
        parameters=sum(parameter.numel() for parameter in model.parameters()) if model is not None else 0,
        guards=tuple(guard.name for guard in guards),
        not_watched=(*not_watched, *unseen),
        fingerprint=digests,
        facts={f"metrics.{name}": value for name, value in progress.metrics.items()},
        findings=tuple(dispatch.findings),
        counts=dict(dispatch.counts),
        log=logs[0] if logs else None,
        **progress.facts(),
    )


def _fingerprint(guards: Sequence[Guard]) -> tuple[dict[str, str], list[str]]:
    """Digests by name, and the guards that failed to give theirs: a report is also made while an error is under way."""
    digests: dict[str, str] = {}
    failed: list[str] = []
    for guard in guards:
        try:
            digests.update(guard.fingerprint())
        except Exception as error:
            failed.append(f"{guard.name}: no fingerprint, {type(error).__name__}: {error}")
    return digests, failed


def header(
    model: nn.Module, optimizers: Sequence[Optimizer], guards: Sequence[Guard], step: int
) -> dict[str, JsonValue]:
    """The facts at the head of a run log."""
    return {
        "model": type(model).__name__,
        "optimizers": [type(optimizer).__name__ for optimizer in optimizers],
        "guards": [guard.name for guard in guards],
        "step": step,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": dict(surroundings(model)),
    }
