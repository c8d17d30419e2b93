"""The words of every finding code, read once from words/*.toml: title, meaning, causes in order, next test, fix.

Guards, errors, docs and `gpt-guard explain` all take their words from here, so that they are the same everywhere.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from functools import cache
from importlib import resources
from typing import Any

from gpt_guard.records import Finding, Record, Severity


class Cause(Record):
    """One possible cause; `key` is what a guard names to put it first."""

    key: str
    text: str


class Entry(Record):
    """What the catalogue says about one code."""

    code: str
    title: str
    severity: Severity
    meaning: str
    causes: tuple[Cause, ...]
    next_test: str
    fix: str

    def ordered_causes(self, likely: Iterable[str] = ()) -> tuple[str, ...]:
        """The causes with those in `likely` first, in that order. Raises KeyError for a key that does not exist."""
        by_key = {cause.key: cause for cause in self.causes}
        first = [by_key[key] for key in dict.fromkeys(likely)]
        return tuple(cause.text for cause in (*first, *(c for c in self.causes if c not in first)))


@cache
def entries() -> dict[str, Entry]:
    """All entries by code, in order of code."""
    found: dict[str, Entry] = {}
    for source in resources.files("gpt_guard").joinpath("words").iterdir():
        if source.name.endswith(".toml"):
            family = tomllib.loads(source.read_text(encoding="utf-8"))
            found |= {code: Entry(code=code, **fields) for code, fields in family.items()}
    return dict(sorted(found.items()))


def entry(code: str) -> Entry:
    """The entry for a code such as "GG101". Raises KeyError, naming the codes of its family, for an unknown one."""
    known = entries()
    if code not in known:
        family = [other for other in known if other.startswith(code[:3])] or list(known)
        raise KeyError(f"no finding code {code!r}; there are {', '.join(family)}")
    return known[code]


def finding(code: str, seen: str, *, likely: Iterable[str] = (), **fields: Any) -> Finding:
    """Build a finding: the fixed words from the catalogue, the evidence from the caller.

    `likely` names the causes to put first for this evidence; every other field of Finding can be given, `severity`,
    `next_test` and `fix` included where this case is known better than the catalogue knows it.
    """
    known = entry(code)
    words = {
        "title": known.title,
        "severity": known.severity,
        "causes": known.ordered_causes(likely),
        "next_test": known.next_test,
        "fix": known.fix,
    }
    return Finding(code=code, seen=seen, **{**words, **fields})
