"""Hooks that test a module's output where it is made: the hot path of watching on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch._C import _is_tracing

from gpt_guard.hooks.chains import carries
from gpt_guard.hooks.frames import user_site
from gpt_guard.hooks.hook import EntryHook, ReturnHook, Tap, compiler
from gpt_guard.hooks.sums import measure, quick_sum, sum_without_graph, tested
from gpt_guard.hooks.tensors import walk
from gpt_guard.hooks.waiting import Waiting, accuse, release, settle

_FLOAT32 = torch.float32
_STRIDED = torch.strided


class InPlaceInput(EntryHook):
    """Test what an in-place layer is given: afterwards its input is its output, and tells nothing."""

    __slots__ = ()

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Test the first argument."""
        tap = self.tap
        if tap.waiting is not None:
            settle(tap)
        tensor = args[0] if args else None
        if not self.listens() or not isinstance(tensor, Tensor) or tested(tap, tensor):
            return
        number = measure(tap, self.index, tensor)
        if number - number != 0.0:
            tap.suspect(self.index, "[0]", tensor, entering=True)


class OutputTest(ReturnHook):
    """Test an output with one sum; what a child has just returned was tested already.

    In light steps an output that `waits` is left to the next module, which is called with it: see `chains`. Then the
    hook holds it, and what its own module was given, until the next output that does not wait is good.
    """

    __slots__ = ("before", "carries", "given", "inside", "output", "version", "waits")

    def __init__(self, tap: Tap, index: int, module: nn.Module) -> None:
        super().__init__(tap, index, module)
        self.carries = carries(module)
        self.waits = self.inside = False
        self.version = 0
        self.before: Waiting | None = None
        self.output: Tensor | None = None
        self.given: Any = None

    def leave(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, output: Any) -> None:
        """Test each tensor of it."""
        # `listens` written out, as `quick_sum` below: calls less on nearly every module.
        tap = self.tap
        if tap.paused or compiler._is_compiling_flag or _is_tracing():
            return
        self._returned(self.index)
        if tap.learning:
            version, _ = tap.entered.get(self.index, (None, 0))
            alone = len(args) == 1 and kwargs is not None and not kwargs
            tap.succession.note(self, self._module, args, output, version, user_site(), alone=alone)
        if tap.waiting is not None:
            settle(tap)
        if type(output) is Tensor:
            self._test(tap, output)
        else:
            self._test_all(tap, output)

    def lightly(self) -> Callable[..., None] | None:
        """`leave_light`."""
        succession = self.tap.succession
        self.waits = self.index in succession.known
        self.inside = self.index in succession.inside
        self.carries = carries(self._module)
        return self.leave_light

    def leave_light(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, output: Any) -> None:
        """The same in a light step, where nobody traces the model; between two such steps somebody may."""
        tap = self.tap
        if tap.paused or not (tap.sparing or self.listens()):
            return
        self._returned(self.index)
        before = tap.waiting
        if type(output) is not Tensor:
            if before is not None:
                settle(tap)
            self._test_all(tap, output)
            return
        try:
            if before is not None:
                held = before.output
                unwritten = held._version == before.version
                if output is held and unwritten:
                    return
                own = self._module.__dict__
                follows = self.carries and unwritten and args and args[0] is held
                if not follows or own["_forward_hooks"] or "forward" in own:
                    settle(tap)
                    before = None
            elif output is tap.last() and output._version == tap.last_version:
                return
            # A module that is called again holds its first output already.
            if self.waits and tap.sparing and self.output is None and len(args) == 1 and not kwargs:
                given, version = args[0], output._version
                if before or self.inside or (given is tap.last() and given._version == tap.last_version):
                    self.before, self.output, self.given, self.version = before, output, given, version
                    tap.waiting = self
                    return
            if output.dtype is _FLOAT32 and output.layout is _STRIDED:
                number = sum_without_graph(output)
                tap.last, tap.last_version = ref(output), output._version
            else:
                number = quick_sum(tap, self.index, output)
        except RuntimeError:
            # An inference tensor has no version; a transform such as vmap has no values.
            if tap.waiting is not None:
                settle(tap)
            number = measure(tap, self.index, output)
        # x - x is 0 for a finite number and NaN otherwise: cheaper than a call of math.isfinite.
        if number - number != 0.0:
            self._accuse(tap, output)
        if before is not None:
            release(tap)

    def _test(self, tap: Tap, output: Tensor) -> None:
        if not tested(tap, output):
            number = quick_sum(tap, self.index, output)
            if number - number != 0.0:
                self._accuse(tap, output)

    def _accuse(self, tap: Tap, output: Tensor) -> None:
        accuse(tap)
        tap.suspect(self.index, "", output)

    def _test_all(self, tap: Tap, output: Any) -> None:
        # Logits and loss, most often: without the general walk.
        if type(output) is tuple:
            for place, each in enumerate(output):
                if each is not None:
                    self._test_parts(tap, each, f"[{place}]")
        else:
            self._test_parts(tap, output, "")

    def _test_parts(self, tap: Tap, value: Any, position: str) -> None:
        for at, tensor in ((position, value),) if type(value) is Tensor else walk(value, position):
            if not tested(tap, tensor):
                number = quick_sum(tap, self.index, tensor)
                if number - number != 0.0:
                    tap.suspect(self.index, at, tensor)


class ReturnNote(ReturnHook):
    """Remember that an ignored module returned, and what: whoever receives it must not be blamed on its caller."""

    __slots__ = ()

    def leave(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, output: Any) -> None:
        """Remember it."""
        if self.listens():
            if self.tap.waiting is not None:
                settle(self.tap)
            self._returned(self.index)
            self.tap.untested[self.index] = [ref(tensor) for _, tensor in walk(output)]
