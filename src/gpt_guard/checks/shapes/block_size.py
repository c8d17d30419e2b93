"""The longest row that a model says it takes, and one token more."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from gpt_guard.catalogue import finding
from gpt_guard.checks.runner.base import Stage, Subject
from gpt_guard.checks.runner.forward import call, raised
from gpt_guard.checks.runner.perturb import probe_ids
from gpt_guard.records import CheckResult

_LONGEST_ON_CPU = 2048
_LONGEST_ELSEWHERE = 16384
"""Longer rows are not run: attention in full takes minutes, or more memory than there is."""
_FROM_BATCH = "the length of the batch's rows"
_LARGE = 10**10
"""Parameters times positions above which one row must do: some ten seconds on two cores."""


def block_size_lines(stage: Stage, model: nn.Module, subject: Subject) -> Iterator[CheckResult]:
    """Run rows of block_size tokens, and on the CPU of one more. Call it in eval mode and without gradient."""
    size = subject.block_size
    if size is None:
        yield stage.skipped("block_size", "no block_size is known")
        return
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    if size > (_LONGEST_ON_CPU if device == "cpu" else _LONGEST_ELSEWHERE):
        yield stage.skipped("block_size", f"{size} tokens are too many to run here")
        return
    source = subject.sources.get("block_size", "block_size")
    # Two rows: what goes wrong with a single one is asked for by itself.
    large = size * sum(parameter.numel() for parameter in model.parameters()) > _LARGE
    rows = 1 if large else 2
    yield _at(stage, model, subject, rows, size, source)
    # On an accelerator an index out of range ends the process's use of the device: no exception can be caught.
    if device == "cpu" and source != _FROM_BATCH:
        yield _beyond(stage, model, subject, rows, size)


def _at(stage: Stage, model: nn.Module, subject: Subject, rows: int, size: int, source: str) -> CheckResult:
    expected = f"{size} positions, by {source}"
    try:
        shape = tuple(call(model, probe_ids(subject, rows, size)).logits.shape)
    except Exception as error:
        told = raised(error, f"the model called with {size} tokens")
        found = finding("GG643", told.seen, likely=_too_short(str(error)), where=told.where)
        return stage.failed("block_size", f"{type(error).__name__} at {size} tokens", expected, found)
    if shape[:2] == (rows, size):
        return stage.passed("block_size", f"{size} tokens give {size} positions", expected)
    found = finding("GG643", f"{rows} rows of {size} tokens give logits {list(shape)}.", likely=["cropped"])
    return stage.failed("block_size", list(shape), expected, found)


def _beyond(stage: Stage, model: nn.Module, subject: Subject, rows: int, size: int) -> CheckResult:
    title, expected = "one token more", "refused, or handled"
    try:
        shape = tuple(call(model, probe_ids(subject, rows, size + 1)).logits.shape)
    except Exception as error:
        return stage.passed(title, f"refused with {type(error).__name__}", expected)
    if shape[1] == size + 1:
        return stage.passed(title, "handled: positions have no table of this size", expected)
    return stage.passed(title, f"handled: cropped to {shape[1]}", expected)


def _too_short(message: str) -> list[str]:
    text = message.lower()
    return ["positions"] if "index out of range" in text else ["mask"] if "size" in text else ["config"]
