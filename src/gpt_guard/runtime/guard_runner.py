"""Calls the guards at their moments, and keeps one that fails itself from taking the training down."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from gpt_guard.callbacks.base import Guard
from gpt_guard.catalogue import finding
from gpt_guard.errors import GuardError, GuardUsageError
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Observation

_MOMENTS = ("before_backward", "after_backward", "before_step", "after_step")


class GuardRunner:
    """The attached guards, by moment; only those that override a method are called for it."""

    def __init__(self, guards: Sequence[Guard], submit: Callable[[Finding], None]) -> None:
        for guard in guards:
            if guard._watch is not None:
                raise GuardUsageError(
                    f"this {guard.name} already works for another Guardian that is active: give each its own guards"
                )
        self._guards = list(guards)
        self._submit = submit
        self._calls: dict[str, list[tuple[Guard, Callable[..., None]]]] = {}
        self._judges: dict[Moment, list[Guard]] = {}
        self._active: set[int] = set()
        self._rests = False
        self._sort()

    def wake(self) -> None:
        """Call all guards again: steps are inspected."""
        self._rests = False
        self._sort()

    def rest(self) -> None:
        """Leave out the guards that only act in inspected steps: an empty call of each costs a microsecond or two."""
        self._rests = True
        self._sort()

    def _sort(self) -> None:
        called = [guard for guard in self._guards if not (self._rests and guard.inspects)]
        self._calls = {
            name: [(guard, getattr(guard, name)) for guard in called if _overrides(guard, name)] for name in _MOMENTS
        }
        self._judges = {moment: [guard for guard in called if moment in guard.judged_at] for moment in Moment}
        self._active = {id(guard) for guard in self._guards}

    def attach(self, guard: Guard, watch: Watch) -> None:
        """Attach a guard; one that fails is detached, named and dropped."""
        self._safely(guard, lambda: guard.attach(watch))

    def add(self, guard: Guard, watch: Watch) -> None:
        """Take in a guard for a while, in the middle of a run."""
        self._guards.append(guard)
        self._sort()
        self.attach(guard, watch)

    def remove(self, guard: Guard) -> None:
        """Let go of one again; does nothing if it is not there."""
        if any(guard is other for other in self._guards):
            self._guards = [other for other in self._guards if other is not guard]
            self._sort()
            self.detach(guard)

    def call(self, moment: str, *args: Any) -> None:
        """Run one moment method of every guard that has it."""
        # As `_safely` does, without a call more for each guard.
        for guard, method in self._calls[moment]:
            try:
                method(*args)
            except GuardError:
                raise
            except Exception as error:
                self._drop(guard, error)

    def listen(self, listener: Callable[..., None], *args: Any) -> None:
        """Run what a guard has registered, unless that guard is switched off by now."""
        owner: Any = getattr(listener, "__self__", None)
        if id(owner) in self._active:
            try:
                listener(*args)
            except GuardError:
                raise
            except Exception as error:
                self._drop(owner, error)
        elif not isinstance(owner, Guard):
            listener(*args)

    def listen_all(self, listeners: Iterable[Callable[..., None]], *args: Any) -> None:
        """Run all that was registered for one moment; a guard that fails is switched off with all of its listeners."""
        for listener in [*listeners]:
            try:
                listener(*args)
            except GuardError:
                raise
            except Exception as error:
                owner = getattr(listener, "__self__", None)
                if not isinstance(owner, Guard):
                    raise
                self._drop(owner, error)

    def judge(self, seen: Observation) -> None:
        """Let the guards judge an observation and submit what they find."""
        for guard in self._judges[seen.moment]:
            try:
                for found in guard.judge(seen):
                    self._submit_named(guard, found)
            except GuardError:
                raise
            except Exception as error:
                self._drop(guard, error)

    def finish(self) -> None:
        """Let the guards say what can only be said at the end."""
        for guard in list(self._guards):
            self._safely(guard, self._submit_all, guard, guard.finish)

    def blind_spots(self) -> list[str]:
        """What the guards were asked to watch and cannot see."""
        found: list[str] = []
        for guard in list(self._guards):
            self._safely(guard, _tell_blind_spots, guard, found)
        return found

    def detach(self, guard: Guard) -> None:
        """Detach a guard; one that fails at it is named."""
        try:
            guard.detach()
        except Exception as error:
            # Those of this package bear it twice: what the failure has cut off is undone by the second time.
            if type(guard).__module__.startswith("gpt_guard."):
                with suppress(Exception):
                    guard.detach()
            self._report(guard, error)
        finally:
            guard._watch = None

    def _submit_all(self, guard: Guard, find: Callable[..., Iterable[Finding]], *args: Any) -> None:
        for found in find(*args):
            self._submit_named(guard, found)

    def _submit_named(self, guard: Guard, found: Finding) -> None:
        self._submit(found if found.guard else found.model_copy(update={"guard": guard.name}))

    def _safely(self, guard: Guard, act: Callable[..., None], *args: Any) -> None:
        try:
            act(*args)
        except GuardError:
            raise
        except Exception as error:
            self._drop(guard, error)

    def _drop(self, guard: Guard, error: Exception) -> None:
        self._guards = [other for other in self._guards if other is not guard]
        self._sort()
        if guard._watch is not None:
            watch = guard._watch
            registered: tuple[list[Any], ...] = (watch.forward_begins, watch.forward_ended, watch.groups_changed)
            for listeners in registered:
                listeners[:] = [each for each in listeners if getattr(each, "__self__", None) is not guard]
        self.detach(guard)
        self._report(guard, error)

    def _report(self, guard: Guard, error: Exception) -> None:
        place = traceback.extract_tb(error.__traceback__)[-1]
        self._submit(
            finding(
                "GG906",
                f"{guard.name} raised {type(error).__name__}: {error} at {place.filename}:{place.lineno} in "
                f"{place.name}. It is switched off for the rest of this run; training and the other guards go on.",
                guard=guard.name,
                cause_id=guard.name,
                evidence={"traceback": "".join(traceback.format_exception(error))},
            )
        )


def _tell_blind_spots(guard: Guard, found: list[str]) -> None:
    found.extend(f"{guard.name}: {spot}" for spot in guard.blind_spots())


def _overrides(guard: Guard, name: str) -> bool:
    return getattr(type(guard), name) is not getattr(Guard, name)
