"""What a look at a set-up finds odd, before it is a finding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from gpt_guard.records import Severity


class Oddity(NamedTuple):
    """One thing that a careful reader would query.

    `key` is its cause in the catalogue, `place` a module's path or a parameter group, which with the key is the cause.
    """

    code: str
    key: str
    text: str
    severity: Severity
    place: str
    module: str | None = None
    module_class: str | None = None
    evidence: dict[str, Any] | None = None


class OddModule(NamedTuple):
    """A module with a setting that is odd; several with the same one are told together."""

    key: str
    what: str
    severity: Severity
    path: str
    kind: str


def together(found: Iterable[OddModule]) -> Iterator[Oddity]:
    """One oddity for each setting, with the modules that have it."""
    alike: dict[tuple[str, str, Severity], list[OddModule]] = {}
    for each in found:
        alike.setdefault((each.key, each.what, each.severity), []).append(each)
    for (key, what, severity), modules in alike.items():
        first = modules[0]
        place = f"`{first.path}`" if first.path else "The model itself"
        more = f", and {len(modules) - 1} more like it" if len(modules) > 1 else ""
        yield Oddity(
            "GG331",
            key,
            f"{place} ({first.kind}){more}: {what}.",
            severity,
            first.path,
            first.path,
            first.kind,
            {"modules": [each.path for each in modules[:50]], "count": len(modules)},
        )
