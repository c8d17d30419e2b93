"""Notice `optimizer.step()`: before it changes anything, and after."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch.optim import Optimizer

from gpt_guard.errors import GuardUsageError


class StepListener(Protocol):
    """Who is told about the steps of its optimizers."""

    def step_begins(self, index: int, *, closure: bool) -> None:
        """Before the optimizer changes anything; raising leaves weights and optimizer state untouched."""

    def step_ended(self, index: int) -> None:
        """After the optimizer has changed the parameters."""


class _StepHook:
    """A hook that a copied or pickled optimizer does not take along."""

    def __init__(self, act: Callable[[Any, Any], None]) -> None:
        self._act = act

    def __call__(self, _optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._act(args, kwargs)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return (_no_hook, ())


def _nothing(*_: Any) -> None:
    return None


def _no_hook() -> Callable[..., None]:
    return _nothing


def unwrap(optimizers: Optimizer | Iterable[Optimizer] | None) -> tuple[Optimizer, ...]:
    """The plain torch optimizers behind one, several or none; wrappers such as accelerate's hold theirs in `.optimizer`.

    Raises GuardUsageError for anything that has no step to watch.
    """
    if optimizers is None:
        return ()
    if isinstance(optimizers, (Optimizer, str)) or not isinstance(optimizers, Iterable):
        optimizers = (optimizers,)  # type: ignore[assignment]  # a wrapper or a wrong type: _plain tells
    return tuple(_plain(optimizer) for optimizer in optimizers)


def _plain(optimizer: Any) -> Optimizer:
    inner = optimizer
    while isinstance(getattr(inner, "optimizer", None), Optimizer):
        inner = inner.optimizer
    if not isinstance(inner, Optimizer):
        raise GuardUsageError(
            f"optimizer is a {type(optimizer).__name__}, which is not a torch.optim.Optimizer and holds none in "
            f"`.optimizer`. Give the optimizer whose step() changes this model's parameters, a list of them, or None "
            f"for evaluation only."
        )
    return inner


class StepHooks:
    """Pre- and post-hooks on each optimizer, for as long as a Guardian is active."""

    def __init__(self, optimizers: tuple[Optimizer, ...], listener: StepListener) -> None:
        self._handles: list[Any] = []
        for index, optimizer in enumerate(optimizers):
            begins, ended = _begins(listener, index), _ended(listener, index)
            self._handles.append(optimizer.register_step_pre_hook(_StepHook(begins)))
            self._handles.append(optimizer.register_step_post_hook(_StepHook(ended)))

    def close(self) -> None:
        """Take the hooks away; may run twice."""
        while self._handles:
            self._handles.pop().remove()


def _begins(listener: StepListener, index: int) -> Callable[[Any, Any], None]:
    def begins(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The optimizer itself is args[0] where step() was wrapped as a function.
        given = [value for value in (*args, kwargs.get("closure")) if not isinstance(value, Optimizer)]
        listener.step_begins(index, closure=any(callable(value) for value in given))

    return begins


def _ended(listener: StepListener, index: int) -> Callable[[Any, Any], None]:
    def ended(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        listener.step_ended(index)

    return ended
