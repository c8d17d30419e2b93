"""BlackBox: leaves one bundle for each failure in the run's folder, and never gets in the way of the failure itself."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gpt_guard.blackbox.source import class_of, environment_of, shown, source_of
from gpt_guard.blackbox.stored import FileName, LeftOut, Part, modes_of, parts_of, stored
from gpt_guard.blackbox.weights import weights_of
from gpt_guard.blackbox.write import MEGABYTE, as_json, write_bundle
from gpt_guard.catalogue import finding as make_finding
from gpt_guard.errors import GuardUsageError
from gpt_guard.records import Action, Finding, Observation, Report, Severity
from gpt_guard.records.render import render_short
from gpt_guard.replaying.recipe import Recipe
from gpt_guard.report.run_log import MAX_LINE_BYTES, RUN_FILE
from gpt_guard.sinks.base import Sink, likely_cause

DEFAULT_LIMIT_MB = 2048
"""Weights and AdamW state of 170 million float32 parameters; what is over it is left out, and said."""

MOST_BUNDLES = 10
"""Under a policy that records and goes on, a run could fill a disk with failures of one origin."""

LAST_STEPS = 100
"""Enough to see a loss or a norm grow; the whole log lies in the run's folder."""
_STEP_BYTES = 4096
"""A step has a few hundred bytes in the log; lines of other kinds stand between them."""

_NO_FORWARD = LeftOut(
    what=FileName.BATCH, why="no forward had been captured when it failed: there is nothing to run again"
)
_logger = logging.getLogger("gpt_guard")

# Code that was written after this may have been loaded before, as in a notebook that was not restarted.
_LOADED = time.time()


class BlackBox(Sink):
    """Writes `run_dir/crash-step-000412/`: all that another process needs to run the failing step again.

    A failure is a finding of the GG1xx family, or any other that halts in a step. Each cause gets one bundle, however
    often it comes back, and so does each step, however many findings follow from its first. A folder that cannot be
    written is said once (GG905); the finding goes its way all the same.

    - `run_dir`: None for no bundles at all.
    - `subject` gives the model and its optimizers, `recipe_for` what the step of a finding was made of.
    - `limit_mb`: what the tensors of one bundle may take; optimizer state is left out first, then parameters.
    - `most`: bundles that one run may leave.
    """

    def __init__(
        self,
        run_dir: str | Path | None,
        subject: Callable[[], tuple[nn.Module, Sequence[Optimizer]]],
        recipe_for: Callable[[Finding], Recipe | None],
        report: Callable[[], Report],
        limit_mb: float = DEFAULT_LIMIT_MB,
        most: int = MOST_BUNDLES,
    ) -> None:
        if isinstance(limit_mb, bool) or not isinstance(limit_mb, (int, float)) or not limit_mb >= 0:
            raise GuardUsageError(f"bundle_limit_mb={limit_mb!r:.40} cannot work: give megabytes, a number from 0 on")
        # A loop may change its folder later.
        self.run_dir = None if run_dir is None else Path(run_dir).absolute()
        self._subject = subject
        self._recipe_for = recipe_for
        # Weak: the Guardian that makes the report holds this.
        self._report = weakref.WeakMethod(report)
        self.limit_mb = limit_mb
        self.most = most
        self._by_cause: dict[Any, Path] = {}
        self._by_step: dict[Any, Path] = {}

    def open(self, header: Mapping[str, Any]) -> None:
        """Nothing yet: a run that does not fail leaves nothing."""

    def observe(self, observation: Observation) -> None:
        """Nothing: the run log has the steps."""

    def find(self, finding: Finding, action: Action) -> None:
        """Nothing: by now `note` has been called, so that every output can name the bundle."""

    def note(self, finding: Finding, action: Action) -> Finding:
        """The finding with the bundle of its failure, written now or for an earlier one of the same step or cause.

        Runs while the failing step is still as it was. Reads parameters and state from the device. Never raises.
        """
        if self.trouble is not None or self.run_dir is None:
            return finding
        try:
            path = self._bundle_of(self.run_dir, finding, action)
        except Exception as error:  # a bundle must not cost the finding that it is about
            self._give_up(error)
            return finding
        if path is None:
            return finding
        model, _ = self._subject()
        return finding.model_copy(update={"bundle": shown(path), "bundle_model": class_of(model).typed})

    def _bundle_of(self, run_dir: Path, finding: Finding, action: Action) -> Path | None:
        if not _is_failure(finding, action):
            return None
        step = (finding.step, finding.evaluation)
        known = self._by_cause.get(finding.cause) or self._by_step.get(step)
        if known is None and len(set(self._by_step.values())) < self.most:
            known = self._write(run_dir, finding)
        if known is not None:
            self._by_cause[finding.cause] = self._by_step[step] = known
        return known

    def _write(self, run_dir: Path, finding: Finding) -> Path | None:
        recipe = self._recipe_for(finding)
        if recipe is None and not finding.code.startswith("GG1"):
            return None  # a halt outside of a step: a checkpoint or tokenizer that does not fit
        model, optimizers = self._subject()
        path = _free_name(run_dir, finding.step)
        # Inside of inference mode every copy would be an inference tensor, which cannot be told to require gradients.
        with torch.inference_mode(False), torch.no_grad():
            parts = [*(parts_of(recipe, model) if recipe is not None else ())]
            parts.append(Part(FileName.MODEL, "parameters and buffers", weights_of(model)))
            if optimizers:
                states = {"optimizers": [optimizer.state_dict() for optimizer in optimizers]}
                parts.append(Part(FileName.OPTIMIZER, "optimizer state", states))
            texts = self._texts(finding, recipe, model, last_steps(run_dir))
            absent = (_NO_FORWARD,) if recipe is None else ()
            write_bundle(path, finding, texts, parts, limit=self.limit_mb * MEGABYTE, absent=absent)
        return path

    def _texts(
        self, finding: Finding, recipe: Recipe | None, model: nn.Module, steps: bytes | None
    ) -> dict[FileName, bytes]:
        report = self._report()
        whole = report() if report is not None else Report()
        if not any(each.cause == finding.cause for each in whole.findings):
            whole = whole.model_copy(update={"findings": (*whole.findings, finding)})
        texts: dict[FileName, bytes] = {
            FileName.FINDING: as_json(finding),
            FileName.REPORT: as_json(whole),
            FileName.ENVIRONMENT: as_json(environment_of(model)),
            FileName.SOURCE: as_json(source_of(model, since=_LOADED)),
            FileName.RECIPE: as_json(stored(recipe)),
            FileName.MODES: as_json(modes_of(model, recipe) if recipe is not None else {}),
        }
        if steps is not None:
            texts[FileName.STEPS] = steps
        return texts

    def _give_up(self, error: Exception) -> None:
        self.trouble = make_finding(
            "GG905",
            f"no black box was written below {self.run_dir}: {type(error).__name__}: {error}. "
            f"The finding itself is not affected.",
            likely=[likely_cause(error)],
            evidence={"sink": self.name, "error": type(error).__name__},
        )
        _logger.warning(render_short(self.trouble), exc_info=None if isinstance(error, OSError) else error)


def _is_failure(finding: Finding, action: Action) -> bool:
    """Numbers that went bad, whatever is done about them, and anything else that halts."""
    numeric = finding.code.startswith("GG1") and finding.severity is Severity.ERROR
    return numeric or action is Action.HALT


def _free_name(run_dir: Path, step: int | None) -> Path:
    """`crash-step-000412`, with a number behind it where an earlier run has failed at the same step."""
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if several else 0
    name = f"crash-step-{step or 0:06d}" + (f"-rank-{rank}" if rank else "")
    path, count = run_dir / name, 1
    while path.exists():
        count += 1
        path = run_dir / f"{name}-{count}"
    return path


def last_steps(run_dir: Path, count: int = LAST_STEPS) -> bytes | None:
    """The header and the last steps of the log in `run_dir`, as `read_run` reads them; None where there is no log."""
    file = run_dir / RUN_FILE
    try:
        with file.open("rb") as stream:
            header = stream.readline(MAX_LINE_BYTES)
            start = max(stream.tell(), file.stat().st_size - count * _STEP_BYTES)
            stream.seek(start)
            lines = stream.read().split(b"\n")
    except OSError:
        return None
    if not header.startswith(b'{"kind":"header"') or not header.endswith(b"\n"):
        return None
    # The first line may be half of one, and the last has no end; what is whole begins and ends like an object.
    steps = [line for line in lines if line.startswith(b'{"kind":"step"') and line.endswith(b"}")]
    return header + b"".join(line + b"\n" for line in steps[-count:])
