"""Entering and leaving: everything is as it was, on every way out."""

from __future__ import annotations

import copy
import gc
import io
import logging
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from gpt_guard.callbacks.base import Guard
from gpt_guard.catalogue import finding
from gpt_guard.errors import GuardUsageError, NonFiniteError
from gpt_guard.guardian import Guardian
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Observation


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 2)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.drop(torch.relu(self.first(x)))) * self.scale
        return logits


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


def setup() -> tuple[Net, torch.optim.Optimizer]:
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).pow(2).mean().backward()
        optimizer.step()


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


def succeed(model: Net, optimizer: torch.optim.Optimizer) -> None:
    with Guardian(model, optimizer, summary=False):
        train(model, optimizer)


def error_in_the_loop(model: Net, optimizer: torch.optim.Optimizer) -> None:
    with pytest.raises(OSError, match="own"), Guardian(model, optimizer, summary=False):
        train(model, optimizer)
        raise OSError("own")


def error_in_the_forward(model: Net, optimizer: torch.optim.Optimizer) -> None:
    with pytest.raises(RuntimeError, match="shapes"), Guardian(model, optimizer, summary=False):
        train(model, optimizer)
        model(torch.randn(5, 3))


def error_in_the_backward(model: Net, optimizer: torch.optim.Optimizer) -> None:
    with pytest.raises(RuntimeError, match="second time"), Guardian(model, optimizer, summary=False):
        loss = model(torch.randn(5, 4)).pow(2).mean()
        loss.backward()
        loss.backward()


def interrupted(model: Net, optimizer: torch.optim.Optimizer) -> None:
    with pytest.raises(KeyboardInterrupt), Guardian(model, optimizer, summary=False):
        train(model, optimizer)
        raise KeyboardInterrupt


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
    gone = [weakref.ref(model), weakref.ref(optimizer), *(weakref.ref(each) for each in model.parameters())]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in gone if ref() is not None] == []


def test_a_guardian_that_was_left_keeps_nothing_alive() -> None:
    model, optimizer = setup()
    guardian = Guardian(model, optimizer, sinks=[])
    with guardian:
        train(model, optimizer)
    gone = [weakref.ref(model), weakref.ref(optimizer), *(weakref.ref(each) for each in model.parameters())]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in gone if ref() is not None] == []
    assert guardian.report().steps == 3
    with pytest.raises(GuardUsageError, match="no longer exists"):
        guardian.start()


def test_reference_counts_of_the_model_are_as_before() -> None:
    model, optimizer = setup()
    train(model, optimizer)
    gc.collect()
    before = [sys.getrefcount(module) for module in model.modules()]
    for _ in range(3):
        with Guardian(model, optimizer, sinks=[]):
            train(model, optimizer)
    gc.collect()
    assert [sys.getrefcount(module) for module in model.modules()] == before


@pytest.mark.parametrize("reads", ["immediate", "per_step"])
def test_no_activation_lives_longer_for_being_watched(reads: Any) -> None:
    model, optimizer = setup()
    with Guardian(model, optimizer, sinks=[], reads=reads):
        for _ in range(2):
            x = torch.randn(5, 4)
            logits = model(x)
            hidden = weakref.ref(logits)
            loss = logits.pow(2).mean()
            del logits
            loss.backward()
            optimizer.step()
            batch, total = weakref.ref(x), weakref.ref(loss)
            del x, loss
            assert (hidden(), total(), batch()) == (None, None, None)
        with torch.no_grad():
            output = weakref.ref(model(torch.randn(5, 4)))
        assert output() is None


def test_entered_again_it_goes_on_counting() -> None:
    model, optimizer = setup()
    guardian = Guardian(model, optimizer, sinks=[], start_step=10)
    for expected in (13, 16):
        with guardian:
            train(model, optimizer)
        assert guardian.step == expected
    train(model, optimizer)
    assert guardian.step == 16


def test_counting_goes_on_after_a_resume() -> None:
    model, optimizer = setup()
    with Guardian(model, optimizer, sinks=[]) as first:
        train(model, optimizer)
    saved = io.BytesIO()
    torch.save(first.state_dict(), saved)
    saved.seek(0)
    second = Guardian(model, optimizer, sinks=[])
    second.load_state_dict(torch.load(saved, weights_only=True))
    with second:
        train(model, optimizer)
    assert second.step == 6
    assert second.latest is not None
    assert second.latest.samples == 30


def copies(model: Net) -> dict[str, Net]:
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    return {"deepcopy": copy.deepcopy(model), "pickle": torch.load(saved, weights_only=False)}


@pytest.mark.parametrize("reads", ["immediate", "per_step"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_of_a_watched_model_are_not_watched(reads: Any, how: str) -> None:
    model, optimizer = setup()
    with Guardian(model, optimizer, sinks=[], reads=reads) as guardian:
        train(model, optimizer)
        twin = copies(model)[how]
        seen = guardian.latest
        twin.eval()
        with torch.no_grad():
            twin(torch.full((5, 4), float("nan")))
        assert guardian.latest is seen
        assert guardian.findings == ()
        train(model, optimizer)
    assert guardian.step == 6
    assert guardian.latest is not None
    assert guardian.latest.samples == 30


def test_a_pickled_watched_model_can_be_read_without_gpt_guard() -> None:
    model, optimizer = setup()
    with Guardian(model, optimizer, sinks=[]):
        saved = io.BytesIO()
        torch.save(model, saved)
        torch.save(optimizer, saved)
    assert b"gpt_guard" not in saved.getvalue()


def test_state_dicts_are_the_same_inside() -> None:
    model, optimizer = setup()
    keys = list(model.state_dict())
    with Guardian(model, optimizer, sinks=[]):
        assert list(model.state_dict()) == keys
        assert set(optimizer.state_dict()) == {"state", "param_groups"}


def test_somebody_else_patches_backward_meanwhile() -> None:
    model, optimizer = setup()
    original = torch.autograd.backward
    calls: list[int] = []
    with Guardian(model, optimizer, sinks=[]) as guardian:
        ours: Any = torch.autograd.backward

        def theirs(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return ours(*args, **kwargs)

        torch.autograd.backward = theirs
        train(model, optimizer)
    assert guardian.step == len(calls) == 3
    assert torch.autograd.backward is theirs
    with Guardian(model, optimizer, sinks=[]) as again:
        train(model, optimizer)
    assert again.latest is not None
    assert (again.latest.micro_batches, len(calls)) == (1, 6)
    torch.autograd.backward = original
    with Guardian(model, optimizer, sinks=[]) as last:
        train(model, optimizer)
    assert last.latest is not None
    assert last.latest.loss is not None
    assert torch.autograd.backward is original


def test_the_users_own_exception_is_never_masked() -> None:
    model, optimizer = setup()
    own = OSError("own")
    guardian = Guardian(model, optimizer, sinks=[], guards=[Halting("finish")])
    with pytest.raises(OSError, match="own") as caught, guardian:
        train(model, optimizer)
        raise own
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
