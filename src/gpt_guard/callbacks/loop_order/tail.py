"""The tail of an accumulation: micro-batches that are left over at the end of an epoch, and cleared without a step."""

from __future__ import annotations

from typing import Any

from gpt_guard.catalogue import finding
from gpt_guard.records import Finding, Moment, Severity

# So many steps of one and the same number of micro-batches are how the loop works.
_REGULAR = 2


class Tail:
    """Counts backward calls since the step, and since the gradients were last cleared; reads nothing, and stays on.

    A loop that leaves out a bad micro-batch goes on counting, so that its next step has fewer of them. One that begins
    an epoch counts from the start again: a full step follows. So a tail is reported only after that step, and only
    where modes changed in between, as round a validation, or where it has happened before.
    """

    def __init__(self) -> None:
        self.size = 0
        self.regular = 0
        self.reported = False
        self._since = 0
        self._drops = 0
        self._left = 0
        self._boundary = False
        self._before: list[int] = []

    def mode_changed(self) -> None:
        """`.train()` or `.eval()` was called."""
        self._boundary = True

    def backward(self, micro_batch: int) -> None:
        """A backward is over, the `micro_batch`-th since the gradients were cleared; 0 if it was no training."""
        if micro_batch == 0:
            # An attack on the inputs in a validation: nothing is known of this step.
            self._drops = 2
        if micro_batch == 1 and self._since:
            self._drops += 1
            self._left = self._since
            self._since = 0
        if self._since == 0 and not self._drops:
            # What was before the first backward of a step was between two steps.
            self._boundary = False
        self._since += 1

    def step(self, micro_batches: int) -> tuple[int, int] | None:
        """A step is about to be made, or was left out: micro-batches dropped and in a full step, if a tail was seen."""
        drops, left, boundary = self._drops, self._left, self._boundary
        self._since = self._drops = 0
        self._boundary = False
        if not drops:
            same = micro_batches == self.size
            self.regular = self.regular + 1 if same else int(micro_batches > 1)
            self.size = micro_batches
            return None
        if self.regular < _REGULAR or drops > 1 or not 0 < left < self.size or micro_batches != self.size:
            self.regular = 0
            return None
        known = left in self._before
        self._before = [left]
        if self.reported or not (boundary or known):
            return None
        self.reported = True
        return left, self.size

    def at_end(self) -> tuple[int, int, bool] | None:
        """Micro-batches that no step has followed when the run ended, in a full step, and whether it was so before."""
        if self.reported or self._drops or self.regular < _REGULAR or not 0 < self._since < self.size:
            return None
        self.reported = True
        return self._since, self.size, self._since in self._before

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {"size": self.size, "regular": self.regular, "told": self.reported, "before": list(self._before)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave; a resumed run begins with a fresh cycle."""
        self.size, self.regular, self.reported = int(state["size"]), int(state["regular"]), bool(state["told"])
        self._before = [int(left) for left in state["before"]]


def dropped(left: int, size: int, again: bool, step: int, *, at_end: bool) -> Finding:
    """GG237: the micro-batches that were for nothing; at the end, `again` where as many had been cleared before."""
    if at_end:
        text = f"The run ended {left} micro-batches after its last step; a full step has {size}. They were for nothing"
        text += f", as {left} before that were cleared without a step." if again else "."
    else:
        text = (
            f"{left} micro-batches were added up and then cleared without a step; before and after, each step had "
            f"{size}. Saw: (forward, backward) x {left}, zero_grad, (forward, backward) x {size}, step. Expected: a "
            f"step on the {left} left over, before zero_grad."
        )
    return finding(
        "GG237",
        text,
        likely=["end_of_epoch"],
        severity=Severity.INFO if at_end and not again else Severity.WARNING,
        step=step,
        moment=Moment.EXIT if at_end else Moment.BEFORE_STEP,
        evidence={"left_over": left, "micro_batches": size},
    )
