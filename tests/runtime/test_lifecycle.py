"""Entering and leaving: everything is as it was, on every way out."""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from gpt_guard.callbacks.base import Guard
from gpt_guard.catalogue import finding
from gpt_guard.errors import GuardUsageError, NonFiniteError
from gpt_guard.guardian import Guardian
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Observation

from .small_net import Net, setup, train

Ref = weakref.ref[Any]


def traces(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that a Guardian attaches to, by identity."""
    found: dict[str, Any] = {
        "backward": torch.autograd.backward,
        "train": nn.Module.train,
        "scale": torch.amp.GradScaler.scale,
        "step": torch.amp.GradScaler.step,
        "optimizer": (dict(optimizer._optimizer_step_pre_hooks), dict(optimizer._optimizer_step_post_hooks)),
        "handlers": list(logging.getLogger("gpt_guard").handlers),
        "global": {
            name: dict(value) for name, value in vars(torch_module).items() if name.endswith("_hooks") and value
        },
        "modes": [module.training for module in model.modules()],
        "trace": sys.gettrace(),
    }
    for path, module in model.named_modules():
        found[f"hooks of {path}"] = {
            name: dict(value) for name, value in vars(module).items() if "hooks" in name and value is not None
        }
        found[f"names of {path}"] = sorted(vars(module))
    for name, parameter in model.named_parameters():
        found[f"tensor hooks of {name}"] = (
            parameter._backward_hooks,
            getattr(parameter, "_post_accumulate_grad_hooks", None),
        )
    return found


class Halting(Guard):
    """Halts wherever it is told to."""

    def __init__(self, at: str) -> None:
        self.at = at

    def _found(self) -> Finding:
        return finding("GG101", f"Halted {self.at}.")

    def attach(self, watch: Watch) -> None:
        super().attach(watch)
        if self.at == "attach":
            watch.submit(self._found())

    def after_backward(self) -> None:
        if self.at == "after backward":
            self.watch.submit(self._found())

    def after_step(self, optimizer: Any) -> None:
        if self.at == "after step":
            self.watch.submit(self._found())

    def judge(self, seen: Observation) -> Iterable[Finding]:
        if self.at == "judge":
            yield self._found()

    def finish(self) -> Iterable[Finding]:
        if self.at == "finish":
            yield self._found()


def fails(act: Callable[[], object], error: type[BaseException], model: Net, optimizer: torch.optim.Optimizer) -> None:
    """Train under a Guardian, then let `act` raise inside of it."""

    def loop() -> None:
        train(model, optimizer)
        act()

    with pytest.raises(error), Guardian(model, optimizer, summary=False):
        loop()


def raised(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def succeed(model: Net, optimizer: torch.optim.Optimizer) -> None:
    with Guardian(model, optimizer, summary=False):
        train(model, optimizer)


def error_in_the_loop(model: Net, optimizer: torch.optim.Optimizer) -> None:
    fails(raised(OSError("own")), OSError, model, optimizer)


def interrupted(model: Net, optimizer: torch.optim.Optimizer) -> None:
    fails(raised(KeyboardInterrupt()), KeyboardInterrupt, model, optimizer)


def error_in_the_forward(model: Net, optimizer: torch.optim.Optimizer) -> None:
    fails(lambda: model(torch.randn(5, 3)), RuntimeError, model, optimizer)


def error_in_the_backward(model: Net, optimizer: torch.optim.Optimizer) -> None:
    def twice() -> None:
        loss = model(torch.randn(5, 4)).pow(2).mean()
        loss.backward()
        loss.backward()

    fails(twice, RuntimeError, model, optimizer)


def leave_the_generator(model: Net, optimizer: torch.optim.Optimizer) -> None:
    def steps() -> Any:
        with Guardian(model, optimizer, summary=False):
            while True:
                train(model, optimizer, 1)
                yield

    running = steps()
    next(running)
    running.close()


def halted(at: str) -> Callable[[Net, torch.optim.Optimizer], None]:
    def way(model: Net, optimizer: torch.optim.Optimizer) -> None:
        with (
            pytest.raises(NonFiniteError, match=f"Halted {at}"),
            Guardian(model, optimizer, summary=False, guards=[Halting(at)]),
        ):
            train(model, optimizer)

    way.__name__ = f"halted at {at}"
    return way


def halted_and_gone_on(model: Net, optimizer: torch.optim.Optimizer) -> None:
    with Guardian(model, optimizer, summary=False) as guardian:
        train(model, optimizer)
        with pytest.raises(NonFiniteError):
            model(torch.full((5, 4), float("nan")))
        train(model, optimizer)
    assert guardian.step == 6


def started_and_stopped(model: Net, optimizer: torch.optim.Optimizer) -> None:
    guardian = Guardian(model, optimizer, summary=False)
    assert guardian.start() is guardian
    train(model, optimizer)
    guardian.stop()
    guardian.stop()


def started_twice(model: Net, optimizer: torch.optim.Optimizer) -> None:
    guardian = Guardian(model, optimizer, summary=False).start()
    with pytest.raises(GuardUsageError, match="already watching"):
        guardian.start()
    train(model, optimizer)
    guardian.stop()
    assert guardian.step == 3


def nested(model: Net, optimizer: torch.optim.Optimizer) -> None:
    with Guardian(model, optimizer, summary=False) as outer, Guardian(model, optimizer, summary=False) as inner:
        train(model, optimizer)
    assert (outer.step, inner.step) == (3, 3)


def left_out_of_order(model: Net, optimizer: torch.optim.Optimizer) -> None:
    first = Guardian(model, optimizer, summary=False).start()
    second = Guardian(model, optimizer, summary=False).start()
    first.stop()
    train(model, optimizer)
    second.stop()
    assert (first.step, second.step) == (0, 3)


def own_hooks_meanwhile(model: Net, optimizer: torch.optim.Optimizer) -> None:
    with Guardian(model, optimizer, summary=False):
        handle = model.first.register_forward_hook(lambda *args: None)
        train(model, optimizer)
    assert len(model.first._forward_hooks) == 1
    handle.remove()


WAYS: list[Callable[[Net, torch.optim.Optimizer], None]] = [
    succeed,
    error_in_the_loop,
    error_in_the_forward,
    error_in_the_backward,
    interrupted,
    leave_the_generator,
    *map(halted, ("attach", "after backward", "judge", "after step", "finish")),
    halted_and_gone_on,
    started_and_stopped,
    started_twice,
    nested,
    left_out_of_order,
    own_hooks_meanwhile,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_every_way_out_leaves_everything_as_it_was(way: Callable[[Net, torch.optim.Optimizer], None]) -> None:
    model, optimizer = setup()
    before = traces(model, optimizer)
    way(model, optimizer)
    after = traces(model, optimizer)
    assert {name: value for name, value in after.items() if value != before[name]} == {}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_every_way_out_lets_go_of_model_and_optimizer(way: Callable[[Net, torch.optim.Optimizer], None]) -> None:
    model, optimizer = setup()
    way(model, optimizer)
    gone: list[Ref] = [weakref.ref(each) for each in (model, optimizer, *model.parameters())]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in gone if ref() is not None] == []


def test_the_users_own_exception_is_never_masked() -> None:
    model, optimizer = setup()
    own = OSError("own")
    guardian = Guardian(model, optimizer, sinks=[], guards=[Halting("finish")])
    with pytest.raises(OSError, match="own") as caught, guardian:
        raised(own)()
    assert caught.value is own
    assert own.__cause__ is None
    assert [each.code for each in guardian.findings] == ["GG101"]


def test_a_guard_works_for_one_guardian_at_a_time() -> None:
    model, optimizer = setup()
    guard = Halting("never")
    before = traces(model, optimizer)
    with Guardian(model, optimizer, sinks=[], guards=[guard]):
        with pytest.raises(GuardUsageError, match="already works for another Guardian"):
            Guardian(model, optimizer, sinks=[], guards=[guard]).start()
        train(model, optimizer)
    assert traces(model, optimizer) == before
