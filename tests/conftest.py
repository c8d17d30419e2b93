"""What every test gets: a fixed seed, and a proof that it left torch as it found it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch.nn.modules import module as torch_module

from .verdicts import pytest_addoption as pytest_addoption
from .verdicts import pytest_configure as pytest_configure

# Several processes that each use all cores are in each other's way.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

_BACKWARD = torch.autograd.backward
_GLOBAL_HOOKS = [name for name in vars(torch_module) if name.startswith("_global_") and name.endswith("_hooks")]


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def torch_as_found(fixed_seed: None) -> Iterator[None]:
    """Fails a test that leaves `torch.autograd.backward` patched or a global module hook behind, and undoes both."""
    yield
    left = [name for name in _GLOBAL_HOOKS if vars(torch_module)[name]]
    if torch.autograd.backward is not _BACKWARD:
        torch.autograd.backward = _BACKWARD
        left.append("torch.autograd.backward")
    for name in _GLOBAL_HOOKS:
        vars(torch_module)[name].clear()
    assert not left, f"this test left behind: {', '.join(left)}"
