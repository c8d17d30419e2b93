"""Judge which parameters do not move as they should, and how far all of them move, from the figures of the steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gpt_guard.callbacks.updates.param_confirm import Verdict
from gpt_guard.callbacks.updates.param_history import IDLE_STEPS, History, Moved
from gpt_guard.callbacks.updates.param_meter import Measured, Meter
from gpt_guard.callbacks.updates.param_rows import MOST_WAITING
from gpt_guard.callbacks.updates.param_words import Facts, frozen_moved, judge_confirmed, zero_gradient
from gpt_guard.callbacks.updates.update_ratio import RatioWatch
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Observation, Severity

# After any of these a small update has its reason.
_EXPLAINS = ("GG301", "GG302 ", "GG304 explains", "GG305", "GG307 stale", "GG310", "GG311", "GG312")


class Moves:
    """A `History` and a `RatioWatch` for each optimizer; `said` holds what was reported already, and is added to."""

    def __init__(self, said: set[str], patience: int, lost: float, ratio_bounds: tuple[float, float, int]) -> None:
        self._said = said
        self._patience = patience
        self._lost = lost
        self._ratio_bounds = ratio_bounds
        self._histories: dict[int, History] = {}
        self._ratio_watches: dict[int, RatioWatch] = {}
        self._pairs: dict[int, tuple[RatioWatch, History]] = {}

    def history(self, index: int) -> History:
        """The counters of optimizer `index`."""
        if index not in self._histories:
            self._histories[index] = History(self._patience, 1.0 - self._lost)
        return self._histories[index]

    def ratio_watch(self, index: int) -> RatioWatch:
        """What judges the update-to-weight ratio of optimizer `index`."""
        if index not in self._ratio_watches:
            self._ratio_watches[index] = RatioWatch(*self._ratio_bounds)
        return self._ratio_watches[index]

    def of(self, index: int) -> tuple[RatioWatch, History]:
        """Both of optimizer `index`."""
        pair = self._pairs.get(index)
        if pair is None:
            pair = self._pairs[index] = self.ratio_watch(index), self.history(index)
        return pair

    def explained(self) -> bool:
        """Whether it has been said already why nothing moves."""
        return any(said.startswith(_EXPLAINS) for said in self._said)

    def judge(
        self, watch: Watch, meter: Meter, seen: Observation, measured: Measured, weight: float
    ) -> Iterator[Finding]:
        """Count one step, which counts for `weight`; say what is proved and have suspects compared exactly."""
        plan, columns, history = measured.plan, measured.columns, self.history(seen.optimizer)
        if columns is None:
            return
        lr = [seen.lr[group] if group < len(seen.lr) else 0.0 for group in plan.groups]
        step = Moved(plan.names, columns.share, lr, plan.own, plan.trains, plan.half, seen.grad_norms)
        facts = Facts(
            watch,
            watch.optimizers[seen.optimizer],
            seen,
            lr=dict(zip(plan.names, lr, strict=True)),
            tensors=dict(zip(plan.names, plan.tensors, strict=True)),
            ratio_low=self._ratio_bounds[1],
        )
        if measured.verdicts and seen.grad_norm:
            yield from self._judge_confirmed(facts, measured.verdicts, history, scaling=measured.scaling)
        if seen.grad_norm:
            # What a closure evaluated several times adds up to is the optimizer's choice; a line search may stay put.
            history.count(step, 0.0 if measured.closure or history.converged(seen.grad_norm) else weight)
            history.count_zero_grads(step)
        if thawed := self._new("GG306", history.thawed()):
            yield frozen_moved(facts, thawed)
        if zero := self._new("GG304", history.never_had_gradient(watch.model)):
            yield self._explains(zero_gradient(facts, zero, self._patience))
        self._ask(meter, seen.optimizer, history, step)
        if self._pressing(history):
            watch.pace.doubt(2)

    def _judge_confirmed(
        self, facts: Facts, verdicts: Mapping[str, Verdict], history: History, *, scaling: bool
    ) -> Iterator[Finding]:
        idle = history.idle >= IDLE_STEPS
        moved = {name for name in verdicts if history.has_moved(name)}
        for found, names in judge_confirmed(facts, verdicts, moved, idle=idle, lost=self._lost, scaling=scaling):
            self._said |= {f"moves {name}" for name in names}
            ratio = self.ratio_watch(facts.seen.optimizer)
            # That steps are too small, and that they are too small to change anything, is said once.
            if found.code in ("GG301", "GG309") and "GG309" in ratio.said:
                continue
            ratio.said.add(found.code)
            # Parameters get stuck one after the other; that all of them round, or none moves, is said once.
            if found.code == "GG304" or found.code not in self._said:
                self._said.add(found.code)
                yield self._explains(found)
        history.excuse([name for name in verdicts if f"moves {name}" not in self._said])
        if any(verdict.changed for verdict in verdicts.values()):
            history.idle = 0.0

    def _explains(self, found: Finding) -> Finding:
        """Remember a GG304 that explains small updates, as that of a lone bias does not."""
        if found.code == "GG304" and found.severity is not Severity.INFO:
            self._said.add("GG304 explains")
        return found

    def _ask(self, meter: Meter, index: int, history: History, step: Moved) -> None:
        """Have the suspects compared exactly in the next step."""
        if history.idle >= IDLE_STEPS and "GG301" not in self._said:
            pairs = zip(step.names, step.trains, step.own, strict=True)
            meter.confirm(index, [name for name, trains, own in pairs if trains and own and step.grads.get(name)])
        elif history.still:
            own = {name for name, own in zip(step.names, step.own, strict=True) if own}
            stuck = [name for name in history.stuck() if name in own and f"moves {name}" not in self._said]
            meter.confirm(index, stuck)

    def _pressing(self, history: History) -> bool:
        """Whether the next steps may show something to be said, or to be compared exactly in the step that follows."""
        soon = [name for name in history.soon(MOST_WAITING) if not {f"moves {name}", f"GG306 {name}"} & self._said]
        return bool(soon) or bool(history.idle and "GG301" not in self._said)

    def _new(self, code: str, names: Iterable[str]) -> list[str]:
        fresh = [name for name in names if f"{code} {name}" not in self._said]
        self._said |= {f"{code} {name}" for name in fresh}
        return fresh

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and lists."""
        return {
            "histories": {str(index): each.state_dict() for index, each in self._histories.items()},
            "ratios": {str(index): each.state_dict() for index, each in self._ratio_watches.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        for index, saved in state["histories"].items():
            self.history(int(index)).load_state_dict(saved)
        for index, saved in state["ratios"].items():
            self.ratio_watch(int(index)).load_state_dict(saved)
