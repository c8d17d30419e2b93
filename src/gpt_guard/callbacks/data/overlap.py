"""Are samples of the validation among those that were trained on? Asked of the hashes of whole rows."""

from __future__ import annotations

from collections import Counter

from gpt_guard.callbacks.data.batches import MeasuredBatch
from gpt_guard.catalogue import finding
from gpt_guard.records import Finding, Severity

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

    def overlap(self) -> Finding | None:
        """GG638 where the evaluation that is now over has shown rows that were trained on."""
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
        share, trained = len(known) / len(rows), len(self._rows)
        text = (
            f"{len(known)} of {len(rows)} samples of an evaluation ({share:.0%}) are among the {trained} that were "
            f"trained on in the first steps, equal in every element looked at."
        )
        if meant:
            text += (
                " It looks as if the training data itself were evaluated on purpose: a validation must hold none of it."
            )
        return finding(
            "GG638",
            text,
            likely=["same_file"] if meant else ["duplicates", "rows_split"],
            severity=Severity.INFO if meant else Severity.WARNING,
            where=hit[0].line,
            evaluation=True,
            evidence={"known": len(known), "looked_at": len(rows), "trained": trained, "share": share},
            cause_id="meant" if meant else "mixed",
        )

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
