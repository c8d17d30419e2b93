"""Do batches come back, do they keep their form, and is the evaluation among what was trained on?

Judged on the hashes of several steps, on shapes, and on what the loader was seen to do.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from gpt_guard.callbacks.data.batches import SKETCH_COLUMNS, MeasuredBatch
from gpt_guard.callbacks.data.loaders import LoaderUse
from gpt_guard.records import SourceLine

Group = list[MeasuredBatch]
"""The forwards of one optimizer step."""

BITS = 16.0
"""Targets with less information than this may be equal by chance: 16 labels of two classes, 8 of four."""
AUGMENTED = 0.8
"""Rows that stay nearer to themselves than this share of their distance to other rows are the same rows, altered."""
MOST_KEPT = 2**16
"""Rows that are kept for comparison, and rows of an evaluation that are looked at."""
MOST_EVALUATIONS, MOST_BATCHES = 5, 1000
"""Evaluations after the first training steps that are looked at, and the batches of each: a split stays what it is."""
COMMON_OVERLAP = 0.04
"""So much of the validation sets of standard corpora occurs in their training sets (Lee et al., 2022): of ids only."""
FIRST_PASS = 0.9
"""Rows that come again before this share of all different ones has come are no second epoch: they recur by nature."""
EXPLAINED = 3.0
"""Known rows up to this many times what such recurrence makes one expect say nothing."""
COVERED = 0.95
"""An evaluation in which nearly all rows that were trained on come again is one of the training data."""
Shape = tuple[int, ...]

SETTLED = 3
"""Steps of one form, after which another one is a change."""
IN_A_ROW = 3
"""A single small batch is the rest at the end of an epoch; so many in a row are none."""


class RepeatedBatch(NamedTuple):
    """The same data in all steps looked at: whether in the very same memory, how often, and the loader it is from."""

    steps: int
    held: bool
    example: MeasuredBatch


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


def from_fresh_iterators(found: RepeatedBatch) -> LoaderUse | None:
    """The loader that was begun anew for each step, though it has more than one batch."""
    use = found.example.loader
    if use is None or use.iterations < found.steps or use.batches == 1:
        return None
    return use


def whole_loader(found: RepeatedBatch) -> bool:
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


class Overlap(NamedTuple):
    """Rows of an evaluation that were trained on before. `meant`: it is one of the training data itself."""

    known: int
    looked_at: int
    trained: int
    meant: bool
    line: SourceLine | None


class TrainedRows:
    """The rows of the first training steps; and of one evaluation at a time, how many of its rows are among them."""

    def __init__(self) -> None:
        self._rows: set[int] = set()
        self._batches: set[int] = set()
        self._news: list[bool] = []
        self._whole: bool | None = None
        self._evaluation: list[MeasuredBatch] = []
        self._looked_at = 0
        self._evaluations = 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def full(self) -> bool:
        """Whether no more of this evaluation, or of any, needs to be looked at."""
        enough = self._looked_at >= MOST_KEPT or len(self._evaluation) >= MOST_BATCHES
        return enough or self._evaluations >= MOST_EVALUATIONS

    def train(self, forward: MeasuredBatch) -> None:
        """Note the rows of a training step."""
        if not forward.telling_rows or len(self._rows) >= MOST_KEPT:
            return
        times = Counter(forward.hashes)
        # Each row as often as any other: views of one sample, put into the batch on purpose.
        for each in times if len(set(times.values())) == 1 else forward.hashes:
            self._news.append(each not in self._rows)
            self._rows.add(each)
        self._whole = forward.whole if self._whole is None else self._whole
        if forward.digest is not None:
            self._batches.add(forward.digest)

    def evaluate(self, forward: MeasuredBatch) -> None:
        """Note a batch of an evaluation."""
        if forward.telling_rows:
            self._evaluation.append(forward)
            self._looked_at += len(forward.hashes)

    def overlap(self) -> Overlap | None:
        """What the evaluation that is now over has shown; None where that is nothing."""
        seen, self._evaluation, self._looked_at = self._evaluation, [], 0
        if not seen:
            return None
        self._evaluations += 1
        rows = {each for forward in seen for each in forward.hashes}
        known = rows & self._rows
        if len(known) < 2 or len(known) <= self._by_nature() * len(rows):
            return None
        hit = [each for each in seen if known & set(each.hashes)]
        # A batch that was just trained on; or both splits beside each other, from as many batches each.
        if all(each.digest in self._batches for each in hit) or len(seen) == 2 * len(hit):
            return None
        meant = len(known) == len(rows) or len(known) >= COVERED * len(self._rows)
        return Overlap(len(known), len(rows), len(self._rows), meant, hit[0].line)

    def _by_nature(self) -> float:
        """The share of known rows that is usual: in text, and in data of few different rows, made up by a rule.

        As many different rows as give the repeats seen, n**2 / (2 * repeats) for n drawn, give that share of known
        ones. A shuffled epoch has no repeats. Fractions do not recur by themselves: what comes twice was drawn twice.
        """
        if self._whole is False:
            return 0.0
        wanted, different, drawn = FIRST_PASS * len(self._rows), 0, 0
        for new in self._news:
            different += new
            drawn += 1
            if different >= wanted:
                break
        repeats = drawn - different
        return max(COMMON_OVERLAP, EXPLAINED * len(self._rows) * 2 * repeats / max(1, drawn) ** 2)


class ShapeChange(NamedTuple):
    """What the batch was like, and what it is now: `squeezed` has lost the batch dimension, `collapsed` its rows."""

    kind: str
    before: Shape
    now: Shape


class BatchShape:
    """The shapes of the main input in training; a change counts once a backward has followed it."""

    def __init__(self) -> None:
        self._usual: Shape | None = None
        self._mixed = False
        self._settled = 0
        self._single = 0
        self._now: Shape | None = None
        self._rows = 0
        self._said: set[str] = set()

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

    def backward(self) -> ShapeChange | None:
        """What has changed, each kind once; None where nothing has."""
        usual, now = self._usual, self._now
        if usual is None or now is None or self._mixed or self._settled < SETTLED:
            return None
        kind = None
        # The other sizes may be those of a sequence, which vary.
        if len(now) == len(usual) - 1 and len(usual) > 1 and _fits(now, usual[1:]):
            kind = "squeezed"
        elif len(now) == len(usual) and self._single >= IN_A_ROW - 1 and self._rows == 1 and usual[0] > 1:
            kind = "collapsed"
        if kind is None or kind in self._said:
            return None
        self._said.add(kind)
        return ShapeChange(kind, usual, now)


def _fits(now: Shape, row: Shape) -> bool:
    """Whether this is one row: of the same sizes, or of another length where it is a sequence alone."""
    return now == row or len(row) == 1
