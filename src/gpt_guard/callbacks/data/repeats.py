"""Do batches come back? Judged on the hashes of several steps, and on what the loader was seen to do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from gpt_guard.callbacks.data.batches import SKETCH_COLUMNS, MeasuredBatch
from gpt_guard.callbacks.data.loaders import LoaderUse
from gpt_guard.catalogue import finding
from gpt_guard.records import Finding, Severity

Group = list[MeasuredBatch]
"""The forwards of one optimizer step."""

BITS = 16.0
"""Targets with less information than this may be equal by chance: 16 labels of two classes, 8 of four."""
AUGMENTED = 0.8
"""Rows that stay nearer to themselves than this share of their distance to other rows are the same rows, altered."""


class RepeatedBatch(NamedTuple):
    """The same data in all steps looked at: whether in the very same memory, how often, and one of its batches."""

    steps: int
    held: bool
    example: MeasuredBatch

    @property
    def begun_anew(self) -> LoaderUse | None:
        """The loader that was begun anew for each step, though it has more than one batch."""
        use = self.example.loader
        return None if use is None or use.iterations < self.steps or use.batches == 1 else use

    @property
    def whole_loader(self) -> bool:
        """Whether the batch is all that its loader has: training on the full batch, step by step."""
        return self.example.loader is not None and self.example.loader.batches == 1


def repeated(groups: Sequence[Group]) -> RepeatedBatch | None:
    """Whether each step had the data of the step before, targets included, and no other."""
    if len(groups) < 2 or not all(each.telling for group in groups for each in group):
        return None
    contents = [{(each.digest, *each.targets[:1]) for each in group} for group in groups]
    # Targets that only inspected steps see through the loss are no difference.
    data = [{each.digest for each in group} for group in groups]
    same = all(one == other for one, other in pairwise(data))
    known = [one for one, group in zip(contents, groups, strict=True) if all(each.inspected for each in group)]
    if not same or any(one != other for one, other in pairwise(known)):
        return None
    held = all(each.held for group in groups[1:] for each in group)
    return RepeatedBatch(len(groups), held, groups[0][0])


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


def equal_rows(groups: Sequence[Group]) -> Finding | None:
    """GG605 where all rows of each batch are equal."""
    if not all(each.one_row for group in groups for each in group):
        return None
    example = groups[0][0]
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


def same_from_workers(groups: Sequence[Group]) -> Finding | None:
    """GG801 where each worker of a loader brings the same batch: runs of equal ones, as long as there are workers."""
    if any(len(group) != 1 or not group[0].telling or group[0].held for group in groups):
        return None
    use = groups[0][0].loader if groups else None
    if use is None or use.workers < 2 or any(group[0].loader is not use for group in groups):
        return None
    runs = [len(list(run)) for _, run in groupby(group[0].digest for group in groups)]
    if len(runs) < 2 or any(length != use.workers for length in runs[:-1]) or runs[-1] > use.workers:
        return None
    return finding(
        "GG801",
        f"{len(groups)} batches came in runs of {use.workers} equal ones, and the loader has {use.workers} workers: "
        "each of them brings the same samples.",
        likely=["own_generator", "not_sharded"],
        where=use.line,
        evidence={"workers": use.workers, "steps": len(groups)},
    )


def one_sided(groups: Sequence[Group]) -> Finding | None:
    """GG609 where the inputs change and the targets do not, or the reverse."""
    side = _same_side(groups)
    if side is None:
        return None
    example, other = groups[0][0], "targets" if side == "inputs" else "inputs"
    return finding(
        "GG609",
        f"The {side} were the same in each of {len(groups)} steps, while the {other} changed (batch "
        f"{list(example.shape)}).",
        likely=["inputs_held" if side == "inputs" else "targets_held", "shadowed"],
        where=example.line,
        evidence={"same": side, "steps": len(groups)},
        cause_id=side,
    )


def _same_side(groups: Sequence[Group]) -> str | None:
    """Which of "inputs" and "targets" stay the same from step to step while the other changes, if one does."""
    forwards = [each for group in groups for each in group]
    if len(groups) < 3 or not all(each.digest is not None and each.targets and each.inspected for each in forwards):
        return None
    if not all(len(each.targets) == len(forwards[0].targets) for each in forwards):
        return None
    data = [{each.digest for each in group} for group in groups]
    targets = [{tuple(each.targets) for each in group} for group in groups]
    if all(one == other for one, other in pairwise(data)):
        changing = all(one.isdisjoint(other) for one, other in pairwise(targets))
        telling = all(each.telling and not by_formula(each.sketch) for each in forwards)
        return "inputs" if changing and telling else None
    if all(one == other for one, other in pairwise(targets)) and all(
        one.isdisjoint(other) for one, other in pairwise(data)
    ):
        varied = bits(forwards[0].target_sample) >= BITS and not by_formula(forwards[0].target_sample)
        return "targets" if varied and not _altered(groups) else None
    return None


def bits(values: Sequence[float]) -> float:
    """Information in the values, were each of those that occur as likely: at most so many bits by chance."""
    return len(values) * math.log2(max(1, len(set(values))))


def by_formula(values: Sequence[float]) -> bool:
    """Whether values follow from a rule: constant, counted up, in blocks, or the identity matrix.

    The labels of contrastive pairs (`arange`) and of real and generated images (ones, then zeros) do, on purpose.
    """
    steps = {round(after - before, 5) for before, after in pairwise(values)}
    if len(steps) <= 2:
        return True
    if set(values) <= {0.0, 1.0}:
        ones = [place for place, value in enumerate(values) if value]
        return len({after - before for before, after in pairwise(ones)}) <= 1
    return False


def _altered(groups: Sequence[Group]) -> bool:
    """Whether the inputs are the same rows each time, altered: augmentation or noise on a full batch."""
    own, other = 0.0, 0.0
    for (before, *_), (after, *_) in pairwise(groups):
        one, two = _rows(before.sketch), _rows(after.sketch)
        if len(one) != len(two) or len(one) < 2:
            return False
        for place, row in enumerate(one):
            own += _apart(row, two[place])
            other += _apart(row, two[(place + 1) % len(two)])
    return own < AUGMENTED * other


def _rows(sketch: list[float]) -> list[list[float]]:
    width = min(SKETCH_COLUMNS, len(sketch))
    return [sketch[start : start + width] for start in range(0, len(sketch), max(1, width))]


def _apart(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=False))


def in_order(use: LoaderUse) -> Finding | None:
    """GG634 for a loader that was begun several times and never shuffles."""
    if use.trained_in < 2 or not use.in_order or (use.batches or 0) < 2:
        return None
    text = f"The loader was begun {_times(use.iterations)} and gives its samples in the same order each time."
    return finding("GG634", text, likely=["order"], severity=Severity.INFO, where=use.line, cause_id="order")


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
