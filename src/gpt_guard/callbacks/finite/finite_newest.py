"""What the newest step has left of the model's state, where that was not looked at in the step itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from gpt_guard.callbacks.finite.finite_state import bad_after_step
from gpt_guard.callbacks.finite.finite_told import Told
from gpt_guard.hooks.copies import Uncopiable, Uncopied
from gpt_guard.hooks.state import StateWatch
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Observation


class NewestStep:
    """Parameters and buffers after light steps: looked at once something else is bad, before a full step, and at exit.

    Also before they are given out to be saved.

    A parameter that is not finite makes the outputs of its module so, in the next forward and before the next update.
    Only what no forward has used since, such as an embedding row, can have been bad for longer: evidence `since` is the
    last step after which all of the state was known to be finite. `measured` is that step.
    """

    def __init__(self) -> None:
        self.measured = -1
        self._seen: Observation | None = None
        self._handle: Uncopiable | None = None

    def open(self, watch: Watch, asked: Callable[[], None]) -> None:
        """Begin; where reading is free, `asked` is called before the model's `state_dict()` gives out any state."""
        self.measured = watch.step - 1
        if watch.immediate and hasattr(watch.model, "register_state_dict_pre_hook"):
            self._handle = Uncopiable(watch.model.register_state_dict_pre_hook(_Asked(watch.model, asked)))

    def close(self) -> None:
        """Stop; may run twice."""
        if self._handle is not None:
            self._handle.remove()

    def take(self, watch: Watch, state: StateWatch, seen: Observation, *, explained: bool) -> Iterable[Finding]:
        """Note the observation of a step that was made; if it measured the state, what has turned bad in it."""
        self._seen = seen
        bad = state.turned_bad(seen.readings.get("finite.state", []))
        if not bad or explained:
            return ()
        step = seen.optimizer, seen.step
        written = {name for name in bad if watch.versions.written_between(name, step)}
        return bad_after_step(watch, bad, seen, written)

    def tell(self, watch: Watch, state: StateWatch, told: Told, *, used: bool = False) -> bool:
        """Whether the newest step has spoilt the state; then it is told, and nothing of what follows from it.

        `used`: a forward has gone bad, that of the step before had not; so it was the step between them.
        """
        found = self.findings(watch, state, used=used)
        if found:
            told.forward = told.step = True
        for each in found:
            told.submit(watch.submit, each)
        return bool(found)

    def findings(self, watch: Watch, state: StateWatch, *, used: bool) -> list[Finding]:
        """What the newest step has made non-finite; reads the state, unless that was done since."""
        newest = watch.step - 1
        if not watch.immediate or self.measured >= newest:
            return []
        since, self.measured = self.measured, newest
        bad = state.turned_bad(state.read() or [], watch.versions.written_since)
        if not bad:
            return []
        watch.settle()
        if self._seen is None:
            return []
        # A step that somebody had written to the parameters before is a full one: here nobody had.
        long_ago = None if used or newest - since <= 1 else since
        found = bad_after_step(watch, bad, self._seen, set(), light=True, since=long_ago)
        return [each.model_copy(update={"evidence": {**each.evidence, "since": since}}) for each in found]


class _Asked(Uncopied):
    """A hook on `state_dict()` of one model."""

    __slots__ = ("_asked", "_module")

    def __init__(self, module: nn.Module, asked: Callable[[], None]) -> None:
        self._module = module
        self._asked = asked

    def __call__(self, module: nn.Module, _prefix: str, _keep_vars: Any) -> None:
        if module is self._module:
            self._asked()
