"""Does the batch keep its form, and do inputs look as inputs do? Shapes are watched in every step, values in few."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from gpt_guard.callbacks.data.batches import MeasuredBatch
from gpt_guard.catalogue import finding
from gpt_guard.records import Finding, Severity

Shape = tuple[int, ...]

SETTLED = 3
"""Steps of one form, after which another one is a change."""
IN_A_ROW = 3
"""A single small batch is the rest at the end of an epoch; so many in a row are none."""
PADDING = 0.5
"""Where more of a batch is padding, more is computed for nothing than for something."""
LARGEST = 100.0
"""Inputs beyond this were hardly scaled: standardised values stay below 10, images in [0, 1] below 1."""


class BatchShape:
    """The shapes of the main input in training; a change counts once a backward has followed it."""

    def __init__(self) -> None:
        self._usual: Shape | None = None
        self._mixed = False
        self._settled = 0
        self._single = 0
        self._now: Shape | None = None
        self._rows = 0
        self._reported: set[str] = set()

    def forward(self, shape: Shape) -> None:
        """The model is called for training."""
        self._now = shape
        self._rows += shape[0] if shape else 1

    def stepped(self) -> None:
        """A step has ended."""
        if self._now is None:
            return
        shape, rows, self._now, self._rows = self._now, self._rows, None, 0
        if self._usual is None:
            self._usual = shape
        if len(shape) == len(self._usual):
            if rows > 1:
                self._usual = shape
            self._settled += rows > 1
            self._single = self._single + 1 if rows == 1 else 0
        elif self._settled < SETTLED:
            # Called with and without a batch dimension from the start: both are meant.
            self._mixed = True

    def backward(self) -> Finding | None:
        """GG600 where the batch dimension is gone, or has one row only; each kind once."""
        usual, now = self._usual, self._now
        if usual is None or now is None or self._mixed or self._settled < SETTLED:
            return None
        # The other sizes may be those of a sequence, which vary.
        if len(now) == len(usual) - 1 and len(usual) > 1 and _fits(now, usual[1:]):
            kind = "squeezed"
            text = f"The model was called with {[*now]}, where it had {[*usual]} before: the batch dimension is gone."
        elif len(now) == len(usual) and self._single >= IN_A_ROW - 1 and self._rows == 1 and usual[0] > 1:
            kind = "collapsed"
            text = f"The model is called with {[*now]} in one step after the other, where it had {[*usual]} before."
        else:
            return None
        if kind in self._reported:
            return None
        self._reported.add(kind)
        return finding(
            "GG600",
            text,
            likely=[kind],
            severity=Severity.WARNING,
            evidence={"before": [*usual], "now": [*now]},
            cause_id=kind,
            next_test="Print x.shape just before model(x), and after each operation between the loader and this call.",
            fix="Name the dimension to drop, x.squeeze(1), never x.squeeze() alone; keep training and validation "
            "loaders apart.",
        )


def _fits(now: Shape, row: Shape) -> bool:
    """Whether this is one row: of the same sizes, or of another length where it is a sequence alone."""
    return now == row or len(row) == 1


def unusual(groups: Sequence[Sequence[MeasuredBatch]]) -> Iterator[Finding]:
    """GG634: what the inputs look like in the inspected steps."""
    forwards = [each for group in groups for each in group if each.inspected]
    if not forwards:
        return
    first = forwards[0]
    name = f"`{first.names[0]}`" if first.names else "the input"
    if all(each.constant and each.rows > 1 and each.numel >= 16 for each in forwards) and _varied(forwards):
        values = sorted({each.look[0] for each in forwards if each.look})
        shown = ", ".join(f"{value:g}" for value in values[:3])
        yield _odd(
            "constant", f"Every element of {name} {list(first.shape)} is the same ({shown}).", first, Severity.WARNING
        )
        return
    looks = [each.look for each in forwards if each.look]
    if looks and min(look[3] for look in looks) > PADDING:
        shares = sum(look[3] for look in looks) / len(looks)
        yield _odd("padding", f"{shares:.0%} of {name} {list(first.shape)} is padding at the end of rows.", first)
    if looks and first.floats and max(abs(bound) for look in looks for bound in look[:2]) > LARGEST:
        yield from _unscaled(name, first, looks)
    if columns := _constant_columns(forwards):
        listed = ", ".join(f"{place} (always {value:g})" for place, value in list(columns.items())[:5])
        seen = f"{len(columns)} of {first.shape[1]} columns of {name} are constant in all batches seen: {listed}."
        yield _odd("column", seen, first, evidence={"columns": list(columns)[:50]})


def _unscaled(name: str, first: MeasuredBatch, looks: list[list[float]]) -> Iterator[Finding]:
    low, high = min(look[0] for look in looks), max(look[1] for look in looks)
    whole = all(look[2] for look in looks)
    kind = " whole numbers, as pixels of 8 bits are," if whole and low >= 0 and high <= 255 else ""
    yield _odd("scale", f"The values of {name} are{kind} between {low:g} and {high:g}: they were not scaled.", first)


def _constant_columns(forwards: Sequence[MeasuredBatch]) -> dict[int, float]:
    """Columns that have one and the same value in all batches; 0 (one-hot) and 1 (an intercept) are usual."""
    if len(forwards) < 3 or not all(each.columns for each in forwards):
        return {}
    found: dict[int, float] = {}
    for place, values in enumerate(zip(*(each.columns for each in forwards), strict=False)):
        if len(set(values)) == 1 and not math.isnan(values[0]) and values[0] not in (0.0, 1.0):
            found[place] = values[0]
    return found if len(found) < len(forwards[0].columns) else {}


def _varied(forwards: Sequence[MeasuredBatch]) -> bool:
    return any(len(set(each.target_sample)) > 1 for each in forwards)


def _odd(
    cause: str,
    seen: str,
    first: MeasuredBatch,
    severity: Severity = Severity.INFO,
    evidence: dict[str, Any] | None = None,
) -> Finding:
    given = {"shape": list(first.shape)} | (evidence or {})
    return finding("GG634", seen, likely=[cause], severity=severity, where=first.line, evidence=given, cause_id=cause)
