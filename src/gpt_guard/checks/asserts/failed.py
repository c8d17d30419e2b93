"""CheckFailed: what every assertion raises in a person's own test suite."""

from __future__ import annotations

from collections.abc import Iterable

from gpt_guard.records import Finding
from gpt_guard.records.render import render_finding


class CheckFailed(AssertionError):
    """An assertion that did not hold: `.findings` has the evidence as records, and the message is the same in words.

    Raises ValueError where there is no finding that says why.
    """

    def __init__(self, findings: Finding | Iterable[Finding]) -> None:
        found = (findings,) if isinstance(findings, Finding) else tuple(findings)
        if not found:
            raise ValueError("a failed assertion needs at least one finding that says why")
        super().__init__(found)  # what unpickling calls this with
        self.findings = found

    @property
    def finding(self) -> Finding:
        """The first finding."""
        return self.findings[0]

    def __str__(self) -> str:
        # A test runner shows its own prefix on the first line only.
        return "\n\n".join(render_finding(finding) for finding in self.findings)
