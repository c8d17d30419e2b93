"""Whether something puts the weights back between steps: each step starts from the same values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.optim import Optimizer

from gpt_guard.callbacks.updates.param_columns import Columns
from gpt_guard.callbacks.updates.param_meter import Meter
from gpt_guard.callbacks.updates.param_still import Still
from gpt_guard.catalogue import finding
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Observation
from gpt_guard.records.render import number

_STEPS = 3
_MOST_LOOKS = 5
_READING = "param_delta.undone"


class Undone:
    """The norm of all weights before a step, equal to the last bit three times in a row, raises suspicion.

    Then the sampled values themselves are compared from step to step. Three equal ones, with a step that changed them
    in between each time, are said. Averaging, projecting and perturbing weights goes on from where the last step led.
    """

    def __init__(self) -> None:
        self._held = 0.0
        self._run = 0
        self._equal = 0
        self._looks = 0
        self._still: Still | None = None

    @property
    def suspected(self) -> bool:
        """Whether the values are worth a look before the next step."""
        return self._run >= _STEPS and self._looks < _MOST_LOOKS

    def count(self, columns: Columns) -> None:
        """Take in the norms of one step."""
        self._run = self._run + 1 if columns.held == self._held and columns.ratio > 0.0 else 0
        self._held = columns.held
        if not self._run:
            self._still, self._equal = None, 0

    def look(self, tensors: Sequence[Tensor], step: int) -> Tensor | None:
        """Whether the values are those before an earlier step, as a scalar on the device; None the first time."""
        if self._still is None:
            self._looks += 1
            self._still = Still(tensors, step)
            return None
        return self._still.same()

    def answer(self, *, same: bool) -> None:
        """Take in what `look` gave, once the host has read it."""
        if same:
            self._equal += 1
        else:
            self._still, self._equal, self._run = None, 0, 0

    def judge(self, watch: Watch, seen: Observation, names: Sequence[str]) -> Iterator[Finding]:
        """GG311, once the values were the same before so many steps."""
        if self._equal < _STEPS:
            return
        self._still, self._equal, self._looks = None, 0, _MOST_LOOKS
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


class Returns:
    """One `Undone` for each optimizer; `said` holds what was reported already, and is added to.

    `suspected` tells whether any of them is: then `before` and `after` have something to do.
    """

    def __init__(self, said: set[str]) -> None:
        self._said = said
        self._each: dict[int, Undone] = {}
        self.suspected = False
        self._same: Tensor | None = None

    def before(self, watch: Watch, optimizer: Optimizer, meter: Meter) -> None:
        """Look at the values, where they are `suspected`; runs once the meter knows this optimizer's tensors."""
        self._same = None
        index = watch.index_of(optimizer)
        if index in self._each and index in meter.plans and self._each[index].suspected:
            self._same = self._each[index].look(meter.plans[index].tensors, watch.step)

    def after(self, watch: Watch) -> None:
        """Have the host read what was seen before the step, together with the figures of the step."""
        if self._same is not None:
            watch.ledger.put(_READING, self._same)
            self._same = None

    def count(self, seen: Observation, columns: Columns) -> bool:
        """Take in the figures of one step; True if there is something to `judge`."""
        undone = self._each.get(seen.optimizer)
        if undone is None:
            undone = self._each[seen.optimizer] = Undone()
        if _READING in seen.readings:
            undone.answer(same=bool(seen.readings[_READING]))
        undone.count(columns)
        return self.suspected or undone.suspected

    def judge(self, watch: Watch, seen: Observation, names: Sequence[str]) -> Iterator[Finding]:
        """Say what is proved, and have each step measured in full for as long as something is suspected."""
        for found in self._each[seen.optimizer].judge(watch, seen, names):
            self._said.add("GG311")
            yield found
        self.suspected = any(each.suspected for each in self._each.values())
        if self.suspected:
            watch.pace.doubt(_STEPS)

    def close(self) -> None:
        """Drop every reference to tensors."""
        self._each.clear()
