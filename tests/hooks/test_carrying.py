"""Whose output shows a NaN or +inf of its input, and whose may not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from gpt_guard.hooks.chains import carries

WIDTH = 8
KINDS: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(WIDTH, WIDTH),
    "Linear to one": lambda: nn.Linear(WIDTH, 1, bias=False),
    "LayerNorm": lambda: nn.LayerNorm(WIDTH),
    "LayerNorm without weight": lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
    "RMSNorm": lambda: nn.RMSNorm(WIDTH),
    "GELU": nn.GELU,
    "GELU tanh": lambda: nn.GELU(approximate="tanh"),
    "SiLU": nn.SiLU,
    "ReLU": nn.ReLU,
    "Dropout": nn.Dropout,
    "Dropout of all": lambda: nn.Dropout(1.0),
    "Dropout of nothing": lambda: nn.Dropout(0.0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("made", KINDS.values(), ids=KINDS.keys())
def test_a_carrying_module_does_not_lose_nan_or_inf(
    made: Callable[[], nn.Module], value: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    for zeroed in (False, True):
        module = made().to(dtype)
        for parameter in module.parameters() if zeroed else ():
            parameter.data.zero_()
        assert carries(module)
        for shape in ((WIDTH,), (1, WIDTH), (3, 5, WIDTH)):
            for place in range(math.prod(shape)):
                x = torch.randn(shape).to(dtype)
                x.view(-1)[place] = value
                for training in (True, False):
                    found = module.train(training)(x)
                    assert not math.isfinite(found.float().sum().item())


class Own(nn.Linear):
    pass


def with_own_forward() -> nn.Module:
    module = nn.GELU()
    module.forward = torch.nan_to_num  # type: ignore[method-assign]  # as libraries that wrap a module do
    return module


def to_nothing() -> nn.Module:
    with pytest.warns(UserWarning, match="zero-element"):
        return nn.Linear(WIDTH, 0)


def sparse() -> nn.Module:
    module = nn.Linear(WIDTH, WIDTH, bias=False)
    module.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH).to_sparse())
    return module


@pytest.mark.parametrize(
    "module",
    [
        Own(WIDTH, WIDTH),
        to_nothing(),
        nn.ReLU(inplace=True),
        nn.Dropout(inplace=True),
        nn.Sigmoid(),
        nn.BatchNorm1d(WIDTH),
        nn.Sequential(nn.GELU()),
        parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        with_own_forward(),
        sparse(),
    ],
    ids=lambda module: type(module).__name__,
)
def test_others_may_lose_it(module: nn.Module) -> None:
    assert not carries(module)


def test_a_class_with_another_forward_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.GELU, "forward", lambda self, x: torch.nan_to_num(x))
    assert not carries(nn.GELU())
