"""The findings of DataWatch in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from gpt_guard.callbacks.data.batches import MeasuredBatch
from gpt_guard.callbacks.data.judge import Group, Overlap, RepeatedBatch, ShapeChange
from gpt_guard.callbacks.data.loaders import LoaderUse
from gpt_guard.catalogue import finding
from gpt_guard.records import Finding, Severity

PADDING = 0.5
"""Where more of a batch is padding, more is computed for nothing than for something."""
LARGEST = 100.0
"""Inputs beyond this were hardly scaled: standardised values stay below 10, images in [0, 1] below 1."""


def same_batch(found: RepeatedBatch, *, likely: list[str], severity: Severity, loader: LoaderUse | None) -> Finding:
    """GG605: one batch in all steps."""
    shown = list(found.example.shape)
    where = found.example.line
    how = "the very same memory" if found.held else "new tensors with equal values"
    seen = f"The model was called with the same batch {shown} in each of {found.steps} steps ({how})"
    evidence: dict[str, Any] = {"steps": found.steps, "shape": shown, "held": found.held}
    if loader is not None:
        of = f", which has {loader.batches} batches" if loader.batches else ""
        seen += f"; the loader{of}, was begun {_times(loader.iterations)}"
        evidence |= {"batches": loader.batches, "iterations": loader.iterations}
        if "fresh_iterator" in likely:
            where = loader.line or where
    seen += ". If that is all the data there is, or is to be learned by heart, give DataWatch(overfit=True)."
    return finding(
        "GG605", seen, likely=likely, severity=severity, where=where, evidence=evidence, cause_id="same batch"
    )


def equal_rows(example: MeasuredBatch) -> Finding:
    """GG605: all rows of each batch are equal."""
    how = ": dimension 0 was made by expand(), so that all rows are one" if example.expanded else ""
    return finding(
        "GG605",
        f"All {example.rows} rows of each batch {list(example.shape)} are equal{how}. The gradient is that of one "
        "sample.",
        likely=["one_start"],
        severity=Severity.WARNING,
        where=example.line,
        evidence={"rows": example.rows, "expanded": example.expanded},
        cause_id="equal rows",
    )


def same_from_workers(use: LoaderUse, groups: Sequence[Group]) -> Finding:
    """GG801: each worker brings the same batches."""
    return finding(
        "GG801",
        f"{len(groups)} batches came in runs of {use.workers} equal ones, and the loader has {use.workers} workers: "
        "each of them brings the same samples.",
        likely=["own_generator", "not_sharded"],
        where=use.line,
        evidence={"workers": use.workers, "steps": len(groups)},
    )


def one_sided(side: str, example: MeasuredBatch, steps: int) -> Finding:
    """GG609: inputs change and targets do not, or the reverse."""
    other = "targets" if side == "inputs" else "inputs"
    seen = (
        f"The {side} were the same in each of {steps} steps, while the {other} changed (batch {list(example.shape)})."
    )
    likely = ["inputs_held", "shadowed"] if side == "inputs" else ["targets_held", "shadowed"]
    return finding(
        "GG609", seen, likely=likely, where=example.line, evidence={"same": side, "steps": steps}, cause_id=side
    )


def changed_shape(change: ShapeChange) -> Finding:
    """GG600: the batch dimension is gone, or has one row only."""
    before, now = list(change.before), list(change.now)
    if change.kind == "squeezed":
        seen = f"The model was called with {now}, where it had {before} before: the batch dimension is gone."
    else:
        seen = f"The model is called with {now} in one step after the other, where it had {before} before."
    return finding(
        "GG600",
        seen,
        likely=[change.kind],
        severity=Severity.WARNING,
        evidence={"before": before, "now": now},
        cause_id=change.kind,
        next_test="Print x.shape just before model(x), and after each operation between the loader and this call.",
        fix="Name the dimension to drop, x.squeeze(1), never x.squeeze() alone; keep training and validation loaders "
        "apart.",
    )


def overlapping(found: Overlap) -> Finding:
    """GG638: rows of the evaluation were trained on."""
    share = found.known / found.looked_at
    seen = (
        f"{found.known} of {found.looked_at} samples of an evaluation ({share:.0%}) are among the {found.trained} that "
    )
    seen += "were trained on in the first steps, equal in every element looked at."
    if found.meant:
        seen += " It looks as if the training data itself were evaluated on purpose: a validation must hold none of it."
    return finding(
        "GG638",
        seen,
        likely=["same_file"] if found.meant else ["duplicates", "rows_split"],
        severity=Severity.INFO if found.meant else Severity.WARNING,
        where=found.line,
        evaluation=True,
        evidence={"known": found.known, "looked_at": found.looked_at, "trained": found.trained, "share": share},
        cause_id="meant" if found.meant else "mixed",
    )


def unusual(groups: Sequence[Group]) -> Iterator[Finding]:
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


def in_order(use: LoaderUse) -> Finding:
    """GG634: a loader that was begun several times and never shuffles."""
    seen = f"The loader was begun {_times(use.iterations)} and gives its samples in the same order each time."
    return finding("GG634", seen, likely=["order"], severity=Severity.INFO, where=use.line, cause_id="order")


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


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
