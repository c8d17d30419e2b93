"""Notice `optimizer.step()`: before it changes anything, and after."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from importlib import import_module
from types import CodeType, FrameType
from typing import Any, Protocol

from torch.compiler import is_compiling, is_dynamo_compiling
from torch.optim import Optimizer

from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.compiled import answered_when_traced, around, away, in_one_graph, left_alone, looking
from gpt_guard.hooks.copies import HookSet, Uncopied

_MOST_WRAPPERS = 8


class StepListener(Protocol):
    """Who is told about the steps of its optimizers.

    Begin and end may be nested: an optimizer that calls the `step()` of its base class runs the hooks of both.
    """

    def step_begins(self, index: int, *, closure: bool) -> None:
        """Before the optimizer changes anything; raising leaves weights and optimizer state untouched."""

    def closure_ended(self, index: int) -> None:
        """The closure given to `step()` has returned: the gradients to step on are in place. May come several times."""

    def closure_failed(self, index: int) -> None:
        """The closure raised, or a listener did: the step will not end."""

    def step_ended(self, index: int) -> None:
        """After the optimizer has changed the parameters."""

    def step_compiled(self, index: int) -> None:
        """A compiler has made a graph of a step: nothing is told of it whenever that runs."""


class _StepHook(Uncopied):
    """A hook that a copied or pickled optimizer does not take along.

    A compiler that traces `step()` makes one graph of it, or breaks it somewhere. Where it breaks anyway, it does so at
    the hook too, which is then told of each step; where it does not, a break of ours might change what is computed.
    """

    __slots__ = ("_breaks", "_index", "_listener", "_pass_by")

    def __init__(self, listener: StepListener, index: int, optimizer: Optimizer) -> None:
        self._listener = listener
        self._index = index
        self._breaks = _breaks(optimizer)

        def pass_by() -> None:
            listener.step_compiled(index)

        self._pass_by = answered_when_traced(pass_by)


class _Begins(_StepHook):
    __slots__ = ()

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_dynamo_compiling():
            broken = self._breaks and not in_one_graph()
            return away(self, optimizer, args, kwargs) if broken else self._pass_by()
        if looking() is not None:
            return away(self, optimizer, args, kwargs)
        # args[0] is the optimizer itself.
        closure = kwargs.get("closure") if "closure" in kwargs else args[1] if len(args) > 1 else None
        if not callable(closure):
            self._listener.step_begins(self._index, closure=False)
            return None
        self._listener.step_begins(self._index, closure=True)
        noticed = _noticed(closure, self._listener, self._index)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": noticed}
        return (args[0], noticed, *args[2:]), kwargs


class _Ended(_StepHook):
    __slots__ = ()

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_dynamo_compiling():
            if self._breaks and not in_one_graph():
                away(self, optimizer, args, kwargs)
        elif looking() is not None:
            away(self, optimizer, args, kwargs)
        else:
            self._listener.step_ended(self._index)


# Dynamo is to make nothing of what only calls what is ours.
for _call in (_Begins.__call__, _Ended.__call__):
    left_alone(_call)


def _breaks(optimizer: Optimizer) -> bool:
    """Whether the step of this optimizer breaks the graph itself, as those of nearly all of torch's own do."""
    step: Any = type(optimizer).step
    while step is not None:
        if "graph_break" in getattr(_code(step), "co_names", ()):
            return True
        step = getattr(step, "__wrapped__", None)
    return False


def is_part_of_another(optimizer: Optimizer) -> bool:
    """Whether the step that is told of right now is inside of another one of the same optimizer, still under way."""
    frame: FrameType | None = sys._getframe(1)
    found = 0
    while frame is not None:
        found += frame.f_code is _STEP and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    # None at all: somebody else calls the hooks, and knows why.
    return found != 1


def _code(function: Any) -> CodeType | None:
    return getattr(function, "__code__", None)


# What each step runs in: `Optimizer` wraps it, so that hooks are called.
_STEP = _code(Optimizer.profile_hook_step(_code))


def unwrap(optimizers: Optimizer | Iterable[Optimizer] | None) -> tuple[Optimizer, ...]:
    """The plain torch optimizers behind one, several or none; a wrapper (accelerate's) holds its own in `.optimizer`.

    Raises GuardUsageError for anything that has no step to watch, and for one that is given twice.
    """
    if optimizers is None:
        return ()
    if isinstance(optimizers, (Optimizer, str)) or not isinstance(optimizers, Iterable):
        optimizers = (optimizers,)
    plain = tuple(_plain(optimizer) for optimizer in optimizers)
    if len({id(optimizer) for optimizer in plain}) < len(plain):
        raise GuardUsageError("the same optimizer is given twice")
    return plain


def innermost(optimizer: Any) -> Any:
    """What a wrapper wraps, or the object itself; asks for no particular type."""
    inner = optimizer
    for _ in range(_MOST_WRAPPERS):
        inner = getattr(inner, "optimizer", None)
        if inner is None:
            break
        if isinstance(inner, Optimizer):
            optimizer = inner
    return optimizer if _takes_hooks(optimizer) else _sharing_groups(optimizer) or optimizer


def _takes_hooks(optimizer: Any) -> bool:
    """Whether torch can put hooks on a step: some wrappers have tables that are plain dictionaries, or none."""
    return not isinstance(optimizer, Optimizer) or all(
        isinstance(getattr(optimizer, name, None), OrderedDict)
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    )


def _sharing_groups(optimizer: Optimizer) -> Optimizer | None:
    """The optimizer that a wrapper holds, by whatever name, and whose groups it gives out as its own."""
    held = (each for each in vars(optimizer).values() if isinstance(each, Optimizer) and _takes_hooks(each))
    return next((each for each in held if each.param_groups is optimizer.param_groups), None)


def _plain(optimizer: Any) -> Optimizer:
    inner = innermost(optimizer)
    if not isinstance(optimizer, Optimizer) and _schedules(optimizer):
        raise GuardUsageError(
            f"optimizer is a {type(optimizer).__name__}, which is a learning-rate scheduler. Give the optimizer it "
            f"drives, and the scheduler by its own name: Guardian(model, optimizer, scheduler=...)."
        )
    if not isinstance(inner, Optimizer):
        raise GuardUsageError(
            f"optimizer is a {type(optimizer).__name__}, which is not a torch.optim.Optimizer and holds none in "
            f"`.optimizer`. Give the optimizer whose step() changes this model's parameters, a list of them, or None "
            f"for evaluation only."
        )
    if not _takes_hooks(inner):
        raise GuardUsageError(
            f"optimizer is a {type(inner).__name__} that torch can put no hooks on (its tables for them are not "
            f"OrderedDicts), and it holds no other optimizer with the same groups. Give the one whose step() it calls."
        )
    return inner


def _schedules(thing: Any) -> bool:
    """Whether this holds an optimizer only to set its lr; a wrapper that steps one keeps none of these."""
    return any(hasattr(thing, name) for name in ("get_last_lr", "base_lrs", "last_epoch", "step_update"))


class StepHooks:
    """Pre- and post-hooks on each optimizer, for as long as a Guardian is active."""

    def __init__(self, optimizers: tuple[Optimizer, ...]) -> None:
        self._optimizers = optimizers
        self._hooks = HookSet()

    def open(self, listener: StepListener) -> None:
        """Begin to tell a listener."""
        for index, optimizer in enumerate(self._optimizers):
            self._hooks.before_step(optimizer, _Begins(listener, index, optimizer))
            self._hooks.after_step(optimizer, _Ended(listener, index, optimizer))

    def close(self) -> None:
        """Take the hooks away; may run twice."""
        self._hooks.close()


class StepsOfAny:
    """Tells of each step of any optimizer of the process, before it changes anything.

    torch goes through its hooks for all optimizers first, and then through an optimizer's own: what is put on it in
    between is called in the same step. All listeners share one hook, so that one may leave while it is called.
    """

    def __init__(self, tell: Callable[[Optimizer], None]) -> None:
        self.tell = tell

    def open(self) -> None:
        """Begin to tell; without a word where this torch has no table for such hooks."""
        _LISTENING.append(self)
        table = getattr(import_module("torch.optim.optimizer"), "_global_optimizer_pre_hooks", None)
        if isinstance(table, OrderedDict) and not any(isinstance(each, _AnyBegins) for each in table.values()):
            _ANY_STEP.before_any_step(table, _AnyBegins())

    def close(self) -> None:
        """Stop telling; may run twice."""
        if self in _LISTENING:
            _LISTENING.remove(self)
        if not _LISTENING:
            _ANY_STEP.close()


_LISTENING: list[StepsOfAny] = []
_ANY_STEP = HookSet()


class _AnyBegins(Uncopied):
    __slots__ = ()

    def __call__(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        # Of no use to a compiler, which would break its graph here or compile all that follows.
        if not is_compiling():
            for listener in tuple(_LISTENING):
                listener.tell(optimizer)


def _evaluated(closure: Callable[[], Any], listener: StepListener, index: int) -> Any:
    try:
        result = closure()
        listener.closure_ended(index)
    except BaseException:
        listener.closure_failed(index)
        raise
    return result


def _noticed(closure: Callable[[], Any], listener: StepListener, index: int) -> Callable[[], Any]:
    def noticed() -> Any:
        if is_dynamo_compiling() or looking() is not None:
            return around(_evaluated, closure, listener, index)
        return _evaluated(closure, listener, index)

    return noticed
