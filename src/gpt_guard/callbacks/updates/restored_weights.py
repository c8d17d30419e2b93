"""Whether something puts the weights back between steps: each step starts from the same values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from gpt_guard.callbacks.updates.sampling import SampledParameters, StepFigures, Unchanged
from gpt_guard.catalogue import finding
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Observation
from gpt_guard.records.render import number

_STEPS = 3
_MOST_LOOKS = 5
_READING = "param_delta.restored"


@dataclass
class _Run:
    """Of one optimizer: norm of all weights before the newest step, steps in a row that it was the same before.

    `earlier` holds the sampled values before an earlier step, `equal` how often they were there again.
    """

    norm: float = 0.0
    steps: int = 0
    looks: int = 0
    equal: int = 0
    earlier: Unchanged | None = None

    @property
    def suspected(self) -> bool:
        return self.steps >= _STEPS and self.looks < _MOST_LOOKS


class RestoredWeights:
    """The norm of all weights before a step, equal to the last bit three times in a row, raises suspicion.

    Then the sampled values themselves are compared from step to step. Three equal ones, with a step that changed them
    in between each time, are told (GG311). Averaging, projecting and perturbing weights goes on from where the last
    step led. `reported` holds what was told already, and is added to.
    """

    def __init__(self, reported: set[str]) -> None:
        self._reported = reported
        self._runs: dict[int, _Run] = {}
        self._same: Tensor | None = None

    def before(self, watch: Watch, optimizer: Optimizer, sampled: dict[int, SampledParameters]) -> None:
        """Look at the values, where they are suspected; runs once this optimizer's tensors are known."""
        self._same = None
        index = watch.index_of(optimizer)
        run = self._runs.get(index)
        if run is None or not run.suspected or index not in sampled:
            return
        if run.earlier is None:
            run.looks += 1
            run.earlier = Unchanged(sampled[index].tensors, watch.step)
        else:
            self._same = run.earlier.on_device()

    def after(self, watch: Watch) -> None:
        """Have the host read what was seen before the step, together with the figures of the step."""
        if self._same is not None:
            watch.ledger.put(_READING, self._same)
            self._same = None

    def judge(self, watch: Watch, seen: Observation, figures: StepFigures, names: Sequence[str]) -> Iterator[Finding]:
        """Take in the figures of one step."""
        run = self._runs.setdefault(seen.optimizer, _Run())
        if _READING in seen.readings:
            if seen.readings[_READING]:
                run.equal += 1
            else:
                run.steps, run.equal, run.earlier = 0, 0, None
        run.steps = run.steps + 1 if figures.held == run.norm and figures.ratio > 0.0 else 0
        run.norm = figures.held
        if not run.steps:
            run.earlier, run.equal = None, 0
        if run.equal < _STEPS:
            return
        run.earlier, run.equal, run.looks = None, 0, _MOST_LOOKS
        self._reported.add("GG311")
        path, kind = watch.owner_of(names[0])
        yield finding(
            "GG311",
            f"Each of the last {_STEPS} steps began with the very values with which the step before it began, in all "
            f"sampled elements of {len(names)} parameters, although each step changed them (the last one by "
            f"{number(seen.update_ratio)} of their norm).",
            step=seen.step,
            moment=seen.moment,
            module=path,
            module_class=kind,
            evidence={"parameters": list(names[:50]), "count": len(names), "ratio": seen.update_ratio},
        )

    def close(self) -> None:
        """Drop every reference to tensors."""
        self._runs.clear()
        self._same = None
