"""Chains: which outputs wait for the next module, and what stops them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.modules import module as torch_module

from gpt_guard.hooks import outputs, sums

from .chain_kit import WIDTH, Net, Tap, batch, spoil

# `drop` is added to something by the code around, and after `head` comes nothing.
IN_BLOCK = ("ln", "up", "act", "down")
WAIT = {f"blocks.{place}.{name}" for place in range(2) for name in IN_BLOCK} | {"inp", "blocks.0", "blocks.1", "ln"}


@pytest.fixture
def summed(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The tensors whose sum was read."""
    found: list[Tensor] = []
    plain = sums.sum_without_graph

    def counted(tensor: Tensor) -> float:
        found.append(tensor)
        return plain(tensor)

    for place in (sums, outputs):
        monkeypatch.setattr(place, "sum_without_graph", counted)
    return found


def test_which_outputs_wait_in_a_small_gpt() -> None:
    model = Net()
    with Tap(model) as tap:
        model(batch())
        assert tap.known == WAIT


def test_a_light_forward_reads_fewer_sums(summed: list[Tensor]) -> None:
    model = Net()
    with Tap(model) as tap:
        model(batch())
        full = len(summed)
        summed.clear()
        model(batch())
        # Each module but the model itself, whose output is that of its head.
        assert full == len(tap.modules) - 2
        assert len(summed) == full - len(tap.known)
        assert tap.bad == []


def test_the_one_that_made_it_is_told_first_and_with_its_link() -> None:
    model = Net()
    with Tap(model) as tap:
        model(batch())
        spoil(model.blocks[0].get_submodule("up"))
        model(batch())
        assert tap.bad[:3] == [("blocks.0.up", True), ("blocks.0.act", True), ("blocks.0.down", True)]


def test_an_unexpected_successor_has_it_tested_once_and_it_never_waits_again(summed: list[Tensor]) -> None:
    model = Net()
    block: Any = model.blocks[0]
    with Tap(model) as tap:
        model(batch())
        block.between = lambda y: y * 1
        for _ in range(2):
            summed.clear()
            model(batch())
            assert tap.known == WAIT - {"blocks.0.up"}
            assert sum(each.shape[-1] == 2 * WIDTH for each in summed) == 1
        block.between = lambda y: y
        spoil(block.up)
        model(batch())
        assert tap.bad[0] == ("blocks.0.up", False)


def test_written_in_place_it_is_tested() -> None:
    model = Net()
    block: Any = model.blocks[0]
    with Tap(model) as tap:
        model(batch())
        block.between = lambda y: y.mul_(math.nan)
        model(batch())
        assert tap.bad[0] == ("blocks.0.up", True)


@pytest.mark.parametrize("kind", ["hook", "pre-hook", "forward"])
def test_what_stands_around_the_next_module_stops_the_waiting(kind: str) -> None:
    model = Net()
    act = model.blocks[0].get_submodule("act")
    with Tap(model) as tap:
        model(batch())
        model(batch())
        if kind == "hook":
            act.register_forward_hook(lambda _module, _args, output: torch.nan_to_num(output, 0.0, 0.0, 0.0))
        elif kind == "pre-hook":
            act.register_forward_pre_hook(lambda _module, args: torch.nan_to_num(args[0], 0.0, 0.0, 0.0))
        else:
            act.forward = lambda x: torch.nan_to_num(x, 0.0, 0.0, 0.0)
        spoil(model.blocks[0].get_submodule("up"))
        model(batch())
        assert tap.bad == [("blocks.0.up", True)]


@pytest.mark.parametrize(
    "added", [torch_module.register_module_forward_hook, torch_module.register_module_forward_pre_hook]
)
def test_with_a_hook_on_every_module_nothing_waits(added: Any, summed: list[Tensor]) -> None:
    model = Net()
    with Tap(model):
        model(batch())
        full = len(summed)
        handle = added(lambda *_: None)
        try:
            summed.clear()
            model(batch())
            assert len(summed) == full
        finally:
            handle.remove()
