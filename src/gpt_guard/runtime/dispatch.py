"""Every finding comes here, gets its context, and is halted on, said or kept, as the policy decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from gpt_guard.errors import error_for
from gpt_guard.records import Action, Finding, Observation, Report
from gpt_guard.runtime.policy import Policy
from gpt_guard.runtime.progress import Progress
from gpt_guard.runtime.suppression import explained
from gpt_guard.sinks.base import Sink

_MOST_CAUSES = 1000


class Dispatch:
    """Collects findings and passes observations on to the sinks; the only place that raises a GuardError.

    A cause is said once: repeats are counted in `counts` and `repeats`, not listed again. Survives leaving and
    re-entering a Guardian. `enrich` is given each finding that is told before anybody else, and returns what to tell.
    """

    def __init__(
        self,
        policy: Policy,
        sinks: Sequence[Sink],
        progress: Progress,
        enrich: Callable[[Finding], Finding] | None = None,
        note: Callable[[Finding, Action], Finding] | None = None,
    ) -> None:
        self.policy = policy
        self.sinks = tuple(sinks)
        self._findings: list[Finding] = []
        self.counts: Counter[str] = Counter()
        self.repeats: Counter[Any] = Counter()
        self.quiet = False
        self._progress = progress
        self._enrich = enrich
        self._note = note

    @property
    def findings(self) -> list[Finding]:
        """All findings so far, each cause once; the troubles of sinks among them."""
        self._take_troubles()
        return self._findings

    def submit(self, finding: Finding) -> None:
        """Take a finding; raises the GuardError that stands for it if the policy says halt.

        While another exception is already on its way out (`quiet`), a halt is only recorded: the user's own error must
        not be masked.
        """
        action = self.policy(finding)
        if action is not Action.HALT:
            # What would halt is left as it is: its cause may be of those that do not.
            finding = explained(finding, self._findings)
            action = self.policy(finding)
        if self.quiet and action is Action.HALT:
            action = Action.WARN
        self.counts[finding.code] += 1
        self.repeats[finding.cause] += 1
        known = self.repeats[finding.cause] > 1
        if known and action is not Action.HALT:
            return
        finding, stopped = self._in_full(self._with_context(finding), action)
        if len(self._findings) < _MOST_CAUSES:
            self._findings.append(finding)
        for sink in self.sinks:
            sink.find(finding, action)
        error = error_for(finding) if action is Action.HALT else None
        try:
            if stopped is not None:
                raise stopped from error
            if error is not None:
                raise error
        finally:
            # Each holds this frame, and with it what has led here: a batch, a gradient.
            del error, stopped

    def _in_full(self, finding: Finding, action: Action) -> tuple[Finding, KeyboardInterrupt | None]:
        """The finding with its replay and its bundle; a Ctrl-C meanwhile goes on once it is told."""
        try:
            if self._enrich is not None and not self.quiet:
                finding = self._enrich(finding)
            if self._note is not None and not self.quiet:
                finding = self._note(finding, action)
        except KeyboardInterrupt as stopped:
            return finding, stopped
        return finding, None

    def _with_context(self, finding: Finding) -> Finding:
        recent = tuple(self._progress.recent)
        step = self._progress.step if finding.step is None else finding.step
        before = tuple(seen for seen in recent if seen.step < step)
        healthy = next((seen for seen in reversed(before) if not seen.skipped), None)
        return finding.model_copy(update={"step": step, "history": before, "last_healthy": healthy})

    def open(self, header: dict[str, Any]) -> None:
        """Open all sinks."""
        for sink in self.sinks:
            sink.open(header)
        self._take_troubles()

    def _take_troubles(self) -> None:
        """A sink says its own trouble; here it only becomes part of the findings."""
        for sink in self.sinks:
            if sink.trouble is not None and not self.repeats[sink.trouble.cause]:
                self.repeats[sink.trouble.cause] += 1
                self.counts[sink.trouble.code] += 1
                self._findings.append(sink.trouble)

    def blind_spots(self) -> list[str]:
        """Outputs that have gone silent."""
        self._take_troubles()
        return [f"{sink.name}: silent since it failed" for sink in self.sinks if sink.trouble is not None]

    def observe(self, seen: Observation) -> None:
        """Pass a finished observation on."""
        for sink in self.sinks:
            sink.observe(seen)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Pass the user's own numbers on."""
        for sink in self.sinks:
            sink.log(step, metrics)

    def close(self, report: Report) -> None:
        """Close all sinks, each one even if another fails."""
        # The console opened first, so that it can say what is wrong with the others, and closes last.
        for sink in reversed(self.sinks):
            sink.close(report)
