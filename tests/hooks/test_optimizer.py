"""Steps are told once, before and after; closures when they return; wrappers are seen through."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.optimizer import StepHooks, innermost, unwrap


class Listener:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fail_at = ""

    def _note(self, what: str) -> None:
        self.calls.append(what)
        if what.split()[0] == self.fail_at:
            raise ArithmeticError(what)

    def step_begins(self, index: int, *, closure: bool) -> None:
        self._note(f"begins {index}{' with closure' if closure else ''}")

    def closure_ended(self, index: int) -> None:
        self._note(f"closure {index}")

    def closure_failed(self, index: int) -> None:
        self._note(f"failed {index}")

    def step_ended(self, index: int) -> None:
        self._note(f"ended {index}")

    def step_compiled(self, index: int) -> None:
        self._note(f"compiled {index}")


class Wrapped:
    """As accelerate wraps an optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


def sgd() -> SGD:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return SGD([parameter], lr=1.0)


def hooked(optimizers: tuple[Optimizer, ...], listener: Listener) -> StepHooks:
    hooks = StepHooks(optimizers)
    hooks.open(listener)
    return hooks


def test_several_optimizers_by_index() -> None:
    optimizers, listener = (sgd(), sgd()), Listener()
    hooks = hooked(optimizers, listener)
    optimizers[1].step()
    optimizers[0].step(None)
    hooks.close()
    hooks.close()
    optimizers[0].step()
    assert listener.calls == ["begins 1", "ended 1", "begins 0", "ended 0"]
    for optimizer in optimizers:
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("keyword", [True, False])
def test_a_closure_is_called_as_it_would_be(keyword: bool) -> None:
    optimizer, listener = sgd(), Listener()
    hooks = hooked((optimizer,), listener)

    def closure() -> Tensor:
        return torch.tensor(7.0)

    result = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
    hooks.close()
    assert result == 7.0
    assert listener.calls == ["begins 0 with closure", "closure 0", "ended 0"]


def test_a_closure_that_raises() -> None:
    optimizer, listener = sgd(), Listener()
    hooks = hooked((optimizer,), listener)

    def closure() -> Tensor:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        optimizer.step(closure)
    hooks.close()
    assert listener.calls == ["begins 0 with closure", "failed 0"]


def test_raising_before_the_step_leaves_weights_and_state_alone() -> None:
    optimizer, listener = sgd(), Listener()
    optimizer.param_groups[0]["momentum"] = 0.9
    hooks = hooked((optimizer,), listener)
    listener.fail_at = "begins"
    with pytest.raises(ArithmeticError):
        optimizer.step()
    hooks.close()
    assert optimizer.param_groups[0]["params"][0].tolist() == [1.0, 1.0]
    assert not optimizer.state


def test_copies_and_pickles_carry_no_live_hook() -> None:
    optimizer, listener = sgd(), Listener()
    hooks = hooked((optimizer,), listener)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        other.step()
    hook = next(iter(optimizer._optimizer_step_pre_hooks.values()))
    dumped = pickle.dumps(hook)
    assert b"gpt_guard" not in dumped
    assert pickle.loads(dumped)(optimizer, (optimizer,), {}) is None
    hooks.close()
    assert not listener.calls


def test_failing_half_way_leaves_nothing() -> None:
    class Broken(Optimizer):
        def __init__(self) -> None:
            """Leaves out what Optimizer sets up."""

    good = sgd()
    hooks = StepHooks((good, Broken()))
    with pytest.raises(AttributeError):
        hooks.open(Listener())
    hooks.close()
    assert not good._optimizer_step_pre_hooks


def test_wrappers_lists_and_none() -> None:
    plain = sgd()
    assert unwrap(None) == ()
    assert unwrap(plain) == (plain,)
    wrapped: Any = Wrapped(Wrapped(plain))
    assert unwrap(wrapped) == (plain,)
    assert unwrap(each for each in [plain]) == (plain,)
    assert innermost(Wrapped(plain)) is plain
    assert innermost("something") == "something"


@pytest.mark.parametrize("given", ["adam", {"a": 1}, 3, [object()], Wrapped(object())])
def test_what_has_no_step(given: Any) -> None:
    with pytest.raises(GuardUsageError, match=r"not a torch\.optim\.Optimizer"):
        unwrap(given)
