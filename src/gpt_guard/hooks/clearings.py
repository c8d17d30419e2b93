"""Whether gradients are cleared between steps, for each optimizer of a Guardian."""

from __future__ import annotations

from functools import partial

from gpt_guard.hooks.clearing import Clearing
from gpt_guard.hooks.gradients import Gradients
from gpt_guard.hooks.watch import Watch


class Clearings:
    """A `Clearing` for each optimizer, fed with the state of the gradients as it was last remembered."""

    def __init__(self, watch: Watch, gradients: Gradients) -> None:
        self._ledger = watch.ledger
        self._gradients = gradients
        places = {name: place for place, name in enumerate(watch.tracked)}
        held = [watch.held_by(index) for index in range(len(watch.optimizers))]
        self._each = [Clearing([places[name] for name in names]) for names in held]
        self._left_in = [partial(gradients.largest, names, immediate=watch.immediate) for names in held]

    def backward_begins(self) -> None:
        """Look whether they were cleared since the last step or backward."""
        for clearing, left_in in zip(self._each, self._left_in, strict=True):
            clearing.backward_begins(self._gradients.state, left_in)

    def backward_ended(self) -> None:
        """Remember how this backward left them."""
        for clearing in self._each:
            clearing.backward_ended(self._gradients.state)

    def step_begins(self, index: int) -> None:
        """Put into the ledger how many steps in a row have used gradients that were not cleared."""
        clearing = self._each[index]
        self._ledger.put("grads_uncleared", clearing.step_begins(self._gradients.now))
        if clearing.left is not None:
            self._ledger.put("grads_left", clearing.left)

    def step_ended(self, index: int) -> None:
        """Remember how the step left them."""
        self._each[index].step_ended(self._gradients.state)
