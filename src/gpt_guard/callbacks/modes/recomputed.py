"""Recomputed: activation checkpointing that runs a part of the forward again with other random numbers."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from gpt_guard.callbacks.base import Guard
from gpt_guard.catalogue import finding
from gpt_guard.hooks.backward import in_backward
from gpt_guard.hooks.copies import HookSet, Uncopied
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Observation, Severity

Generators = dict[str, Any]
"""Where each shared generator stands, by its name: `torch`, `numpy`, `random` and each accelerator that is in use."""
_MOST_CALLS = 20_000


class Recomputed(Guard):
    """Compares, in the inspected steps, the random generators at a module's call in backward with those in the forward.

    What is computed again inside `backward()` has to be what the forward computed: a dropout that draws another mask
    gives gradients of another network (GG509). Told only of modules that drew something
    in the forward, and whose recomputation began where no call of theirs had. Reads no device: the states lie on the
    host. A generator of the user's own is not seen.
    """

    inspects: ClassVar[bool] = True

    def __init__(self) -> None:
        self._reported = False
        self._hooks = HookSet()
        self._clear()

    def _clear(self) -> None:
        self._open: list[tuple[int, Generators]] = []
        self._began: dict[int, list[Generators]] = {}
        self._drew: dict[int, set[str]] = {}
        self._differs: dict[int, set[str]] = {}

    def attach(self, watch: Watch) -> None:
        super().attach(watch)
        self._clear()
        watch.inspection.on_begin(self._begin)
        watch.inspection.on_end(self._hooks.close)

    def detach(self) -> None:
        self._hooks.close()
        if self._watch is not None and self._forward_begins in self._watch.forward_begins:
            self._watch.forward_begins.remove(self._forward_begins)
        self._clear()
        super().detach()

    def _begin(self) -> None:
        if self._reported:
            return
        self._hooks.close()
        if self._forward_begins not in self.watch.forward_begins:
            self.watch.forward_begins.append(self._forward_begins)
        for index, module in enumerate(self.watch.tap.modules):
            self._hooks.before_forward(module, _Enters(self, index))
            self._hooks.after_forward(module, _Returns(self, index))

    def _forward_begins(self) -> None:
        # What an exception has left, in a forward that did not end.
        self._open.clear()

    def entered(self, index: int) -> None:
        """A module is called, in the forward or again in a backward."""
        if self.watch.evaluation or self.watch.inspection.functions.muted:
            return
        now = _generators()
        if in_backward():
            self._compare(index, now)
        elif len(self._began) < _MOST_CALLS:
            self._open.append((index, now))

    def returned(self, index: int) -> None:
        """A module has returned."""
        if in_backward() or not self._open or self._open[-1][0] != index:
            return
        _, before = self._open.pop()
        if drew := set(_other(before, _generators())):
            self._drew[index] = self._drew.get(index, set()) | drew
            self._began.setdefault(index, []).append(before)

    def _compare(self, index: int, now: Generators) -> None:
        drew = self._drew.get(index)
        if not drew:
            return
        # A layer that is shared is called several times; of the calls before, one has to have begun here.
        apart = [drew & set(_other(before, now)) for before in self._began[index]]
        if all(apart):
            self._differs[index] = apart[0]

    def judge(self, seen: Observation) -> Iterable[Finding]:
        """Report after the first step that shows it."""
        differs, drew = self._differs, self._drew
        self._clear()
        if not differs or self._reported:
            return
        self._reported = True
        names = self.watch.tap.names
        # The outermost of them: what they hold differs with them.
        top = [index for index in sorted(differs) if not any(_inside(names[index], names[each]) for each in differs)]
        first = top[0]
        kinds = ", ".join(sorted(differs[first]))
        listed = ", ".join(f"`{names[index] or 'the model itself'}`" for index in top[:5])
        more = f" and {len(top) - 5} more" if len(top) > 5 else ""
        outside = differs[first] <= {"random", "numpy"}
        yield finding(
            "GG509",
            f"{listed}{more}: computed again in backward() with other random numbers than in the forward. The "
            f"generator ({kinds}) did not stand where it stood when the forward was computed.",
            shown=["random" if outside else "not_preserved"],
            # What is drawn there may decide about a line in a log.
            severity=Severity.WARNING if outside else Severity.ERROR,
            step=seen.step,
            moment=Moment.AFTER_BACKWARD,
            module=names[first],
            module_class=type(self.watch.tap.modules[first]).__name__,
            evidence={"modules": [names[index] for index in top[:50]], "drew": len(drew), "generators": kinds},
            cause_id="recomputed",
        )

    def state_dict(self) -> dict[str, Any]:
        return {"said": self._reported}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._reported = bool(state["said"])


class _Enters(Uncopied):
    __slots__ = ("_guard", "_index")

    def __init__(self, guard: Recomputed, index: int) -> None:
        self._guard, self._index = guard, index

    def __call__(self, module: nn.Module, args: Any) -> None:
        # A compiler would break its graph here.
        if not is_compiling():
            self._guard.entered(self._index)


class _Returns(Uncopied):
    __slots__ = ("_guard", "_index")

    def __init__(self, guard: Recomputed, index: int) -> None:
        self._guard, self._index = guard, index

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not is_compiling():
            self._guard.returned(self._index)


def _inside(path: str, other: str) -> bool:
    return path != other and (not other or path.startswith(f"{other}."))


def _generators() -> Generators:
    states: Generators = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    if threading.active_count() > 1:
        # A thread that loads data may draw from these while a module runs.
        return states
    states["random"] = random.getstate()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        _, keys, place, *_ = numpy.random.get_state()
        states["numpy"] = (keys.tobytes(), place)
    return states


def _other(before: Generators, now: Generators) -> Iterator[str]:
    """Names of the generators that do not stand where they did."""
    # The states lie on the host: no device is read, and no mode of the user's needs to see it.
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        for name, state in before.items():
            other = now.get(name)
            if other is None:
                continue
            if not (torch.equal(state, other) if isinstance(state, Tensor) else state == other):
                yield name
