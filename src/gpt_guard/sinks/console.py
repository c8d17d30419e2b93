"""ConsoleSink: warnings through `logging`, a summary table at the end, and no progress bar torn by either."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpt_guard.records import Action, Finding, Observation, Report, Severity
from gpt_guard.records.render import render_short
from gpt_guard.sinks.base import Sink
from gpt_guard.sinks.stderr import LOGGER, lend_handler, speaks_itself, take_back_handler, write_stderr
from gpt_guard.sinks.summary import summary_text


class ConsoleSink(Sink):
    """Says findings through the logger `gpt_guard`, and sums up the run on stderr when it ends.

    Where that logger has no handler anywhere in its chain, it is lent one between `open` and `close`; a handler of the
    user's own always goes first. A finding that halts is left to the exception, which a terminal shows in full; it is
    logged only where handlers of the user's own would miss it.
    """

    late = True

    def __init__(self, *, summary: bool = True) -> None:
        self.summary = summary
        self._handler_lent = False
        self._opened = False

    def open(self, header: Mapping[str, Any]) -> None:
        """Lend the logger a handler if it has none."""
        self._opened = True
        if not self._handler_lent:
            self._handler_lent = lend_handler()

    def observe(self, observation: Observation) -> None:
        """Nothing: a line for each step is the progress bar's business."""

    def find(self, finding: Finding, action: Action) -> None:
        """Log a finding that warns, or that halts where somebody else's handlers listen."""
        if action is Action.RECORD or (action is Action.HALT and not speaks_itself()):
            return
        level = LOGGER.error if finding.severity is Severity.ERROR else LOGGER.warning
        level("%s", render_short(finding))

    def close(self, report: Report | None) -> None:
        """Print the summary table, then take the handler back, also where printing fails."""
        try:
            if self.summary and self._opened and report is not None:
                write_stderr(summary_text(report))
        finally:
            self._opened = False
            if self._handler_lent:
                self._handler_lent = False
                take_back_handler()
