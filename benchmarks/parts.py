"""What a guarded step is spent on: the time of each part that can be told apart from outside, then of each function.

The parts are what torch calls (hooks, the wrapped backward) and what the package's contracts name (the moments of a
guard, `judge`, a sink's `observe`), each timed by a wrapper, what it calls that is timed itself left out. What is added
and no part has seen (other wrapped functions of torch, caches that are colder) is printed as the rest. The functions
come from cProfile, which makes short functions look dearer than they are: compare them among each other only.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import pstats
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from benchmarks.workloads import Loop
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

import gpt_guard
from gpt_guard import Guard, Guardian, JsonlSink

_MOMENTS = ("before_backward", "after_backward", "before_step", "after_step", "judge")
_MODULE_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OPTIMIZER_TABLES = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_PACKAGE = str(Path(gpt_guard.__file__).parent)
_ENGINE = "torch's backward"
_LINES = 30


class Clock:
    """Notes seconds and calls by part and step; the wrapper's own time is measured once and taken off."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.calls: Counter[str] = Counter()
        self._now: defaultdict[str, float] = defaultdict(float)
        self._inner = [0.0]
        self._inside = self._outside = 0.0
        empty, wholes = self.timed("empty", lambda: None), []
        for _ in range(2000):
            start = time.perf_counter()
            empty()
            wholes.append(time.perf_counter() - start)
            self.step_ends()
        self._inside = self.usual("empty")
        self._outside = statistics.median(wholes) - self._inside
        self.reset()

    def reset(self) -> None:
        """Forget all that was noted."""
        self.steps.clear()
        self.calls.clear()
        self._now.clear()

    def step_ends(self) -> None:
        """What was noted since the last time is that of one step."""
        self.steps.append(dict(self._now))
        self._now.clear()

    def usual(self, part: str) -> float:
        """Seconds in the median step."""
        return statistics.median(step.get(part, 0.0) for step in self.steps)

    def mean(self, part: str) -> float:
        """Seconds a step, with what comes seldom, and with whatever disturbed a step."""
        return statistics.mean(step.get(part, 0.0) for step in self.steps)

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, its time noted under this part."""

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.perf_counter() - start
                self._now[part] += spent - self._inner.pop() - self._inside
                self.calls[part] += 1
                self._inner[-1] += spent + self._outside

        return wrapper


def time_guards(clock: Clock, guards: list[Guard]) -> None:
    """Time the methods that Guardian calls in a step; before it looks at them."""
    for guard in guards:
        for name in _MOMENTS:
            if getattr(type(guard), name) is not getattr(Guard, name):
                setattr(guard, name, clock.timed(f"{guard.name}.{name}", _all_at_once(getattr(guard, name), name)))


def _all_at_once(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`judge` may be a generator, whose work would be done outside of its call."""
    if name != "judge":
        return method
    return functools.wraps(method)(lambda *args: list(method(*args)))


@contextmanager
def timed_ends(clock: Clock, loop: Loop) -> Iterator[None]:
    """Time what torch calls, and the run log, while a Guardian is active."""
    with ExitStack() as undo:
        for path, module in loop.model.named_modules():
            owner = "modules" if path else "the root"
            for name in _MODULE_TABLES:
                undo.enter_context(_table(clock, f"{name[1:]} of {owner}", vars(module)[name]))
        for name, table in vars(torch_module).items():
            if name.startswith("_global_") and name.endswith("_hooks"):
                undo.enter_context(_table(clock, name[1:], table))
        for parameter in loop.model.parameters():
            for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                undo.enter_context(_table(clock, f"{name[1:]} of parameters", getattr(parameter, name, None) or {}))
        for name in _OPTIMIZER_TABLES:
            undo.enter_context(_table(clock, name[1:], vars(loop.optimizer)[name]))
        for name, table in vars(torch_optimizer).items():
            if name.startswith("_global_optimizer_") and name.endswith("_hooks"):
                undo.enter_context(_table(clock, name[1:], table))
        undo.enter_context(_attribute(JsonlSink, "observe", clock.timed("JsonlSink.observe", JsonlSink.observe)))
        whole = torch.autograd.backward
        undo.enter_context(_attribute(torch.autograd, "backward", clock.timed("around backward", whole)))
        yield


@contextmanager
def _table(clock: Clock, part: str, table: MutableMapping[Any, Any]) -> Iterator[None]:
    originals = dict(table)
    for key, hook in originals.items():
        if callable(hook):
            table[key] = clock.timed(part, hook)
    try:
        yield
    finally:
        for key in originals.keys() & table.keys():
            table[key] = originals[key]


@contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def print_parts(
    name: str, loop: Loop, guards: Callable[[], list[Guard]], arguments: argparse.Namespace, *, run_log: bool
) -> None:
    """Measure one loop: bare and guarded in turn, then with its parts timed, then under cProfile."""
    steps = arguments.steps or 50
    loop.times(arguments.warm_up)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = folder if run_log else None
        added, bare = [], []
        for _ in range(arguments.pairs or 5):
            bare.append(statistics.median(loop.times(steps + 2)[2:]))
            with Guardian(loop.model, loop.optimizer, guards=guards(), sinks=[], run_dir=run_dir):
                loop.times(arguments.warm_up)
                added.append(statistics.median(loop.times(steps)) - bare[-1])
        clock, used = Clock(), guards()
        time_guards(clock, used)
        # torch's own backward lies inside of ours, and is not what watching costs.
        engine = clock.timed(_ENGINE, torch.autograd.backward)
        watching = Guardian(loop.model, loop.optimizer, guards=used, sinks=[], run_dir=run_dir)
        with _attribute(torch.autograd, "backward", engine), watching:
            loop.times(arguments.warm_up)
            with timed_ends(clock, loop):
                clock.reset()
                for _ in range(steps):
                    loop.step()
                    clock.step_ends()
        with Guardian(loop.model, loop.optimizer, guards=guards(), sinks=[], run_dir=run_dir):
            loop.times(arguments.warm_up)
            profile = cProfile.Profile()
            profile.runcall(loop.times, steps)
    print(f"\n{name}: a bare step takes {statistics.median(bare) * 1e6:.0f} us; watching adds, in microseconds a step")
    _print_clock(clock, statistics.median(added))
    _print_functions(profile, steps)


def _print_clock(clock: Clock, added: float) -> None:
    print(f"{'part':56}{'usual us':>10}{'mean us':>10}{'calls a step':>14}")
    parts = [part for part in clock.calls if part != _ENGINE]
    for part in sorted(parts, key=clock.usual, reverse=True):
        calls = clock.calls[part] / len(clock.steps)
        print(f"{part:56}{clock.usual(part) * 1e6:>10.1f}{clock.mean(part) * 1e6:>10.1f}{calls:>14.1f}")
    known, mean = sum(map(clock.usual, parts)), sum(map(clock.mean, parts))
    print(f"{'all parts':56}{known * 1e6:>10.1f}{mean * 1e6:>10.1f}")
    print(f"{'the rest, to what a guarded step takes longer':56}{(added - known) * 1e6:>10.1f}")
    print(f"{'guarded less bare, usual step':56}{added * 1e6:>10.1f}")


def _print_functions(profile: cProfile.Profile, steps: int) -> None:
    """Functions of the package by their own time and that of the C functions which they call themselves."""
    own: defaultdict[Any, float] = defaultdict(float)
    called: dict[Any, int] = {}
    inside: defaultdict[Any, float] = defaultdict(float)
    stats: dict[Any, Any] = vars(pstats.Stats(profile))["stats"]
    for function, (_, calls, seconds, _, callers) in stats.items():
        if function[0].startswith(_PACKAGE):
            own[function], called[function] = seconds, calls
        elif function[0] == "~":
            for caller, (_, _, within, _) in callers.items():
                if caller[0].startswith(_PACKAGE):
                    inside[caller] += within
    print(f"\n{'function, by cProfile':56}{'us a step':>10}{'calls a step':>14}{'of it in C':>12}")
    whole = {function: own[function] + inside[function] for function in own}
    for function, seconds in sorted(whole.items(), key=lambda item: -item[1])[:_LINES]:
        file, line, label = function
        place = f"{Path(file).relative_to(_PACKAGE)}:{line} {label}"
        microseconds, inner = seconds / steps * 1e6, inside[function] / steps * 1e6
        print(f"{place:56}{microseconds:>10.1f}{called[function] / steps:>14.1f}{inner:>12.1f}")
    seconds, calls = sum(whole.values()) / steps, sum(called.values()) / steps
    print(f"{'all functions of the package':56}{seconds * 1e6:>10.1f}{calls:>14.1f}")
