"""Forwards that are not as those before: what waits is tested, told once, and let go."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from .chain_kit import WIDTH, Net, Parts, Tap, batch, spoil


def twice(parts: Parts, x: Tensor) -> Tensor:
    return parts.c(parts.b(parts.a(parts.b(x))))  # type: ignore[no-any-return]  # a call of a module is Any


def in_other_hands(parts: Parts, x: Tensor) -> Tensor:
    y = parts.a(x)
    return parts.b(input=y) + parts.c(x)  # type: ignore[no-any-return]  # a call of a module is Any


@pytest.mark.parametrize(("run", "known"), [(twice, {"a"}), (in_other_hands, set())])
def test_what_never_waits(run: Callable[[Any, Tensor], Tensor], known: set[str]) -> None:
    model = Parts(run)
    with Tap(model) as tap:
        model(batch())
        assert tap.known == known


def test_a_module_that_is_called_from_two_lines_does_not_wait() -> None:
    def run(parts: Parts, x: Tensor) -> Tensor:
        if parts.calls % 2:
            return parts.b(parts.a(x))  # type: ignore[no-any-return]  # a call of a module is Any
        return parts.b(parts.a(2 * x))  # type: ignore[no-any-return]  # a call of a module is Any

    model = Parts(run)
    with Tap(model) as tap:
        model(batch())
        assert tap.known == {"a"}
        tap.calls = 0
        model(batch())
        assert tap.known == set()


def test_a_module_that_is_called_with_its_own_chain_again_is_tested_then() -> None:
    def run(parts: Parts, x: Tensor) -> Tensor:
        for _ in range(1 if parts.calls == 1 else 2):
            x = parts.b(parts.a(x))
        return parts.c(x)  # type: ignore[no-any-return]  # a call of a module is Any

    model = Parts(run)
    with Tap(model) as tap:
        model(batch())
        assert tap.known == {"a", "b"}
        model(batch())
        assert tap.bad == []
        spoil(model.a)
        model(batch())
        assert tap.bad[:3] == [("a", True), ("b", True), ("a", False)]


class Table(nn.Module):
    """Makes its output of parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, _x: Tensor | None) -> Tensor:
        return self.rows * 3e38


def test_a_module_that_is_given_no_tensor_can_wait() -> None:
    def run(parts: Any, x: Tensor) -> Tensor:
        return parts.b(parts.table(None)) + x  # type: ignore[no-any-return]  # a call of a module is Any

    model = Parts(run)
    model.table = Table()
    with torch.no_grad():
        model.table.rows.zero_()
    with Tap(model) as tap:
        model(batch())
        assert tap.known == {"table"}
        with torch.no_grad():
            model.table.rows.fill_(10.0)
        model(batch())
        assert tap.bad[0] == ("table", True)


def test_a_model_that_calls_itself_has_what_waits_tested_first() -> None:
    def run(parts: Parts, x: Tensor) -> Tensor:
        if parts.calls == 3:
            return parts.c(torch.nan_to_num(x, 0.0, 0.0, 0.0))  # type: ignore[no-any-return]  # a call of a module
        y = parts.a(x)
        return parts(y) if parts.calls == 2 else parts.b(y)  # type: ignore[no-any-return]  # a call of a module is Any

    model = Parts(run)
    with Tap(model) as tap:
        model(batch())
        assert tap.known == {"a"}
        spoil(model.a)
        model(batch())
        assert tap.bad == [("a", True)]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_who_traces_the_model_after_a_light_forward_meets_no_reading() -> None:
    model = Net()
    model.eval()
    with Tap(model) as tap:
        for _ in range(2):
            model(batch())
        tap.order.clear()
        # A reading would be told by torch as a TracerWarning.
        torch.jit.trace(model, batch(), check_trace=False)
        torch.export.export(model, (batch(),), strict=False)
        assert not tap.order
        assert not tap.unwatched


def test_nothing_is_held_once_a_forward_is_over() -> None:
    held: list[ref[Tensor]] = []

    def run(parts: Parts, x: Tensor) -> Tensor:
        y = parts.a(x)
        held.append(ref(y))
        if parts.calls == 2:
            raise ValueError("half-way")
        y = parts.b(y)
        held.append(ref(y))
        if parts.calls == 4:
            raise ValueError("half-way")
        return parts.c(y)  # type: ignore[no-any-return]  # a call of a module is Any

    def alive() -> list[Any]:
        return [each() for each in held if each() is not None]

    model = Parts(run)
    gc.disable()
    try:
        with Tap(model) as tap:
            for call in range(1, 5):
                # The last one but two is left half-way, and so is the last.
                if call in (2, 4):
                    with pytest.raises(ValueError, match="half-way"):
                        model(batch())
                    assert tap.waiting is not None
                else:
                    model(batch())
                    assert tap.waiting is None
                    assert alive() == []
        assert tap.waiting is None
        assert alive() == []
    finally:
        gc.enable()
