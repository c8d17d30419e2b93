"""What changed between two reports, of preflight or of runs: figures, checks that flipped, findings new and gone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from gpt_guard.records import CheckResult, Finding, Observation, Record, Report
from gpt_guard.records.render import clean, number
from gpt_guard.report.run_log import RunLog

Kind = Literal["figure", "setting", "check", "finding", "curve"]

REL_TOL = 1e-6
"""Figures closer than this are the same: eight roundings of float32 (its eps is 1.2e-7), as another machine or another
number of threads gives in the same computation."""

FIGURES = (
    "parameters",
    "steps",
    "first_loss",
    "last_loss",
    "lr_min",
    "lr_max",
    "grad_norm_median",
    "grad_norm_max",
    "clipped_share",
    "skipped_steps",
)
CURVES = ("lr", "loss", "grad_norm")
"""In the order of cause and effect, where several part at the same step; of several rates the highest counts."""
_SHOWN = 60


class Change(Record):
    """One thing that differs: `before` and `after` as text, "-" where one report has none of it.

    `relative` is (after - before) / |before| for finite figures, None where there is no such number.
    """

    kind: Kind
    what: str
    before: str
    after: str
    relative: float | None = None


def compare_reports(before: Report, after: Report, rel_tol: float = REL_TOL) -> tuple[Change, ...]:
    """Everything that differs, in the order: settings, figures, checks, findings. An empty tuple: nothing does.

    Figures are the same where they differ by at most `rel_tol` of the larger one; NaN is the same as NaN.
    """
    settings = (
        {"model": before.model} | _prefixed("environment", before.environment),
        {"model": after.model} | _prefixed("environment", after.environment),
    )
    return (
        *_values("setting", *settings, rel_tol),
        *_values("setting", _lists(before), _lists(after), rel_tol),
        *_values("figure", _figures(before), _figures(after), rel_tol),
        *_checks(before.checks, after.checks),
        *_findings(before.findings, after.findings),
    )


def partings(before: RunLog, after: RunLog, rel_tol: float = REL_TOL) -> tuple[Change, ...]:
    """Where two runs part: for lr, loss and gradient norm the first step at which they differ, the earliest first.

    Compared are the steps that both have, each as it was made last. Equal up to `rel_tol`; NaN is the same as NaN.
    """
    one, other = _by_step(before), _by_step(after)
    shared = [key for key in one if key in other]
    found: list[tuple[int, Change]] = []
    for place, name in enumerate(CURVES):
        for key in shared:
            then, now = _value(one[key], name), _value(other[key], name)
            if not _same(then, now, rel_tol):
                what = f"{name} from step {key[1]} on" + (f" (optimizer {key[0]})" if key[0] else "")
                change = Change(
                    kind="curve", what=what, before=_text(then), after=_text(now), relative=_relative(then, now)
                )
                found.append((key[1] * len(CURVES) + place, change))
                break
    return tuple(change for _, change in sorted(found, key=lambda each: each[0]))


def _by_step(log: RunLog) -> dict[tuple[int, int], Observation]:
    return {(seen.optimizer, seen.step): seen for seen in log.steps if not seen.evaluation}


def _value(seen: Observation, name: str) -> Any:
    value = getattr(seen, name)
    return value if not isinstance(value, tuple) else max(value, default=None)


def change_text(change: Change) -> str:
    """One line: what, before, after, and by how much."""
    by = f" ({change.relative:+.2%})" if change.relative is not None else ""
    return clean(f"{change.what}: {change.before} -> {change.after}{by}")


def _lists(report: Report) -> dict[str, Any]:
    return {
        **_prefixed("fingerprint", report.fingerprint),
        "guards": ", ".join(report.guards),
        "not_watched": ", ".join(report.not_watched),
    }


def _figures(report: Report) -> dict[str, Any]:
    return {name: getattr(report, name) for name in FIGURES} | report.facts | _prefixed("count", report.counts)


def _prefixed(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}.{name}": value for name, value in values.items()}


def _values(kind: Kind, before: Mapping[str, Any], after: Mapping[str, Any], rel_tol: float) -> Iterator[Change]:
    for name in dict.fromkeys((*before, *after)):
        old, new = before.get(name), after.get(name)
        if not _same(old, new, rel_tol):
            yield Change(kind=kind, what=name, before=_text(old), after=_text(new), relative=_relative(old, new))


def _same(old: Any, new: Any, rel_tol: float) -> bool:
    one, other = _as_number(old), _as_number(new)
    if one is not None and other is not None:
        return one == other or (one != one and other != other) or math.isclose(one, other, rel_tol=rel_tol)
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return all(_same(a, b, rel_tol) for a, b in zip(old, new, strict=True))
    return bool(old == new)


def _as_number(value: Any) -> float | None:
    """NaN and the infinities stand in JSON as strings."""
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _relative(old: Any, new: Any) -> float | None:
    one, other = _as_number(old), _as_number(new)
    if one is None or other is None or not (math.isfinite(one) and math.isfinite(other)) or one == 0:
        return None
    return (other - one) / abs(one)


def _text(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, float):
        return number(value)
    text = str(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 4]} ..."


def _checks(before: tuple[CheckResult, ...], after: tuple[CheckResult, ...]) -> Iterator[Change]:
    """Lines whose status differs, and lines that only one report has; a stage may have several of one title."""
    old, new = _by_title(before), _by_title(after)
    for key in dict.fromkeys((*old, *new)):
        status = [each[key].status if key in each else "-" for each in (old, new)]
        if status[0] != status[1]:
            yield Change(kind="check", what=f"{key[0]}: {key[1]}", before=status[0], after=status[1])


def _by_title(results: tuple[CheckResult, ...]) -> dict[tuple[str, str, int], CheckResult]:
    found: dict[tuple[str, str, int], CheckResult] = {}
    for result in results:
        number_of_its_kind = sum(key[:2] == (result.stage, result.title) for key in found)
        found[result.stage, result.title, number_of_its_kind] = result
    return found


def _findings(before: tuple[Finding, ...], after: tuple[Finding, ...]) -> Iterator[Change]:
    old, new = ({finding.cause: finding for finding in found} for found in (before, after))
    for cause in dict.fromkeys((*old, *new)):
        if (cause in old) != (cause in new):
            found = old.get(cause) or new[cause]
            place = f" ({found.parameter or found.module})" if found.parameter or found.module else ""
            there, here = ("found", "-") if cause in old else ("-", "found")
            yield Change(kind="finding", what=f"{found.code} {found.title}{place}", before=there, after=here)
