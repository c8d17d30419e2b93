"""Everything gpt_guard raises on purpose.

    GuardError                      a finding that policy turned into a halt; `.finding` holds the evidence
    ├── NonFiniteError              GG1xx   also a FloatingPointError
    ├── GradientError               GG2xx
    ├── UpdateError                 GG3xx   parameters and optimizer
    ├── ScheduleError               GG4xx
    ├── ModeError                   GG5xx
    ├── DataError                   GG6xx   data and loss
    ├── CheckpointError             GG7xx
    │   └── FingerprintMismatch     GG701-GG703, GG709   also a ValueError
    ├── ProcessError                GG8xx
    ├── BlindError                  GG9xx   what cannot be seen
    └── PreflightError              checks failed before training; `.failed` holds their results
    GuardUsageError                 a call that cannot work (also a ValueError): what was given, what is expected

Each message is the finding as a person reads it in a terminal.
"""

from __future__ import annotations

from gpt_guard.records import CheckResult, Finding
from gpt_guard.records.render import clean, render_finding


class GuardUsageError(ValueError):
    """A call to gpt_guard that cannot work; the message says what was given and what to write instead."""


class GuardError(Exception):
    """A finding that halted the run; `.finding` holds all evidence as a record."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding)
        self.finding = finding

    def __str__(self) -> str:
        return render_finding(self.finding)


class NonFiniteError(GuardError, FloatingPointError):
    """NaN or infinity where training cannot go on."""


class GradientError(GuardError):
    """Gradients that are zero, missing, exploding or vanishing."""


class UpdateError(GuardError):
    """Parameters that do not move as the optimizer should move them."""


class ScheduleError(GuardError):
    """A learning rate that is not what a schedule could mean."""


class ModeError(GuardError):
    """Training in eval mode, or evaluation in training mode."""


class DataError(GuardError):
    """Batches, labels or a loss that cannot teach the model."""


class CheckpointError(GuardError):
    """A checkpoint that cannot be saved or loaded as asked."""


class FingerprintMismatch(CheckpointError, ValueError):
    """A checkpoint, tokenizer or cache that belongs to something else."""


class ProcessError(GuardError):
    """Processes or loader workers that disagree."""


class BlindError(GuardError):
    """Something that gpt_guard was asked to watch and cannot see."""


class PreflightError(GuardError):
    """Checks that failed before training: `.failed` holds their results, `.finding` the first finding.

    The message lists every line that failed, then the first finding in full.
    """

    def __init__(self, failed: tuple[CheckResult, ...]) -> None:
        super().__init__(next(finding for result in failed for finding in result.findings))
        self.args = (failed,)  # what unpickling calls this with
        self.failed = failed

    def __str__(self) -> str:
        lines = [
            clean(f"  {result.stage}: {result.title}: {result.measured}")
            + (clean(f" | expected {result.expected}") if result.expected else "")
            for result in self.failed
        ]
        count = f"{len(lines)} check{'s' if len(lines) > 1 else ''} failed"
        return "\n".join([count, *lines, "", render_finding(self.finding)])


_FAMILIES: dict[str, type[GuardError]] = {
    "GG1": NonFiniteError,
    "GG2": GradientError,
    "GG3": UpdateError,
    "GG4": ScheduleError,
    "GG5": ModeError,
    "GG6": DataError,
    "GG7": CheckpointError,
    "GG701": FingerprintMismatch,
    "GG702": FingerprintMismatch,
    "GG703": FingerprintMismatch,
    "GG709": FingerprintMismatch,
    "GG8": ProcessError,
    "GG9": BlindError,
}


def error_for(finding: Finding) -> GuardError:
    """Return the exception that stands for a finding; its class follows from the code's family."""
    kind = _FAMILIES.get(finding.code) or _FAMILIES.get(finding.code[:3]) or GuardError
    return kind(finding)
