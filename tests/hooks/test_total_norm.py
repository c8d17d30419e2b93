"""The norms that clip_grad_norm_ takes for itself: heard as they are, at the right moment, and nothing else changed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.nn.utils import clip_grad_norm_ as imported_before

from gpt_guard.hooks.total_norm import TOTAL_NORMS

from ..runtime.clipping_kit import with_gradients

_TOTAL: object = clip_grad._get_total_norm
_NORM: object = torch.linalg.vector_norm


class Heard:
    """Keeps what it is told; `act` runs while it is told."""

    listening = True

    def __init__(self, act: Callable[[], None] | None = None) -> None:
        self.told: list[tuple[list[Tensor], list[float]]] = []
        self.totals: list[Tensor | None] = []
        self.values: list[list[Tensor]] = []
        self._act = act

    def norms_heard(self, gradients: Sequence[Tensor], norms: Tensor | None, total: Tensor | None) -> None:
        self.told.append((list(gradients), [] if norms is None else norms.tolist()))
        self.totals.append(total)
        self.values.append([gradient.clone() for gradient in gradients])
        if self._act is not None:
            self._act()


@pytest.fixture
def model() -> nn.Module:
    return with_gradients()


@contextmanager
def listening(found: Heard) -> Iterator[Heard]:
    for patch in TOTAL_NORMS:
        patch.add(found)
    yield found
    for patch in TOTAL_NORMS:
        patch.remove(found)


@pytest.fixture
def heard() -> Iterator[Heard]:
    with listening(Heard()) as found:
        yield found
    assert clip_grad._get_total_norm is _TOTAL
    assert torch.linalg.vector_norm is _NORM


def grads(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


CALLS: dict[str, Callable[[nn.Module], Tensor]] = {
    "a generator": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01),
    "imported by name": lambda model: imported_before([*model.parameters()], 0.01),
    "one by one": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01, foreach=False),
    "foreach asked for": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01, foreach=True),
    "a norm as text": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01, "2"),  # type: ignore[arg-type]  # torch turns it into a number
}


@pytest.mark.parametrize("call", CALLS)
def test_norms_are_told_in_order_and_before_anything_is_scaled(model: nn.Module, heard: Heard, call: str) -> None:
    before = [grad.clone() for grad in grads(model)]
    result = CALLS[call](model)
    ((told, norms),) = heard.told
    assert heard.totals == [result]
    assert [id(grad) for grad in told] == [id(grad) for grad in grads(model)]
    assert norms == [float(grad.norm()) for grad in before]
    assert all(torch.equal(seen, old) for seen, old in zip(heard.values[0], before, strict=True))
    assert not any(torch.equal(now, old) for now, old in zip(grads(model), before, strict=True))


def test_the_result_and_the_gradients_are_those_of_torch_to_the_bit(model: nn.Module) -> None:
    before = [grad.clone() for grad in grads(model)]
    total = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    alone = [grad.clone() for grad in grads(model)]
    for grad, old in zip(grads(model), before, strict=True):
        grad.copy_(old)
    with listening(Heard()) as found:
        assert torch.equal(nn.utils.clip_grad_norm_(model.parameters(), 0.01), total)
        assert found.told
    assert all(torch.equal(one, other) for one, other in zip(alone, grads(model), strict=True))


WITHOUT: dict[str, Callable[[nn.Module], Tensor]] = {
    "the largest": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01, torch.inf),
    "the sum": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=1.0),
}


@pytest.mark.parametrize("call", WITHOUT)
def test_no_norms_where_there_are_none_of_this_kind(model: nn.Module, heard: Heard, call: str) -> None:
    WITHOUT[call](model)
    ((told, norms),) = heard.told
    assert len(told) == 4
    assert norms == []
    assert heard.totals == [None]


def test_nobody_is_told_who_does_not_listen(model: nn.Module, heard: Heard) -> None:
    heard.listening = False
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    assert not heard.told


def test_what_is_not_finite_is_told_before_torch_raises(model: nn.Module, heard: Heard) -> None:
    grads(model)[0][0, 0] = torch.nan
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(model.parameters(), 0.01, error_if_nonfinite=True)
    ((_, norms),) = heard.told
    assert [norm != norm for norm in norms] == [True, False, False, False]
    assert heard.totals == [None]
    assert torch.linalg.vector_norm is _NORM


class Halt(Exception):
    """What a listener raises."""


def test_a_listener_that_raises_stops_the_call_before_it_scales(model: nn.Module) -> None:
    def halt() -> None:
        # By now torch has its own function back.
        assert torch.linalg.vector_norm is _NORM
        raise Halt

    grads(model)[0][0, 0] = torch.inf
    before = [grad.clone() for grad in grads(model)]
    with listening(Heard(halt)), pytest.raises(Halt) as raised:
        nn.utils.clip_grad_norm_(model.parameters(), 0.01, error_if_nonfinite=True)
    assert raised.value.__context__ is None
    assert all(torch.equal(now, old) for now, old in zip(grads(model), before, strict=True))


def test_a_call_that_torch_refuses_leaves_nothing_behind(model: nn.Module, heard: Heard) -> None:
    with pytest.raises(ValueError, match="could not convert"):
        nn.utils.clip_grad_norm_(model.parameters(), 0.01, "largest")  # type: ignore[arg-type]  # it is what is tested
    assert torch.linalg.vector_norm is _NORM
    assert not heard.told
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    assert len(heard.told[0][1]) == 4


def test_norms_that_another_thread_takes_meanwhile_are_not_ours(
    model: nn.Module, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = torch.linalg.vector_norm
    others: list[float] = []

    def in_the_middle() -> None:
        other = nn.Linear(2, 2)
        other(torch.ones(1, 2)).sum().backward()
        others.append(float(imported_before(other.parameters(), 1.0)))

    thread = threading.Thread(target=in_the_middle)

    def slow(*args: Any) -> Any:
        if thread.ident is None:
            thread.start()
            thread.join()
        return function(*args)

    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "vector_norm", slow)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    assert others == [pytest.approx(6**0.5)]
    by_size = {len(told): norms for told, norms in heard.told}
    # The call in the middle could not be heard; the one around it has heard its own norms only.
    assert by_size[2] == []
    assert len(by_size[4]) == 4


def test_two_who_listen_hear_the_same(model: nn.Module, heard: Heard) -> None:
    with listening(Heard()) as other:
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        assert other.told[0][1] == heard.told[0][1]
    # One has gone: the other is still told.
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    assert len(heard.told) == 2


def test_a_compiled_clip_is_compiled_once_whoever_listens(model: nn.Module, heard: Heard) -> None:
    graphs: list[object] = []

    def count(graph: torch.fx.GraphModule, _example: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    parameters = [*model.parameters()]
    torch.compiler.reset()
    clip = torch.compile(lambda: nn.utils.clip_grad_norm_(parameters, 0.01), backend=count, fullgraph=True)
    for heard.listening in (True, False, True):
        clip()
    assert len(graphs) == 1
    assert not heard.told
    torch.compiler.reset()
