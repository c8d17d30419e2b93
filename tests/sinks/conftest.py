"""Reports, terminals and a logger that nobody has set up."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from gpt_guard import catalogue
from gpt_guard.records import Report

LOGGER = logging.getLogger("gpt_guard")


@pytest.fixture
def report() -> Report:
    """The report of a run in which something of each kind happened."""
    return Report(
        steps=300,
        guards=("FiniteGuard", "LRTracker"),
        not_watched=("experts[0].cache: sparse tensor", "[red]odd[/red]"),
        first_loss=4.25,
        last_loss=2.5,
        lr_min=0.0,
        lr_max=3e-4,
        grad_norm_median=0.75,
        grad_norm_max=12.5,
        clipped_share=0.125,
        skipped_steps=2,
        facts={"metrics.val_loss": 2.75, "metrics.tokens": 12.0},
        watch_cost=0.06,
        inspected_steps=3,
        inspection_seconds=0.42,
        probes={"rows": 2, "future": 3},
        log="runs/first/steps.jsonl",
        findings=(catalogue.finding("GG902", "no forward was seen", step=3), catalogue.finding("GG102", "NaN")),
        counts={"GG902": 1, "GG102": 7, "MY1": 2},
    )


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that has not set up logging: pytest's own handlers sit on the root logger, out of reach here."""
    monkeypatch.setattr(LOGGER, "parent", logging.RootLogger(logging.WARNING))


@pytest.fixture(autouse=True)
def no_handler_left() -> Iterator[None]:
    yield
    assert not LOGGER.handlers


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(alone: None, monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    return Terminal()
