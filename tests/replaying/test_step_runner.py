"""Which module is run again, and which model one process cannot run alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gpt_guard.replaying.step_runner import is_compiled, module_at, unwrapped, why_not


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def test_wrappers_are_taken_off() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    assert unwrapped(model) is model
    assert unwrapped(compiled(nn.DataParallel(model))) is model
    assert module_at(nn.DataParallel(model), "") is model
    assert module_at(model, "0") is model[0]
    assert module_at(model, "1.b") is None


def test_a_part_that_is_compiled_is_noticed() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert not is_compiled(model)
    model[1].compile(backend="eager")
    assert is_compiled(model)
    assert is_compiled(compiled(nn.Linear(2, 2)))


class Shard(nn.Parameter):
    """What a DTensor has and an ordinary parameter has not."""

    def to_local(self) -> torch.Tensor:
        return self.data


class FullyShardedDataParallel(nn.Linear):
    """By the name of torch's wrapper, which cannot be made in one process."""


def test_an_ordinary_model_can_be_run() -> None:
    assert why_not(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))) is None


@pytest.mark.parametrize("kind", ["tensor", "module"])
def test_a_sharded_model_is_not_run(kind: str) -> None:
    model: nn.Module = nn.Linear(2, 2) if kind == "tensor" else FullyShardedDataParallel(2, 2)
    if kind == "tensor":
        model.weight = Shard(torch.ones(2, 2))
    assert "would wait for the others" in str(why_not(model))


def test_batch_norm_over_several_processes_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert "SyncBatchNorm waits" in str(why_not(nn.SyncBatchNorm(2)))
