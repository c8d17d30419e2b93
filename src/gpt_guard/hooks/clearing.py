"""Whether gradients are cleared between the steps of each optimizer: version counters suspect, values confirm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from gpt_guard.hooks.gradients import Gradients
from gpt_guard.hooks.watch import Watch

State = Sequence[tuple[int, int]]
"""Identity and version of each gradient."""
# A second step in a row is how the loop works; from there on values are looked at, and only so often in all.
_SUSPICIOUS = 1
_LOOKS = 4


class Clearing:
    """Follows one optimizer's gradients from a step to its next: did anything replace or write them in between?

    Between `step()` and the next `backward()` only a clearing has reason to touch a gradient. So gradients that have
    the same identity and version before a backward as after the one before it (or after the step) were not cleared,
    and the new gradient adds to one that a step has already used. Costs no device work. `uncleared` counts the steps
    in a row that were made so; accumulation over several backwards clears once per step and counts as cleared. A step
    without a backward of its own, or on gradients that were put in place of those of the backward, was given its
    gradients by hand: it says nothing here.

    Not every clearing shows in a version counter: `p.grad.data.zero_()` and a write through numpy do not. So `left`
    holds, for a few suspicious steps, what `look` measured before the backward: zero means cleared.
    """

    def __init__(self, places: Sequence[int]) -> None:
        self._places = list(places)
        # The usual optimizer holds everything, in order: no list to make.
        self._whole = self._places == list(range(len(self._places)))
        self._left: State | None = None
        self._stepped = False
        self._cleared = False
        self._begun: State = ()
        self._reached = False
        self._looks = _LOOKS
        self.uncleared = 0
        self.left: Any = None

    def renew(self, places: Sequence[int], moved: Sequence[int | None], state: State) -> None:
        """Go on with other parameters: `moved` tells where each gradient of `state` stood before, None if new."""
        before, self._places = self._places, list(places)
        self._whole = self._places == list(range(len(state)))
        self._left = (
            None if self._left is None else self._carried(dict(zip(before, self._left, strict=True)), moved, state)
        )
        if self._begun:
            self._begun = self._carried(dict(zip(before, self._begun, strict=True)), moved, state)

    def _carried(self, old: dict[int, tuple[int, int]], moved: Sequence[int | None], state: State) -> State:
        found = [(state[place], moved[place]) for place in self._places]
        return [now if place is None else old.get(place, now) for now, place in found]

    def backward_begins(self, state: State, look: Callable[[], Any]) -> None:
        """Compare the gradients with how the last step or backward left them; `look` measures what is in them."""
        self._begun = own = self._own(state)
        # Gradients that a step inside the last backward has used and freed are gone on both sides.
        if self._left is not None and (own != self._left or all(version < 0 for _, version in own)):
            self._cleared = True
        elif self.uncleared >= _SUSPICIOUS and self._looks and not (self._cleared or self._reached):
            self._looks -= 1
            self.left = look()

    def backward_ended(self, state: State) -> None:
        """Remember how this backward left them."""
        own = self._own(state)
        # Of several optimizers, this backward may have reached the gradients of another.
        self._reached = self._reached or self._whole or own != self._begun
        if self._stepped:
            self._left = own

    def step_begins(self, now: Callable[[], State]) -> int:
        """Steps in a row, this one included, whose gradients still held what an earlier step had used.

        `now` gives the state of all gradients, and is asked only under suspicion.
        """
        if self._cleared or not self._stepped or not self._reached or self._replaced(now):
            self.uncleared = 0
        else:
            self.uncleared += 1
        return self.uncleared

    def _replaced(self, now: Callable[[], State]) -> bool:
        """Whether other tensors than those of the backward are to be applied: clipping writes into the same ones."""
        left = self._left or ()
        return all(mine[0] != found[0] for mine, found in zip(self._own(now()), left, strict=True))

    def step_ended(self, state: State) -> None:
        """Remember how the step left them; gradients that do not exist any more count as cleared."""
        self._left = self._own(state)
        self._stepped, self._reached, self.left = True, False, None
        self._cleared = all(version < 0 for _, version in self._left)

    def _own(self, state: State) -> State:
        if self._whole and len(state) == len(self._places):
            return state
        return [state[place] for place in self._places]


class Clearings:
    """A `Clearing` for each optimizer, fed with the state of the gradients as it was last remembered."""

    def __init__(self, watch: Watch, gradients: Gradients) -> None:
        self._watch = watch
        self._ledger = watch.ledger
        self._gradients = gradients
        self._each = [Clearing(places) for places in self._look_up()]

    def _look_up(self) -> list[list[int]]:
        watch, gradients = self._watch, self._gradients
        places = {name: place for place, name in enumerate(watch.tracked)}
        held = [watch.held_by(index) for index in range(len(watch.optimizers))]
        self._left_in = [partial(gradients.largest, names, immediate=watch.immediate) for names in held]
        return [[places[name] for name in names] for names in held]

    def renew(self, moved: Sequence[int | None]) -> None:
        """Go on with what the optimizers hold now; `moved` is what `Gradients.renew` gave."""
        state = self._gradients.state or self._gradients.now()
        for clearing, places in zip(self._each, self._look_up(), strict=True):
            clearing.renew(places, moved, state)

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
