"""The microscope: a forward, and a backward, watched operation by operation until the origin of a NaN is known."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gpt_guard.catalogue.operation_causes import hidden_first
from gpt_guard.records import OperationSeen
from gpt_guard.replaying.follow import Follower
from gpt_guard.replaying.memory import NonFiniteOrigin
from gpt_guard.replaying.operations import Op, documented, op_of


def make_ready() -> None:
    """Import what torch would import at the first operation of a mode: its whole compiler, to shield the mode from it.

    That takes 2 to 6 s where nothing else has done it (`zero_grad()` has), and is no part of any limit.
    """
    import_module("torch._dynamo")


class TimeUp(BaseException):
    """A trace has taken longer than its limit. Not an Exception, so that no handler in the traced code takes it."""


class Trace(TorchDispatchMode):
    """Runs what is inside of `with Trace(model):` as it would run without, and keeps who made which non-finite values.

    Every operation costs one more reading pass over its result, and an accelerator is read each time: for a step that
    has failed, not for training. Values, RNG state and gradients are those of an untraced run. What cannot be measured
    is left out and named in `skipped`; nothing is raised over it.

    - `limit_s`: seconds after which TimeUp is raised from inside of the next operation; None for no limit.
    - `given`: tensors that are to be named when they were bad from the start, by what they are to be called.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        model: nn.Module,
        *,
        limit_s: float | None = None,
        given: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self._limit_s = limit_s
        self._ends = float("inf")
        self._follower = Follower(model, given)
        self._random: set[str] = set()
        self._asked = False
        self.skipped: dict[str, str] = {}

    def __enter__(self) -> Trace:
        if self._limit_s is not None:
            self._ends = time.monotonic() + self._limit_s
        self._follower.modules.open()
        try:
            super().__enter__()  # type: ignore[no-untyped-call]  # torch gives it no types
        except BaseException:
            self._follower.modules.close()
            raise
        return self

    def __exit__(self, *raised: Any) -> None:
        self._follower.modules.close()
        super().__exit__(*raised)  # type: ignore[no-untyped-call]  # torch gives it no types

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._asked:
            return func(*args, **kwargs)
        if time.monotonic() > self._ends:
            raise TimeUp(f"the trace has taken more than {self._limit_s:g} s")
        op = op_of(func)
        # Not under no_grad: the operation itself has to see the grad mode as it is.
        before = self._measured(op, None, self._follower.before, op, args, kwargs)
        out = func(*args, **kwargs)
        if before is None:
            self._measured(op, None, self._follower.unmeasured, op, out, self.skipped[op.aten])
        else:
            self._measured(op, out, self._follower.after, before, out)
        self._random.update(documented(op, out))
        return out

    def _measured(self, op: Op, out: Any, measure: Callable[..., Any], *args: Any) -> Any:
        try:
            with torch.no_grad():
                return measure(*args)
        except Exception as error:  # what is traced may hold any kind of tensor; a trace must not break it
            self.skipped[op.aten] = f"{type(error).__name__}: {error}"
            if out is not None:
                self._measured(op, None, self._follower.unmeasured, op, out, self.skipped[op.aten])
            return None

    @property
    def nondeterministic(self) -> list[str]:
        """Names of the operations seen that torch documents as nondeterministic on the device they ran on."""
        return sorted(self._random)

    def origin(self, tensor: Tensor) -> OperationSeen | None:
        """What first made the non-finite values in this tensor, followed through the data; None if it is finite.

        A tensor that no traced operation has written is its own origin.
        """
        origin = self._ask(self._follower.origin, tensor)
        return origin.seen if origin is not None else None

    def first(self) -> OperationSeen | None:
        """The operation that was the first to make non-finite values of finite inputs; None if there was none.

        For when no tensor is at hand: what the model returned is followed back, then the last result of the forward,
        then the gradients. A mask made on purpose is none, nor are values that were masked away and not met again.
        """
        first = self._ask(self._follower.first)
        return _with_hidden(first) if first is not None else None

    def origin_of_gradient(self, parameter: Tensor) -> OperationSeen | None:
        """The same as `origin` for `parameter.grad`, once the traced backward is through; None if there is no grad."""
        if parameter.grad is None:
            return None
        origin = self._ask(self._follower.origin, parameter.grad)
        return _with_hidden(origin) if origin is not None else None

    def _ask(self, question: Callable[..., NonFiniteOrigin | None], *about: Tensor) -> NonFiniteOrigin | None:
        # It may be asked while it watches: its own reading is none of the traced code's.
        self._asked = True
        try:
            with torch.no_grad():
                return question(*about)
        except RuntimeError:
            # A kind of tensor that cannot be read has no origin that could be shown.
            return None
        finally:
            self._asked = False


def _with_hidden(origin: NonFiniteOrigin) -> OperationSeen:
    """The operation; where the forward has masked its values away and the backward met them again, that comes first."""
    if origin.hidden is None:
        return origin.seen
    causes = hidden_first(origin.seen.causes) if origin.seen.kind == "operation" else origin.seen.causes
    return origin.seen.model_copy(update={"hidden": origin.hidden, "causes": causes})
