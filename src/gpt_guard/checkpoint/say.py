"""How a save or load speaks: findings are handed on, logged or raised."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NoReturn

from gpt_guard import catalogue
from gpt_guard.errors import error_for
from gpt_guard.records import Finding, Severity
from gpt_guard.render import render_finding

logger = logging.getLogger("gpt_guard")

OnFinding = Callable[[Finding], Any]
"""Takes each finding as it is made; may raise to halt."""


class Voice:
    """Collects the findings of one save or load.

    Without `on_finding` an error is raised and anything less is logged. With it the caller decides, except where
    nothing can go on: `refuse` raises in any case.
    """

    def __init__(self, on_finding: OnFinding | None) -> None:
        self._on_finding = on_finding
        self.findings: list[Finding] = []

    def say(self, code: str, seen: str, **fields: Any) -> None:
        """Make a finding that loading can go on after, if the caller's policy says so."""
        self.tell(catalogue.finding(code, seen, **fields))

    def refuse(self, code: str, seen: str, *, because: BaseException | None = None, **fields: Any) -> NoReturn:
        """Make a finding and raise it."""
        finding = catalogue.finding(code, seen, **fields)
        self.findings.append(finding)
        if self._on_finding is not None:
            self._on_finding(finding)
        raise error_for(finding) from because

    def tell(self, finding: Finding) -> None:
        """Hand on a finding that is made already, as `say` does."""
        self.findings.append(finding)
        if self._on_finding is not None:
            self._on_finding(finding)
        elif finding.severity is Severity.ERROR:
            raise error_for(finding)
        else:
            level = logging.WARNING if finding.severity is Severity.WARNING else logging.INFO
            logger.log(level, "%s", render_finding(finding))
