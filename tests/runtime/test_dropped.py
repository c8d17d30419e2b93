"""A Guardian that is dropped while it watches takes itself off, as in a notebook whose cell is run again."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import torch
from torch import nn

from gpt_guard import Guardian

from .loop_kit import net, train


def hooks(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    found = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    return found + len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


def test_one_that_nobody_holds_any_more_is_off(tmp_path: Path) -> None:
    backward = torch.autograd.backward
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    guardian = Guardian(model, optimizer, run_dir=tmp_path, sinks=[]).start()
    list(train(model, optimizer, range(5)))
    assert hooks(model, optimizer)
    gone = weakref.ref(guardian)
    del guardian
    gc.collect()
    assert gone() is None
    assert not hooks(model, optimizer)
    assert torch.autograd.backward is backward
    list(train(model, optimizer, range(5, 8)))


def test_a_with_block_holds_its_own() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Guardian(model, optimizer, sinks=[]):
        gc.collect()
        list(train(model, optimizer, range(3)))
        assert hooks(model, optimizer)
    assert not hooks(model, optimizer)


def test_one_that_was_left_holds_neither_model_nor_loop() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    guardian = Guardian(model, optimizer, sinks=[])
    with guardian:
        list(train(model, optimizer, range(3)))
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None
