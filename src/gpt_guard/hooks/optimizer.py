"""Notice `optimizer.step()`: before it changes anything, and after."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch.optim import Optimizer

from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.copies import Uncopiable, Uncopied

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


class _StepHook(Uncopied):
    """A hook that a copied or pickled optimizer does not take along."""

    __slots__ = ("_index", "_listener")

    def __init__(self, listener: StepListener, index: int) -> None:
        self._listener = listener
        self._index = index


class _Begins(_StepHook):
    __slots__ = ()

    def __call__(self, _optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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

    def __call__(self, _optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        self._listener.step_ended(self._index)


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
    return optimizer


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
    return inner


def _schedules(thing: Any) -> bool:
    """Whether this holds an optimizer only to set its lr; a wrapper that steps one keeps none of these."""
    return any(hasattr(thing, name) for name in ("get_last_lr", "base_lrs", "last_epoch", "step_update"))


class StepHooks:
    """Pre- and post-hooks on each optimizer, for as long as a Guardian is active."""

    def __init__(self, optimizers: tuple[Optimizer, ...], listener: StepListener) -> None:
        self._handles: list[Any] = []
        try:
            for index, optimizer in enumerate(optimizers):
                self._handles.append(Uncopiable(optimizer.register_step_pre_hook(_Begins(listener, index))))
                self._handles.append(Uncopiable(optimizer.register_step_post_hook(_Ended(listener, index))))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Take the hooks away; may run twice."""
        while self._handles:
            self._handles.pop().remove()


def _noticed(closure: Callable[[], Any], listener: StepListener, index: int) -> Callable[[], Any]:
    def noticed() -> Any:
        try:
            result = closure()
            listener.closure_ended(index)
        except BaseException:
            listener.closure_failed(index)
            raise
        return result

    return noticed
