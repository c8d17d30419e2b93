"""A step that raises: counted once it is made, also without another backward; nested ones count once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

from gpt_guard import Guardian

from .loop_kit import Kept, batch, net, told

STEPS = 40
EARLY, LATE = 4, 30
Again = Callable[[Optimizer], None]


class BoomError(Exception):
    """What goes wrong inside of a step."""


def boom(*_: Any) -> None:
    raise BoomError


def plain(model: nn.Module, optimizer: Optimizer, raising: dict[int, Again]) -> Iterator[int]:
    """A plain loop with clipping; what `raising` holds is done just before a step."""
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if step in raising:
            raising[step](optimizer)
        optimizer.step()
        yield step


def through_a_hook(optimizer: Optimizer) -> None:
    """A hook that comes after ours, once."""
    handle = optimizer.register_step_pre_hook(boom)
    with pytest.raises(BoomError):
        optimizer.step()
    handle.remove()


class Halfway(AdamW):
    """An optimizer that may raise when it has changed some of the parameters."""

    fail = False

    def step(self, closure: Any = None) -> Any:
        if self.fail:
            with torch.no_grad():
                self.param_groups[0]["params"][0].mul_(0.999)
            raise BoomError
        return super().step(closure)


def through_its_own_code(optimizer: Optimizer) -> None:
    assert isinstance(optimizer, Halfway)
    optimizer.fail = True
    with pytest.raises(BoomError):
        optimizer.step()
    optimizer.fail = False


@pytest.mark.parametrize("reads", ["immediate", "per_step"])
@pytest.mark.parametrize("again", [through_a_hook, through_its_own_code])
@pytest.mark.parametrize("at", [EARLY, LATE])
def test_a_step_that_is_made_again_is_counted_at_its_number(at: int, again: Again, reads: Any) -> None:
    model, sink = net(), Kept()
    optimizer = Halfway(model.parameters(), lr=1e-3)
    with Guardian(model, optimizer, sinks=[sink], reads=reads) as guardian:
        for step in plain(model, optimizer, {at: again}):
            assert guardian.step == step + 1
    assert [each.step for each in sink.seen] == list(range(STEPS))
    assert all(each.grad_norm and each.grad_norm_clipped is not None and each.loss for each in sink.seen)
    assert not told(sink)


def test_its_figures_are_those_of_one_that_is_made_at_once() -> None:
    exact, close = [], []
    raisings: list[dict[int, Again]] = [{}, {EARLY: through_a_hook, LATE: through_a_hook}]
    for raising in raisings:
        model, sink = net(), Kept()
        optimizer = AdamW(model.parameters(), lr=1e-3)
        with Guardian(model, optimizer, sinks=[sink]):
            for _ in plain(model, optimizer, raising):
                pass
        exact.append([(each.step, each.loss, each.lr, each.micro_batches, each.samples) for each in sink.seen])
        close.append([(each.grad_norm, each.grad_norm_clipped, each.update_ratio) for each in sink.seen])
    assert exact[0] == exact[1]
    for one, other in zip(*close, strict=True):
        assert one == pytest.approx(other, rel=1e-3)


@pytest.mark.parametrize("again", [through_a_hook, through_its_own_code])
@pytest.mark.parametrize("at", [EARLY, LATE])
def test_a_step_that_is_not_made_again_does_not_count(at: int, again: Again) -> None:
    model, sink = net(), Kept()
    optimizer = Halfway(model.parameters(), lr=1e-3)
    with Guardian(model, optimizer, sinks=[sink]) as guardian:
        for step in range(STEPS):
            x, y = batch(step)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if step == at:
                again(optimizer)
            else:
                optimizer.step()
            assert guardian.step == step + (step < at)
    assert [each.step for each in sink.seen] == list(range(STEPS - 1))


class Base(SGD):
    """An optimizer whose `step` is hooked, since one was made."""

    fail = False

    def step(self, closure: Any = None) -> Any:
        if self.fail:
            raise BoomError
        return super().step(closure)


class Nested(Base):
    """Calls the `step()` of its base class, which has the same hooks."""

    retries = falls_back = False

    def step(self, closure: Any = None) -> Any:
        try:
            return super().step(closure)
        except BoomError:
            if self.retries:
                self.fail = False
                return super().step(closure)
            if self.falls_back:
                with torch.no_grad():
                    for each in self.param_groups[0]["params"]:
                        each -= 0.01 * each.grad
                return None
            raise


def nested(model: nn.Module) -> Nested:
    # Only the class of an optimizer that is made has its step hooked.
    Base(model.parameters(), lr=0.01)
    return Nested(model.parameters(), lr=0.01)


@pytest.mark.parametrize("how", ["goes on", "retries", "falls_back", "made again"])
@pytest.mark.parametrize("at", [EARLY, LATE])
def test_a_step_inside_of_a_step_counts_once(at: int, how: str) -> None:
    model, sink = net(), Kept()
    optimizer = nested(model)

    def act(_own: Optimizer) -> None:
        optimizer.fail = how != "goes on"
        optimizer.retries, optimizer.falls_back = how == "retries", how == "falls_back"
        if how == "made again":
            with pytest.raises(BoomError):
                optimizer.step()
            optimizer.fail = False

    def after(_own: Optimizer) -> None:
        optimizer.fail = False

    with Guardian(model, optimizer, sinks=[sink]) as guardian:
        for step in plain(model, optimizer, {at: act, at + 1: after}):
            assert guardian.step == step + 1
    assert [each.step for each in sink.seen] == list(range(STEPS))


@pytest.mark.parametrize("at", [EARLY, LATE])
def test_a_step_with_a_closure_that_raises_after_it(at: int) -> None:
    model, sink = net(), Kept()
    optimizer = AdamW(model.parameters(), lr=1e-3)

    with Guardian(model, optimizer, sinks=[sink]) as guardian:
        for step in range(STEPS):
            x, y = batch(step)

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            if step == at:
                handle = optimizer.register_step_post_hook(boom)
                optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
                with pytest.raises(BoomError):
                    optimizer.step(closure)
                handle.remove()
            optimizer.step(closure)
            assert guardian.step == step + 1
    assert [each.step for each in sink.seen] == list(range(STEPS))
