"""Warnings through logging, a summary at the end, and no progress bar torn by either."""

from __future__ import annotations

import io
import logging
import re
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress
from tqdm import tqdm

from gpt_guard import catalogue
from gpt_guard.catalogue import finding
from gpt_guard.records import Action, Finding, Report, Severity, SourceLine
from gpt_guard.sinks.console import ConsoleSink, summary_text

LOGGER = logging.getLogger("gpt_guard")
FINDING = catalogue.finding("GG902", "no forward was seen", step=3)
FIRST_LINE = "gpt_guard warning: GG902 The model was never called inside the Guardian: step 3"


def single_spaced(text: str) -> str:
    """The text with one space where there are several: how columns are aligned is not what a test asks."""
    return re.sub(r" +", " ", text).replace("\n ", "\n")


def screen(written: str) -> list[str]:
    """What a person sees of it: after a carriage return, a line is written over."""
    shown = []
    for line in written.split("\n"):
        cells: list[str] = []
        for part in line.split("\r"):
            cells[: len(part)] = part
        shown.append("".join(cells).rstrip())
    return shown


def test_without_logging_set_up_warnings_reach_stderr(alone: None, capsys: pytest.CaptureFixture[str]) -> None:
    sink = ConsoleSink()
    sink.open({})
    sink.find(FINDING, Action.WARN)
    out, err = capsys.readouterr()
    assert err.startswith(f"{FIRST_LINE}\n  no forward was seen\n  Most likely: ")
    assert out == ""
    sink.close(None)


def test_the_handler_is_there_only_between_open_and_close(alone: None) -> None:
    sink = ConsoleSink()
    assert not LOGGER.handlers
    sink.open({})
    assert len(LOGGER.handlers) == 1
    sink.close(None)
    sink.close(None)
    assert not LOGGER.handlers


def test_handlers_of_the_users_own_go_first(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], report: Report
) -> None:
    sink = ConsoleSink(summary=False)
    sink.open({})
    assert not LOGGER.handlers
    sink.find(FINDING, Action.WARN)
    sink.find(catalogue.finding("GG102", "NaN"), Action.WARN)
    sink.close(report)
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
    assert capsys.readouterr().err == ""


def test_a_null_handler_is_no_listener(alone: None, capsys: pytest.CaptureFixture[str]) -> None:
    silent = logging.NullHandler()
    LOGGER.addHandler(silent)
    try:
        sink = ConsoleSink()
        sink.open({})
        sink.find(FINDING, Action.WARN)
        sink.close(None)
    finally:
        LOGGER.removeHandler(silent)
    assert FIRST_LINE in capsys.readouterr().err


def test_logging_set_up_during_the_run_takes_over(alone: None, capsys: pytest.CaptureFixture[str]) -> None:
    heard = io.StringIO()
    own = logging.StreamHandler(heard)
    sink = ConsoleSink()
    sink.open({})
    LOGGER.addHandler(own)
    try:
        sink.find(FINDING, Action.WARN)
    finally:
        LOGGER.removeHandler(own)
        sink.close(None)
    assert "GG902" in heard.getvalue()
    assert capsys.readouterr().err == ""


def test_two_guardians_share_the_handler(alone: None, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = ConsoleSink(), ConsoleSink()
    first.open({})
    second.open({})
    first.close(None)
    second.find(FINDING, Action.WARN)
    second.close(None)
    assert capsys.readouterr().err.count("GG902 The model") == 1


def test_a_halt_is_left_to_the_exception(alone: None, capsys: pytest.CaptureFixture[str]) -> None:
    sink = ConsoleSink()
    sink.open({})
    sink.find(FINDING, Action.HALT)
    sink.find(FINDING, Action.RECORD)
    sink.close(None)
    assert capsys.readouterr().err == ""


def test_a_halt_reaches_a_log_of_the_users_own(caplog: pytest.LogCaptureFixture) -> None:
    sink = ConsoleSink()
    sink.open({})
    sink.find(FINDING, Action.RECORD)
    assert not caplog.records
    sink.find(FINDING, Action.HALT)
    assert "GG902" in caplog.text
    sink.close(None)


def test_a_broken_stderr_harms_nothing(
    alone: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], report: Report
) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    sink = ConsoleSink()
    sink.open({})
    monkeypatch.setattr(sys, "stderr", Broken())
    sink.find(FINDING, Action.WARN)
    sink.close(report)
    monkeypatch.undo()
    assert not LOGGER.handlers
    assert sink.trouble is not None


def test_no_stderr_at_all(alone: None, monkeypatch: pytest.MonkeyPatch, report: Report) -> None:
    sink = ConsoleSink()
    sink.open({})
    monkeypatch.setattr(sys, "stderr", None)
    sink.find(FINDING, Action.WARN)
    sink.close(report)
    assert sink.trouble is None


def test_a_tqdm_bar_is_not_torn(terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch, report: Report) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    sink = ConsoleSink()
    sink.open({})
    with tqdm(total=4, file=terminal, mininterval=0, ascii=True) as bar:
        for step in range(4):
            bar.update()
            if step == 1:
                sink.find(FINDING, Action.WARN)
        sink.close(report)
    shown = screen(terminal.getvalue())
    assert shown[0] == FIRST_LINE
    assert all("|" not in line for line in shown[:3])
    bars = [line for line in shown if "it/s]" in line]
    assert len(bars) == 1
    assert bars[0].startswith("100%")


def test_a_rich_bar_is_not_torn(terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch, report: Report) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    sink = ConsoleSink()
    sink.open({})
    with Progress(console=Console(file=terminal, force_terminal=True, width=120), auto_refresh=False) as progress:
        task = progress.add_task("train", total=4)
        progress.refresh()
        sink.find(FINDING, Action.WARN)
        progress.update(task, advance=4)
        sink.close(report)
    written = terminal.getvalue()
    before, after = written.split(FIRST_LINE)
    # The bar's line is erased before the warning begins, and drawn again below it.
    assert before.endswith("\x1b[2K")
    assert "train" in after
    assert "300 steps (2 skipped)" in after


def test_tqdm_is_not_loaded_for_its_own_sake() -> None:
    code = (
        "import sys\n"
        "from gpt_guard.records import Action, Finding, Report\n"
        "from gpt_guard.sinks.console import ConsoleSink\n"
        "sink = ConsoleSink(); sink.open({})\n"
        "sink.find(Finding(code='X1', title='t', severity='error', seen='s'), Action.WARN)\n"
        "sink.close(Report()); print('tqdm' in sys.modules, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
    assert "gpt_guard error: X1 t\n  s\n" in done.stderr


def test_severity_chooses_the_level(caplog: pytest.LogCaptureFixture) -> None:
    sink = ConsoleSink()
    sink.open({})
    for severity in Severity:
        sink.find(Finding(code="X1", title="t", severity=severity, seen="s"), Action.WARN)
    sink.close(None)
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.WARNING, logging.ERROR]


@pytest.mark.parametrize(
    "words",
    [
        "gpt_guard 300 steps (2 skipped)\n",
        "loss 4.25 first, 2.5 last; val_loss 2.75 last\n",
        "lr 0 to 3.0e-04\n",
        "grad norm 0.75 median, 12.5 max; 12.5 % of steps clipped\n",
        "watching cost 6 % of the time; inspecting 3 steps took 0.42 s, with 5 probes of the model\n",
        "findings 3 (1 error)\n",
        "GG102 x7 The loss is non-finite, every watched module's output is finite (error)\n",
        "GG902 x1 The model was never called inside the Guardian\n",
        "MY1 x2\n",
        "not watched experts[0].cache: sparse tensor\n",
        "[red]odd[/red]\n",
        "log runs/first/steps.jsonl\n",
    ],
)
def test_the_summary_says(words: str, alone: None, capsys: pytest.CaptureFixture[str], report: Report) -> None:
    sink = ConsoleSink()
    sink.open({})
    sink.close(report)
    out, err = capsys.readouterr()
    assert out == ""
    assert words in single_spaced(err)
    assert "\x1b" not in err


def test_the_summary_of_a_clean_run_is_a_few_lines_and_names_no_guard(report: Report) -> None:
    clean = report.model_copy(update={"findings": (), "counts": {}, "not_watched": (), "probes": {}})
    text = summary_text(clean)
    assert single_spaced(text) == (
        "gpt_guard 300 steps (2 skipped)\n"
        "loss 4.25 first, 2.5 last; val_loss 2.75 last\n"
        "lr 0 to 3.0e-04\n"
        "grad norm 0.75 median, 12.5 max; 12.5 % of steps clipped\n"
        "watching cost 6 % of the time; inspecting 3 steps took 0.42 s\n"
        "findings none\n"
        "log runs/first/steps.jsonl\n"
    )


def test_the_summary_leaves_out_what_is_not_known() -> None:
    assert single_spaced(summary_text(Report(steps=1, guards=("FiniteGuard",)))) == "gpt_guard 1 step\nfindings none\n"


@pytest.mark.parametrize(
    ("share", "words"),
    [(0.0, "under 1 %"), (0.004, "under 1 %"), (0.012, "1 %"), (0.876, "88 %"), (1.0, "100 %")],
)
def test_the_cost_of_watching_is_said_in_whole_percent(share: float, words: str) -> None:
    assert f"watching cost {words} of the time\n" in single_spaced(summary_text(Report(watch_cost=share)))


def test_of_the_users_own_numbers_the_validation_losses_are_shown() -> None:
    facts: dict[str, Any] = {
        "metrics.val_loss": 1.5,
        "metrics.value_loss": 2.5,
        "metrics.val_accuracy": 0.5,
        "other": 3.5,
    }
    assert "\nloss val_loss 1.5 last\n" in single_spaced(summary_text(Report(facts=facts)))


def test_what_was_only_recorded_is_marked_as_a_note() -> None:
    """Nothing was said of it before: it must not look like a warning that was overlooked."""
    found = (finding("GG238", "seen", severity=Severity.INFO), finding("GG902", "seen"))
    text = summary_text(Report(steps=9, findings=found, counts={"GG238": 2, "GG902": 1}))
    assert "findings 2 (no error)\n" in single_spaced(text)
    assert [line.split()[0] for line in text.splitlines() if line.endswith("(a note)")] == ["GG238"]


def test_an_error_that_did_not_halt_stands_first_with_its_step_and_line() -> None:
    """It was said in the middle of a run, and has scrolled away."""
    where = SourceLine(file="train.py", line=12, function="main", text="loss = F.cross_entropy(logits, x)")
    found = (
        finding("GG238", "seen", severity=Severity.INFO),
        finding("GG902", "seen"),
        finding("GG653", "seen", step=0, where=where),
    )
    text = summary_text(Report(steps=9, findings=found, counts={"GG653": 3, "GG902": 1}))
    first, second, *rest = text.splitlines()
    assert single_spaced(first).startswith("error GG653 x3 ")
    assert first.endswith(", step 0")
    assert single_spaced(second).strip() == "train.py:12 loss = F.cross_entropy(logits, x)"
    told = [line.split()[0] for line in rest if line.strip().startswith("GG")]
    assert told == ["GG653", "GG902", "GG238"]
    coloured = summary_text(Report(findings=found), colours=True)
    assert "\x1b[1;31mGG653" in coloured.splitlines()[0]


def test_the_summary_is_said_once_and_only_if_asked(
    alone: None, capsys: pytest.CaptureFixture[str], report: Report
) -> None:
    sink = ConsoleSink()
    sink.open({})
    sink.close(report)
    sink.close(report)
    assert capsys.readouterr().err.count("300 steps (2 skipped)") == 1
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
