"""The table at the end of a run: complete, plain where it is not a terminal, and never markup out of a name."""

from __future__ import annotations

import io
import sys

import pytest

from gpt_guard.catalogue import finding
from gpt_guard.records import Report, Severity
from gpt_guard.sinks.console import ConsoleSink


@pytest.mark.parametrize(
    "words",
    [
        "steps │ 300 (2 skipped)",
        "loss │ 4.25 first, 2.5 last",
        "lr │ 0 to 3.0e-04",
        "grad norm │ 0.75 median, 12.5 max",
        "clipped │ 12.5 % of steps",
        "findings │ GG102 x7 The loss is non-finite",
        "GG902 x1 The model was never called",
        "MY1 x2",
        "guards │ FiniteGuard, LRTracker",
        "not watched │ experts[0].cache: sparse tensor",
        "[red]odd[/red]",
    ],
)
def test_the_summary_says(words: str, alone: None, capsys: pytest.CaptureFixture[str], report: Report) -> None:
    sink = ConsoleSink()
    sink.open({})
    sink.close(report)
    out, err = capsys.readouterr()
    assert out == ""
    assert words in " ".join(err.split())
    assert "\x1b" not in err


def test_the_summary_of_a_clean_run(alone: None, capsys: pytest.CaptureFixture[str]) -> None:
    sink = ConsoleSink()
    sink.open({})
    sink.close(Report(steps=5, guards=("FiniteGuard",)))
    words = " ".join(capsys.readouterr().err.split())
    assert "findings │ none" in words
    assert "not watched │ nothing was left out" in words
    assert "loss" not in words


def test_what_was_only_recorded_is_marked_as_a_note(alone: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing was said of it before: it must not look like a warning that was overlooked."""
    sink = ConsoleSink()
    sink.open({})
    sink.close(Report(steps=5, findings=(finding("GG238", "seen", severity=Severity.INFO), finding("GG902", "seen"))))
    words = " ".join(capsys.readouterr().err.split())
    assert "GG238 x1 The loss is not divided by the number of" in words
    assert words.count("(a note)") == 1


def test_the_summary_is_said_once_and_only_if_asked(
    alone: None, capsys: pytest.CaptureFixture[str], report: Report
) -> None:
    sink = ConsoleSink()
    sink.open({})
    sink.close(report)
    sink.close(report)
    assert capsys.readouterr().err.count("300 (2 skipped)") == 1
    quiet = ConsoleSink(summary=False)
    quiet.open({})
    quiet.close(report)
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_colours(terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch, report: Report) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    sink = ConsoleSink()
    sink.open({})
    sink.close(report)
    assert "\x1b[" in terminal.getvalue()
