"""How a save or load speaks: findings are handed on, logged or raised; arguments that cannot be are named."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from gpt_guard.catalogue import entry, finding
from gpt_guard.errors import GuardUsageError, error_for
from gpt_guard.records import Finding, Severity
from gpt_guard.records.render import render_short

logger = logging.getLogger("gpt_guard")

OnFinding = Callable[[Finding], Any]
"""Takes each finding as it is made; may raise to halt."""


class Reporter:
    """Collects the findings of one save or load.

    Without `on_finding` an error is raised and anything less is logged. With it the caller decides, except where
    nothing can go on: `refuse` raises in any case.
    """

    def __init__(self, on_finding: OnFinding | None) -> None:
        self._on_finding = on_finding
        self.findings: list[Finding] = []

    def say(self, code: str, seen: str, **fields: Any) -> None:
        """Make a finding that loading can go on after, if the caller's policy says so."""
        self.tell(_finding(code, seen, **fields))

    def refuse(self, code: str, seen: str, *, because: BaseException | None = None, **fields: Any) -> NoReturn:
        """Make a finding and raise it."""
        made = _finding(code, seen, **fields)
        self.findings.append(made)
        if self._on_finding is not None:
            self._on_finding(made)
        raise error_for(made) from because

    def tell(self, made: Finding) -> None:
        """Hand on a finding that is made already, as `say` does."""
        self.findings.append(made)
        if self._on_finding is not None:
            self._on_finding(made)
        elif made.severity is Severity.ERROR:
            raise error_for(made)
        else:
            level = logging.WARNING if made.severity is Severity.WARNING else logging.INFO
            logger.log(level, "%s", render_short(made))


def _finding(code: str, seen: str, *, known: Iterable[str] = (), **fields: Any) -> Finding:
    """Build a finding; causes in `known` are certain, and the others are left out."""
    if certain := list(known):
        fields["causes"] = entry(code).ordered_causes(certain)[: len(set(certain))]
    return finding(code, seen, **fields)


def checked_path(call: str, path: Any, model: Any) -> Path:
    """The path of a file, if the arguments are what they should be. Raises GuardUsageError."""
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        swapped = ": path and model are swapped" if isinstance(path, nn.Module) else ""
        given = "empty" if path == "" else f"a {type(path).__name__}{swapped}"
        raise GuardUsageError(f'path is {given}. Write {call}("checkpoint.pt", model, optimizer)')
    if not isinstance(model, nn.Module):
        raise GuardUsageError(
            f"model is a {type(model).__name__}, no torch.nn.Module. Write {call}(path, model, optimizer)"
        )
    return Path(path)
