"""ConsoleSink: warnings through `logging`, a few lines at the end, and no progress bar torn by either.

Nothing is imported late and nothing but the standard library draws here: a library that is loaded inside of a loop, or
that makes ids of its own, would move the random numbers of the run.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import Any, NamedTuple

from gpt_guard.records import Action, Finding, Observation, Report, Severity
from gpt_guard.records.render import block, learning_rate, number, render_short
from gpt_guard.report.run_log import is_validation_loss
from gpt_guard.sinks.base import Sink

LOGGER = logging.getLogger("gpt_guard")

_LABEL = 13
_COLOURS = {Severity.ERROR: "1;31", Severity.WARNING: "33", Severity.INFO: "36"}
_WORDS = {Severity.ERROR: " (error)", Severity.WARNING: "", Severity.INFO: " (a note)"}


class ConsoleSink(Sink):
    """Says findings through the logger `gpt_guard`, and sums up the run on stderr when it ends.

    Where that logger has no handler anywhere in its chain, it is lent one between `open` and `close`; a handler of the
    user's own always goes first. A finding that halts is left to the exception, which a terminal shows in full; it is
    logged only where handlers of the user's own would miss it.
    """

    def __init__(self, *, summary: bool = True) -> None:
        self.summary = summary
        self._handler_lent = False
        self._opened = False

    def open(self, header: Mapping[str, Any]) -> None:
        """Lend the logger a handler if it has none."""
        self._opened = True
        if not self._handler_lent:
            self._handler_lent = _lend_handler()

    def observe(self, observation: Observation) -> None:
        """Nothing: a line for each step is the progress bar's business."""

    def find(self, finding: Finding, action: Action) -> None:
        """Log a finding that warns, or that halts where somebody else's handlers listen."""
        if action is Action.RECORD or (action is Action.HALT and not _others_listen()):
            return
        level = LOGGER.error if finding.severity is Severity.ERROR else LOGGER.warning
        level("%s", render_short(finding))

    def close(self, report: Report | None) -> None:
        """Print the summary, then take the handler back, also where printing fails."""
        try:
            if self.summary and self._opened and report is not None:
                write_stderr(summary_text(report, colours=_shows_colours()))
        finally:
            self._opened = False
            if self._handler_lent:
                self._handler_lent = False
                _take_back_handler()


class _Row(NamedTuple):
    """One line of the summary, or several; `severity` gives it a colour."""

    label: str
    text: str
    severity: Severity | None = None


def summary_text(report: Report, *, colours: bool = False) -> str:
    """What a person asks at the end of a run, a line each; what is not known, or not the case, has none."""
    lines: list[str] = []
    for row in (*_errors(report), *_figures(report), *_findings(report), *_places(report)):
        for line in block(row.label, row.text, label_width=_LABEL):
            label, text = line[:_LABEL], line[_LABEL:]
            code = _COLOURS[row.severity] if colours and row.severity is not None else ""
            lines.append(f"{label}\x1b[{code}m{text}\x1b[0m" if code else line)
    return "\n".join([*lines, ""])


def _errors(report: Report) -> Iterator[_Row]:
    """What went wrong stands first: said in the middle of a run, it has scrolled away."""
    label = "error"
    for code, (finding, count) in _by_code(report).items():
        if finding is not None and finding.severity is Severity.ERROR:
            step = "" if finding.step is None else f", step {finding.step}"
            line = "" if finding.where is None else f"\n{finding.where.file}:{finding.where.line}  {finding.where.text}"
            yield _Row(label, f"{code} x{count}  {finding.title}{step}{line}", Severity.ERROR)
            label = ""


def _by_code(report: Report) -> dict[str, tuple[Finding | None, int]]:
    """The first finding of each code, and how often guards have reported it; errors first, notes last."""
    first: dict[str, Finding] = {}
    for finding in report.findings:
        first.setdefault(finding.code, finding)
    codes = sorted(first.keys() | report.counts.keys(), key=lambda code: (_rank(first.get(code)), code))
    own = {code: sum(finding.code == code for finding in report.findings) for code in codes}
    return {code: (first.get(code), report.counts.get(code) or own[code]) for code in codes}


def _rank(finding: Finding | None) -> int:
    return len(_WORDS) if finding is None else list(_WORDS).index(finding.severity)


def _figures(report: Report) -> Iterator[_Row]:
    skipped = f" ({report.skipped_steps} skipped)" if report.skipped_steps else ""
    yield _Row("gpt_guard", f"{report.steps} step{'s' if report.steps != 1 else ''}{skipped}")
    losses = []
    if report.first_loss is not None or report.last_loss is not None:
        losses = [f"{number(report.first_loss)} first, {number(report.last_loss)} last"]
    losses += [f"{name} {number(value)} last" for name, value in _validation(report).items()]
    yield _Row("loss", "; ".join(losses))
    if report.lr_min is not None and report.lr_max is not None:
        low, high = learning_rate(report.lr_min), learning_rate(report.lr_max)
        yield _Row("lr", low if low == high else f"{low} to {high}")
    norms = []
    if report.grad_norm_median is not None or report.grad_norm_max is not None:
        norms = [f"{number(report.grad_norm_median)} median, {number(report.grad_norm_max)} max"]
    if report.clipped_share is not None:
        norms += [f"{100 * report.clipped_share:.3g} % of steps clipped"]
    yield _Row("grad norm", "; ".join(norms))
    costs = []
    if report.watch_cost is not None:
        percent = f"{100 * report.watch_cost:.0f}" if report.watch_cost >= 0.01 else "under 1"
        costs = [f"cost {percent} % of the time"]
    if report.inspected_steps:
        count = f"{report.inspected_steps} step{'s' if report.inspected_steps != 1 else ''}"
        probes = f", with {sum(report.probes.values())} probes of the model" if report.probes else ""
        costs += [f"inspecting {count} took {report.inspection_seconds:.2g} s{probes}"]
    yield _Row("watching", "; ".join(costs))


def _validation(report: Report) -> dict[str, float]:
    """The validation losses that the loop has logged, the newest of each."""
    logged = {name.removeprefix("metrics."): value for name, value in report.facts.items() if name[:8] == "metrics."}
    return {
        name: float(value)
        for name, value in logged.items()
        if is_validation_loss(name) and isinstance(value, (int, float))
    }


def _findings(report: Report) -> Iterator[_Row]:
    """How many kinds there are, then one line for each, with how often guards have reported it."""
    known = _by_code(report)
    errors = sum(finding is not None and finding.severity is Severity.ERROR for finding, _ in known.values())
    each = "no error" if not errors else f"{errors} error{'s' if errors > 1 else ''}"
    yield _Row("findings", f"{len(known)} ({each})" if known else "none")
    for code, (finding, count) in known.items():
        if finding is None:
            yield _Row("", f"{code} x{count}")
        else:
            yield _Row("", f"{code} x{count}  {finding.title}{_WORDS[finding.severity]}", finding.severity)


def _places(report: Report) -> Iterator[_Row]:
    yield _Row("not watched", "\n".join(report.not_watched))
    yield _Row("log", report.log or "")


def _shows_colours() -> bool:
    """Whether stderr is a terminal that takes colours; the console that Windows had before its Terminal does not."""
    stream = sys.stderr
    plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    modern = os.name != "nt" or "WT_SESSION" in os.environ
    return stream is not None and stream.isatty() and modern and not plain


def write_stderr(text: str) -> None:
    """Write to what `sys.stderr` is at this moment, with tqdm's bars taken away meanwhile.

    rich's live displays put a proxy into `sys.stderr` that prints above the bar, so that the stream must be looked up
    at each call. Does nothing where there is no stderr (pythonw). Raises OSError as the stream does.
    """
    stream = sys.stderr
    if stream is None:
        return
    with _without_bars():
        stream.write(text)
        stream.flush()


def _without_bars() -> AbstractContextManager[Any]:
    # Only what the user's program has loaded can have bars on the screen: importing tqdm here would cost for nothing.
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    mode = getattr(bars, "external_write_mode", None)
    return mode(file=sys.stderr) if mode is not None else nullcontext()


class _StderrHandler(logging.Handler):
    """Writes records to the current stderr; silent as soon as the user has set up handlers of their own."""

    def emit(self, record: logging.LogRecord) -> None:
        if _others_listen():
            return
        try:
            write_stderr(f"gpt_guard {record.levelname.lower()}: {self.format(record)}\n")
        except Exception:
            self.handleError(record)


_HANDLER = _StderrHandler()
_LOCK = Lock()
_borrowers = 0


def _lend_handler() -> bool:
    """Give the logger our handler, unless others listen already; True means that it must be taken back.

    Several Guardians at once share the one handler, so that nothing is said twice.
    """
    global _borrowers
    with _LOCK:
        if _others_listen():
            return False
        _borrowers += 1
        LOGGER.addHandler(_HANDLER)
        return True


def _take_back_handler() -> None:
    """Undo one `_lend_handler`; the last one removes the handler."""
    global _borrowers
    with _LOCK:
        _borrowers -= 1
        if _borrowers == 0:
            LOGGER.removeHandler(_HANDLER)


def _others_listen() -> bool:
    """Whether a handler of the user's own receives what this logger says; a NullHandler does not count."""
    logger: logging.Logger | None = LOGGER
    while logger is not None:
        if any(each is not _HANDLER and not isinstance(each, logging.NullHandler) for each in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False
