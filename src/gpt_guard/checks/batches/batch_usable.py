"""A batch that no model can take is said once, and kept from the stages that would call the model with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from gpt_guard.checks.batches.stage import BatchesStage
from gpt_guard.checks.runner.base import Subject
from gpt_guard.records import CheckResult

FORM = ("device", "shape", "dtype", "range")
"""The lines of the stage for batches that say whether a model can be called with one, in their order."""
UNUSABLE = "the given one cannot be used"


class BatchForm(BatchesStage):
    """The stage for batches as far as those lines."""

    def run(self, subject: Subject) -> Iterator[CheckResult]:
        for line in super().run(subject):
            yield line
            if line.title == FORM[-1]:
                return


def unusable(lines: Iterable[CheckResult]) -> list[CheckResult]:
    """Those lines that tell that a model cannot be called with the batch.

    One on another device can, for the checks move it; one without values (on the meta device) is all that fails there.
    """
    failed = [line for line in lines if line.stage == BatchesStage.name and line.status == "failed"]
    return [line for line in failed if line.title in (*FORM[1:], BatchesStage.title) or "meta" in line.measured]


def without_batch(subject: Subject) -> Subject:
    """The subject for the stages that follow: they ask with ids of their own, or say that there is no batch.

    An id out of range would otherwise fail each of them, and on a CUDA device end all work in this process.
    """
    return replace(subject, batch=None, batches=None, sources={**subject.sources, "batch": UNUSABLE})
