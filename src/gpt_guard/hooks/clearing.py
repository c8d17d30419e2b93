"""Whether gradients are cleared between the steps of an optimizer, told from version counters alone."""

from __future__ import annotations

from collections.abc import Sequence

State = Sequence[tuple[int, int]]


class Clearing:
    """Follows one optimizer's gradients from a step to its next: did anything replace or write them in between?

    Between `step()` and the next `backward()` only a clearing has reason to touch a gradient. So gradients that have
    the same identity and version before a backward as after the one before it (or after the step) were not cleared,
    and the new gradient adds to one that a step has already used. Costs no device work. `uncleared` counts the steps
    in a row that were made so; accumulation over several backwards clears once per step and counts as cleared.
    """

    def __init__(self, places: Sequence[int]) -> None:
        self._places = list(places)
        # The usual optimizer holds everything, in order: no list to make.
        self._whole = self._places == list(range(len(self._places)))
        self._left: State | None = None
        self._stepped = False
        self._cleared = False
        self.uncleared = 0

    def backward_begins(self, state: State) -> None:
        """Compare the gradients with how the last step or backward left them."""
        own = self._own(state)
        # Gradients that a step inside the last backward has used and freed are gone on both sides.
        if self._left is not None and (own != self._left or all(version < 0 for _, version in own)):
            self._cleared = True

    def backward_ended(self, state: State) -> None:
        """Remember how this backward left them."""
        if self._stepped:
            self._left = self._own(state)

    def step_begins(self) -> int:
        """Steps in a row, this one included, whose gradients still held what an earlier step had used."""
        self.uncleared = 0 if self._cleared or not self._stepped else self.uncleared + 1
        return self.uncleared

    def step_ended(self, state: State) -> None:
        """Remember how the step left them; gradients that do not exist any more count as cleared."""
        self._left = self._own(state)
        self._stepped = True
        self._cleared = all(version < 0 for _, version in self._left)

    def _own(self, state: State) -> State:
        if self._whole and len(state) == len(self._places):
            return state
        return [state[place] for place in self._places]
