"""Dropout rates that a forward in an evaluation writes, and that training then goes on with."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from gpt_guard.catalogue import finding
from gpt_guard.hooks.frames import user_line
from gpt_guard.hooks.unregistered import plain_attributes
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, SourceLine
from gpt_guard.records.render import number, some

# A rate between 0 and 1 by any of the names that people give it.
_RATE = re.compile(r"p|p_\w+|.*_p|.*drop.*|keep_prob\w*", re.IGNORECASE)
Rates = dict[str, float]


class KeptRates:
    """Compares dropout rates over the first forward of each evaluation: told is what it changed and nobody put back.

    A rate that is set anywhere else, as a schedule does between epochs, is the user's own business. Reads attributes
    that are numbers, in evaluations only.
    """

    def __init__(self) -> None:
        self._looked = False
        self._before: Rates | None = None
        self._changed: dict[str, tuple[float, float]] = {}
        self._line: SourceLine | None = None
        self._told: set[str] = set()

    def forward_begins(self, watch: Watch) -> None:
        """A forward in eval mode, or without gradients, begins."""
        if not self._looked:
            self._looked = True
            self._before, self._line = _rates(watch.model), user_line()

    def forward_ended(self, watch: Watch) -> None:
        """A forward is over."""
        if self._before is None:
            return
        before, self._before = self._before, None
        now = _rates(watch.model)
        self._changed |= {path: (rate, now[path]) for path, rate in before.items() if now.get(path, rate) != rate}

    def trained(self, watch: Watch, step: int) -> Iterator[Finding]:
        """A training step was made: what was changed before it has had its chance to be put back."""
        self._looked = False
        if not self._changed:
            return
        changed, self._changed = self._changed, {}
        now = _rates(watch.model)
        kept = {path: pair for path, pair in changed.items() if now.get(path) == pair[1] and path not in self._told}
        if not kept:
            return
        self._told |= set(kept)
        first = next(iter(kept))
        owner = first.rpartition(".")[0]
        changes = [f"`{path}` {number(old)} -> {number(new)}" for path, (old, new) in kept.items()]
        yield finding(
            "GG513",
            f"A forward in an evaluation changed {some(changes, 3)}, and training goes on with that.",
            step=step,
            moment=Moment.BEFORE_STEP,
            module=owner,
            module_class=type(watch.model.get_submodule(owner)).__name__,
            where=self._line,
            evidence={"changes": {path: list(pair) for path, pair in list(kept.items())[:50]}},
            cause_id=f"GG513 {first}",
        )


def _rates(model: nn.Module) -> Rates:
    return {
        each.path: float(each.value)
        for each in plain_attributes(model)
        if isinstance(each.value, float | int)
        and not isinstance(each.value, bool)
        and 0 <= each.value <= 1
        and _RATE.fullmatch(each.path.rpartition(".")[2])
    }
