"""Do batches come back? Judged on the hashes of several steps, and on what the loader was seen to do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from gpt_guard.callbacks.data.data_seen import SKETCH_COLUMNS, Forward
from gpt_guard.callbacks.data.loaders import LoaderUse

Group = list[Forward]
"""The forwards of one optimizer step."""

BITS = 16.0
"""Targets with less information than this may be equal by chance: 16 labels of two classes, 8 of four."""
AUGMENTED = 0.8
"""Rows that stay nearer to themselves than this share of their distance to other rows are the same rows, altered."""


class Repeated(NamedTuple):
    """The same data in all steps looked at: whether in the very same memory, how often, and the loader it is from."""

    steps: int
    held: bool
    example: Forward


def repeated(groups: Sequence[Group]) -> Repeated | None:
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
    return Repeated(len(groups), held, groups[0][0])


def from_fresh_iterators(found: Repeated) -> LoaderUse | None:
    """The loader that was begun anew for each step, though it has more than one batch."""
    use = found.example.loader
    if use is None or use.iterations < found.steps or use.batches == 1:
        return None
    return use


def whole_loader(found: Repeated) -> bool:
    """Whether the batch is all that its loader has: training on the full batch, step by step."""
    return found.example.loader is not None and found.example.loader.batches == 1


def from_workers(groups: Sequence[Group]) -> LoaderUse | None:
    """The loader whose workers each brought the same batch: runs of equal batches, as long as there are workers."""
    if any(len(group) != 1 or not group[0].telling or group[0].held for group in groups):
        return None
    use = groups[0][0].loader if groups else None
    if use is None or use.workers < 2 or any(group[0].loader is not use for group in groups):
        return None
    runs = [len(list(run)) for _, run in groupby(group[0].digest for group in groups)]
    fits = len(runs) > 1 and all(length == use.workers for length in runs[:-1]) and runs[-1] <= use.workers
    return use if fits else None


def one_sided(groups: Sequence[Group]) -> str | None:
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
