"""RunDir: what a finished or running training has left in its folder, each part read when it is first asked for."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from gpt_guard.errors import GuardError, GuardUsageError
from gpt_guard.records import Finding, Observation, Report
from gpt_guard.report.file import read_report
from gpt_guard.report.run_log import RUN_FILE, RunLog, is_test_loss, is_validation_loss, read_run

if TYPE_CHECKING:
    from gpt_guard.checkpoint.read import Stored

REPORT_FILE = "report.json"
# As the run log's sink writes them.
_HALT, _STEP, _HEADER = b'{"kind":"finding","action":"halt"', b'{"kind":"step"', b'{"kind":"header"'
SUFFIXES = (".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class RunDir:
    """A run directory. Files in it are untrusted data: a damaged one is `problems[name]`, and answers nothing."""

    path: Path
    log: RunLog | None
    report: Report | None
    problems: dict[str, str]

    @property
    def steps(self) -> tuple[Observation, ...]:
        """The training steps in order; of one that was done twice, after a resume, the later."""
        if self.log is None:
            return ()
        return tuple({(s.step, s.optimizer): s for s in self.log.steps if not s.evaluation}.values())

    @cached_property
    def halt(self) -> Finding | None:
        """The finding that stopped the run; None where steps followed it, or a new start, or nothing did."""
        halt: Finding | None = None
        with (self.path / RUN_FILE).open("rb") if self.log is not None else BytesIO() as stream:
            for raw in stream:
                if raw.startswith(_HALT):
                    halt = _finding(raw) or halt
                elif halt is not None and raw.startswith((_HEADER, _STEP)):
                    halt = halt if _same_step(raw, halt) else None
        return halt

    @cached_property
    def checkpoints(self) -> tuple[Path, ...]:
        """The checkpoint files, the best first and then the newest."""
        found = [p for folder in (self.path / "checkpoints", self.path) if folder.is_dir() for p in folder.iterdir()]
        files = [p for p in found if p.suffix in SUFFIXES and p.is_file()]
        return tuple(sorted(files, key=lambda p: ("best" not in p.stem, -p.stat().st_mtime)))

    @property
    def newest(self) -> Path | None:
        """The checkpoint that was written last."""
        return max(self.checkpoints, key=lambda path: path.stat().st_mtime, default=None)

    def stored(self, path: Path) -> Stored | str:
        """A checkpoint taken apart, on the CPU; why not, where it cannot be read. Loads torch."""
        if path not in self._read:
            self._read[path] = _stored(path)
        return self._read[path]

    @cached_property
    def _read(self) -> dict[Path, Stored | str]:
        return {}

    @cached_property
    def tokens(self) -> list[str] | None:
        """The tokens of the run's tokenizer: of the file in it, or else those that Guardian noted. Loads torch."""
        from gpt_guard.checkpoint.fingerprint.record import read_stamp

        if self.tokenizer is not None:
            return list(self.tokenizer.tokens)
        try:
            stamp = read_stamp(self.path)
        except (OSError, ValueError):
            return None
        return stamp.tokens if stamp is not None else None

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer in the folder, or None. Loads torch."""
        from gpt_guard.checks.files.stage import UnusableFile, read_tokenizer

        folder = self.path / "tokenizer"
        for path in [*sorted(folder.glob("*.json")), self.path / "tokenizer.json"]:
            if path.is_file():
                try:
                    return read_tokenizer(path)
                except UnusableFile as error:
                    self.problems.setdefault(path.name, str(error))
        return None

    @property
    def validation(self) -> dict[int, float]:
        """By step, the first of the logged validation losses."""
        return self._logged(is_validation_loss)

    @property
    def test(self) -> dict[int, float]:
        """By step, the first of the logged test losses."""
        return self._logged(is_test_loss)

    def _logged(self, wanted: Callable[[str], bool]) -> dict[int, float]:
        lines = self.log.metrics if self.log is not None else ()
        found = [(line.step, name, value) for line in lines for name, value in line.metrics.items() if wanted(name)]
        return {step: value for step, name, value in found if name == found[0][1]}


def open_run(path: str | os.PathLike[str]) -> RunDir:
    """Open a run directory. Raises GuardUsageError where there is none, or none of what a run leaves is in it."""
    folder = Path(path)
    if not folder.is_dir():
        raise GuardUsageError(f"{folder}: no such folder; give the run_dir of a run, where its {RUN_FILE} is")
    problems: dict[str, str] = {}
    log: RunLog | None = None
    report: Report | None = None
    try:
        log = read_run(folder) if (folder / RUN_FILE).is_file() else None
    except GuardUsageError as error:
        problems[RUN_FILE] = str(error)
    try:
        report = read_report(folder / REPORT_FILE) if (folder / REPORT_FILE).is_file() else None
    except GuardUsageError as error:
        problems[REPORT_FILE] = str(error)
    run = RunDir(folder, log, report, problems)
    if log is None and report is None and not problems and not run.checkpoints:
        raise GuardUsageError(
            f"{folder} holds neither {RUN_FILE} nor {REPORT_FILE} nor a checkpoint ({', '.join(SUFFIXES)}, or in "
            f"checkpoints/); give the run_dir of a run"
        )
    return run


def _finding(raw: bytes) -> Finding | None:
    try:
        line = from_json(raw)
        return Finding.model_validate({key: value for key, value in line.items() if key not in ("kind", "action")})
    except ValueError:  # torn: the last line of a killed process
        return None


def _same_step(raw: bytes, halt: Finding) -> bool:
    """Whether a line is that of the step in which the run was halted, which is written after it."""
    try:
        return raw.startswith(_STEP) and bool(from_json(raw)["step"] == halt.step)
    except (ValueError, KeyError):
        return False


def _stored(path: Path) -> Stored | str:
    from gpt_guard.checkpoint.read import read_payload, take_apart
    from gpt_guard.checkpoint.reporter import Reporter

    reporter = Reporter(lambda finding: None)
    try:
        return take_apart(path, read_payload(path, reporter, None), reporter)
    except GuardError:
        return reporter.findings[-1].seen if reporter.findings else f"{path} cannot be read"
