"""What a rule finds wrong with one call of a torch function, and the finding that comes of it."""

from __future__ import annotations

from typing import Any, NamedTuple

from gpt_guard.catalogue import finding
from gpt_guard.hooks.functions.call_record import CallPlace
from gpt_guard.records import Finding, Severity


class CallIssue(NamedTuple):
    """One thing that is wrong with a call; `severity` None leaves it to the catalogue.

    `made_at` is where the trouble is made, if that is somewhere else than the call; what it does not know of the place
    is taken from the call. `unless` is a key: another call of the same forward may show that it is meant.
    """

    code: str
    text: str
    likely: tuple[str, ...] = ()
    severity: Severity | None = None
    evidence: dict[str, Any] | None = None
    made_at: CallPlace | None = None
    unless: str | None = None

    def finding(self, place: CallPlace | None, **fields: Any) -> Finding:
        """The finding of a call at this place; None where it is of no single call."""
        where: dict[str, Any] = {}
        for each in (place, self.made_at):
            if each is not None:
                where |= {name: value for name, value in each.fields.items() if value is not None}
                where |= {"cause_id": each.key} if each.line is not None else {}
        if self.severity is not None:
            where["severity"] = self.severity
        return finding(self.code, self.text, likely=self.likely, evidence=self.evidence or {}, **where, **fields)
