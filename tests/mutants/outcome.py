"""What preflight says of one mutant, beside what it should."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt_guard import catalogue
from gpt_guard.records import Finding

from .project import healthy, stages_for
from .table import Mutant


@dataclass(frozen=True)
class Outcome:
    """The stages that failed, in order, each with its findings that made it fail."""

    mutant: Mutant
    failed: tuple[tuple[str, Finding], ...]

    @property
    def right_stage(self) -> bool:
        """Only the stage that should, and with a finding of the code that should."""
        stages = {stage for stage, _ in self.failed}
        return stages == {self.mutant.stage} and self.mutant.code in {found.code for _, found in self.failed}

    @property
    def right_cause(self) -> bool:
        """The first finding of the code begins its causes with the right one; true where the code has but one story."""
        first = next((found for _, found in self.failed if found.code == self.mutant.code), None)
        if first is None or not self.right_stage:
            return False
        by_key = {cause.key: cause.text for cause in catalogue.entry(self.mutant.code).causes}
        return self.mutant.cause is None or first.causes[:1] == (by_key[self.mutant.cause],)

    @property
    def words(self) -> str:
        """The verdict in two words."""
        if not self.failed:
            return "MISSED"
        if not self.right_stage:
            return "wrong stage or code"
        return "caught" if self.right_cause else "wrong first cause"

    @property
    def told(self) -> str:
        """What it was called instead."""
        return "; ".join(
            f"{stage} {found.code} {found.seen[:90]} <{found.causes[0][:60]}>" for stage, found in self.failed
        )


def run(mutant: Mutant, folder: Path, patch: Callable[[Any, str, Any], None]) -> Outcome:
    """Break a healthy project and check it, up to the stage that should fail."""
    project = healthy(folder, trained=mutant.trained)
    project.patch = patch
    mutant.change(project)
    report = project.check(only=stages_for(mutant.stage))
    return Outcome(mutant, tuple((line.stage, found) for line in report.failed for found in line.findings))
