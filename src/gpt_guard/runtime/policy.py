"""What to do about a finding: halt, warn, or only record."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping

from gpt_guard.catalogue import entries
from gpt_guard.errors import GuardUsageError
from gpt_guard.records import Action, Finding, Severity

Rules = Mapping[str, str] | Callable[[Finding], str | None]

_FAMILY = re.compile(r"GG[1-9](xx)?")
# A guard of the user's own has codes of its own: MY101.
_OWN_CODE = re.compile(r"(?!GG)[A-Z][A-Z_]*\d+")


class Policy:
    """Decide by code, then family (`GG2` or `GG2xx`), then severity, then the default.

    The default halts on non-finite values (GG1xx errors) and fingerprint mismatches (GG701-GG703), records what is only
    worth knowing, and warns of everything else. `strict` halts on every error that no rule decides otherwise. A
    callable gets the finding and returns an action, or None to leave it to the default.

    Codes of a guard of your own (`MY101`) are keys like any other. Raises GuardUsageError for a key that is neither a
    code, a family nor a severity, and for an unknown action.
    """

    def __init__(self, rules: Rules | None = None, *, strict: bool = False) -> None:
        self._decide = rules if callable(rules) else None
        self._table = {} if rules is None or callable(rules) else _checked(rules)
        self._strict = strict

    def __call__(self, finding: Finding) -> Action:
        """The action for this finding."""
        if self._decide is not None and (given := self._decide(finding)) is not None:
            return _action(given)
        code = finding.code
        for key in (code, code[:3], finding.severity.value):
            if key in self._table:
                return self._table[key]
        if finding.severity is Severity.ERROR and (self._strict or _halts_by_default(code)):
            return Action.HALT
        return Action.RECORD if finding.severity is Severity.INFO else Action.WARN


def _halts_by_default(code: str) -> bool:
    return code.startswith("GG1") or code in ("GG701", "GG702", "GG703")


def _checked(rules: Mapping[str, str]) -> dict[str, Action]:
    if not isinstance(rules, Mapping):
        raise GuardUsageError(
            f"policy is {rules!r}; give a mapping such as {{'error': 'halt', 'GG206': 'record'}}, or a callable that "
            f"takes a finding and returns an action or None"
        )
    table: dict[str, Action] = {}
    for key, action in rules.items():
        if key not in tuple(Severity) and not _FAMILY.fullmatch(key) and not _OWN_CODE.fullmatch(key):
            _check_code(key)
        table[key.removesuffix("xx")] = _action(action)
    return table


def _check_code(key: str) -> None:
    if key not in entries():
        near = difflib.get_close_matches(key, entries(), n=3) if key.startswith("GG") else []
        raise GuardUsageError(
            f"policy has the key {key!r}, which is neither a finding code ({', '.join(near) or 'GG101'}), a family "
            f"(GG1xx, or GG1 for short) nor a severity ({', '.join(Severity)})"
        )


def _action(given: str) -> Action:
    try:
        return Action(given)
    except ValueError:
        raise GuardUsageError(f"policy says {given!r}; it can say {', '.join(Action)}") from None
