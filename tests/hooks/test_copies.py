"""Copies, pickles and TorchScript modules made inside a Guardian hold nothing of it."""

from __future__ import annotations

import copy
import copyreg
import io
import pickle
import pickletools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.jit._trace import TracerWarning

from gpt_guard import Guardian
from gpt_guard.hooks.copies import HookSet, Uncopied

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
_DICTS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")


@pytest.fixture(autouse=True)
def copyreg_as_found() -> Iterator[None]:
    assert OrderedDict not in copyreg.dispatch_table
    yield
    assert OrderedDict not in copyreg.dispatch_table


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 4)).pow(2).mean().backward()
        optimizer.step()


def held(model: nn.Module) -> list[list[Any]]:
    return [list(getattr(module, name).items()) for module in model.modules() for name in _DICTS]


def saved(model: nn.Module) -> nn.Module:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)  # type: ignore[no-any-return]  # this test saved a module


def needs(thing: Any) -> set[str]:
    return {str(arg) for op, arg, _ in pickletools.genops(pickle.dumps(thing, protocol=2)) if op.name == "GLOBAL"}


def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


class Doubled(Uncopied):
    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return double(module, args, output)


def shifted(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output + 1


@pytest.mark.parametrize("reads", ["immediate", "per_step"])
@pytest.mark.parametrize("made", [copy.deepcopy, saved])
def test_a_copy_has_the_hooks_of_the_user_in_order_and_none_of_ours(
    model: nn.Sequential, reads: Any, made: Callable[[nn.Module], nn.Module]
) -> None:
    model[0].register_forward_hook(double)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Guardian(model, optimizer, sinks=[], reads=reads):
        train(model, optimizer)
        late = model[0].register_forward_hook(shifted, always_call=True)
        twin = made(model)
        watched = [list(module._forward_hooks) for module in model.modules()]
        assert all(watched)
    assert held(twin) == held(model)
    assert list(twin[0]._forward_hooks.values()) == [double, shifted]  # type: ignore[index]  # a Sequential
    late.remove()
    assert list(model[0]._forward_hooks.values()) == [double]


def test_a_pickle_needs_what_it_needs_outside(model: nn.Sequential) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    train(model, optimizer)
    outside = needs(model), needs(optimizer), needs(model.state_dict())
    with Guardian(model, optimizer, sinks=[]):
        train(model, optimizer)
        assert (needs(model), needs(optimizer), needs(model.state_dict())) == outside
        assert "__builtin__ getattr" not in needs(model)


@pytest.mark.parametrize("reads", ["immediate", "per_step"])
def test_dictionaries_keep_their_identity_and_their_content(model: nn.Sequential, reads: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    places = [getattr(module, name) for module in model.modules() for name in _DICTS]
    before = held(model)
    with Guardian(model, optimizer, sinks=[], reads=reads):
        train(model, optimizer)
        copy.deepcopy(model)
        torch.jit.script(model)
        # Where calls are noticed from outside of all hooks, there are none.
        assert held(model) != before
    assert held(model) == before
    now = [getattr(module, name) for module in model.modules() for name in _DICTS]
    assert all(one is other for one, other in zip(places, now, strict=True))


def test_torchscript_of_a_watched_model_and_of_its_copy(model: nn.Sequential) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(5, 4)
    with Guardian(model, optimizer, sinks=[]) as guardian:
        train(model, optimizer)
        twin = copy.deepcopy(model).eval()
        model.eval()
        scripted = torch.jit.script(model)
        # A hook that reads a value while torch.jit.trace looks would warn, and end up in what it records.
        with warnings.catch_warnings():
            warnings.simplefilter("error", TracerWarning)
            traced = torch.jit.trace(model, batch)
        expected = model(batch)
        model.train()
        train(model, optimizer)
        assert guardian.step == 4
        assert guardian.findings == ()
    assert torch.equal(torch.jit.script(twin)(batch), expected)
    assert scripted(batch).shape == expected.shape
    assert "item" not in str(traced.inlined_graph)


def test_other_dictionaries_are_copied_as_ever_meanwhile() -> None:
    layer, hooks = nn.Linear(2, 2), HookSet()
    hooks.after_forward(layer, Doubled())
    plain: OrderedDict[str, Any] = OrderedDict(b=1, a=[2])
    vars(plain)["_metadata"] = {"version": 2}
    for twin in (copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))):
        assert list(twin.items()) == [("b", 1), ("a", [2])]
        assert vars(twin) == {"_metadata": {"version": 2}}
    hooks.close()
    hooks.close()
    assert not layer._forward_hooks


def test_a_reducer_of_somebody_else_goes_on_working() -> None:
    layer, hooks, seen = nn.Linear(2, 2), HookSet(), []

    def reducer(value: Any) -> Any:
        seen.append(dict(value))
        return value.__reduce__()

    copyreg.pickle(OrderedDict, reducer)
    try:
        hooks.after_forward(layer, Doubled())
        assert not copy.deepcopy(layer)._forward_hooks
        assert seen
        hooks.close()
        assert copyreg.dispatch_table[OrderedDict] is reducer
    finally:
        del copyreg.dispatch_table[OrderedDict]


def test_two_guardians_leave_in_any_order(model: nn.Sequential) -> None:
    other = nn.Sequential(nn.Linear(4, 1))
    first = Guardian(model, sinks=[])
    optimizer = torch.optim.SGD(other.parameters(), lr=0.01)
    second = Guardian(other, optimizer, sinks=[])
    first.start()
    model(torch.randn(3, 4))
    second.start()
    first.stop()
    train(other, optimizer)
    assert not any(module._forward_hooks for module in copy.deepcopy(other).modules())
    second.stop()
