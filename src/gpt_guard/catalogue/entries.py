"""The words of every finding code, read once from words/*.toml: title, meaning, causes in order, next test, fix.

Guards, errors, docs and `gpt-guard explain` all take their words from here, so that they are the same everywhere.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from functools import cache
from importlib import resources
from typing import Any

from pydantic import Field

from gpt_guard.records import Finding, Record, Severity


class Cause(Record):
    """One possible cause; `key` is what a guard names to put it first."""

    key: str
    text: str


class Remedy(Record):
    """The test that settles one cause, and the fix where it is that cause."""

    next_test: str
    fix: str


class Entry(Record):
    """What the catalogue says about one code; `ways` are those of single causes, by key, where they have their own."""

    code: str
    title: str
    severity: Severity
    meaning: str
    causes: tuple[Cause, ...]
    next_test: str
    fix: str
    ways: dict[str, Remedy] = Field(default_factory=dict)

    def ordered_causes(self, likely: Iterable[str] = (), unlikely: Iterable[str] = ()) -> tuple[str, ...]:
        """The causes with those in `likely` first, in that order, and those in `unlikely` last.

        Raises KeyError for a key that does not exist.
        """
        by_key = {cause.key: cause for cause in self.causes}
        first = [by_key[key] for key in dict.fromkeys(likely)]
        last = [cause for key in dict.fromkeys(unlikely) if (cause := by_key[key]) not in first]
        middle = [cause for cause in self.causes if cause not in first and cause not in last]
        return tuple(cause.text for cause in (*first, *middle, *last))


@cache
def entries() -> dict[str, Entry]:
    """All entries by code, in order of code."""
    found: dict[str, Entry] = {}
    for source in resources.files("gpt_guard.catalogue").joinpath("words").iterdir():
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


def finding(
    code: str,
    seen: str,
    *,
    likely: Iterable[str] = (),
    unlikely: Iterable[str] = (),
    shown: Iterable[str] = (),
    **fields: Any,
) -> Finding:
    """Build a finding: the fixed words from the catalogue, the evidence from the caller.

    `likely` names the causes to put first for this evidence, `unlikely` those that it speaks against. `shown` are those
    that it points to: they stand before all others, and the first one's own test and fix are taken where it has them.
    Every other field of Finding can be given, `severity`, `next_test` and `fix` included where this case is known
    better than the catalogue knows it.
    """
    known, first = entry(code), list(shown)
    way: Remedy | Entry = known.ways.get(first[0], known) if first else known
    words = {
        "title": known.title,
        "severity": known.severity,
        "causes": known.ordered_causes([*first, *likely], unlikely),
        "next_test": way.next_test,
        "fix": way.fix,
    }
    return Finding(code=code, seen=seen, **{**words, **fields})
