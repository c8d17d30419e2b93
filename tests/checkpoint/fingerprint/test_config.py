from __future__ import annotations

import argparse
import enum
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from pydantic import BaseModel

from gpt_guard.checkpoint.fingerprint import config_changes, config_dict, config_digest
from gpt_guard.errors import GuardUsageError

VALUES = {"n_layer": 2, "dropout": 0.5, "bias": False, "name": "a", "betas": [0.9, 0.95], "seed": None}


@dataclass
class Data:
    n_layer: int = 2
    dropout: float = 0.5
    bias: bool = False
    name: str = "a"
    betas: tuple[float, float] = (0.9, 0.95)
    seed: int | None = None


class Pydantic(BaseModel):
    n_layer: int = 2
    dropout: float = 0.5
    bias: bool = False
    name: str = "a"
    betas: tuple[float, float] = (0.9, 0.95)
    seed: int | None = None


class Pair(NamedTuple):
    n_layer: int
    dropout: float


class OnTheClass:
    n_layer = 2
    dropout = 0.5
    bias = False
    name = "a"
    betas = (0.9, 0.95)
    seed = None

    @property
    def heads(self) -> int:
        raise AssertionError("a property is not a setting")

    def method(self) -> None: ...


class Loud(enum.StrEnum):
    A = "a"


@pytest.mark.parametrize(
    "config",
    [
        VALUES,
        dict(reversed(VALUES.items())),
        {**VALUES, "dropout": np.float64(0.5), "n_layer": torch.tensor(2)},
        {**VALUES, "n_layer": 2.0, "name": Loud.A},
        {**VALUES, "_private": 1, "transformers_version": "4.1"},
        Data(),
        Pydantic(),
        OnTheClass,
        OnTheClass(),
        argparse.Namespace(**VALUES),
        SimpleNamespace(to_dict=lambda: VALUES),
    ],
)
def test_the_same_settings_have_the_same_digest(config: Any) -> None:
    assert config_digest(config) == config_digest(VALUES)


@pytest.mark.parametrize("change", [{"n_layer": 3}, {"bias": None}, {"bias": 0}, {"name": "A"}, {"more": 1}])
def test_another_setting_has_another_digest(change: dict[str, Any]) -> None:
    assert config_digest({**VALUES, **change}) != config_digest(VALUES)


def test_a_config_becomes_plain_data() -> None:
    given = {
        "path": Path("a/b"),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "tags": {"b", "a"},
        "pair": Pair(1, 0.5),
        "inner": Data(),
        "kind": Data,
        "function": config_dict,
        "object": object(),
        3: float("inf"),
    }
    assert config_dict(given) == {
        "path": "a/b",
        "dtype": "torch.bfloat16",
        "device": "cpu",
        "tags": ["a", "b"],
        "pair": [1, 0.5],
        "inner": VALUES,
        "kind": f"{__name__}.Data",
        "function": "gpt_guard.checkpoint.fingerprint.config.config_dict",
        "object": "<builtins.object>",
        "3": float("inf"),
    }


def test_a_plain_dict_still_makes_the_config() -> None:
    assert Data(**config_dict(Data(dropout=0.0))) == Data(dropout=0.0, betas=[0.9, 0.95])  # type: ignore[arg-type]  # as read back


def test_changes_are_listed_by_key_old_and_new() -> None:
    old = {"n": 2, "dropout": 0, "inner": {"a": 1, "b": 2}, "gone": 1, "nan": float("nan")}
    new = {"n": 3, "dropout": 0.0, "inner": {"a": 1, "b": 3}, "came": 1, "nan": float("nan")}
    assert config_changes(old, new) == {"inner.b": (2, 3), "n": (2, 3)}


@pytest.mark.parametrize("config", [3, "a string", None, object(), [1, 2]])
def test_what_is_no_config_is_said(config: Any) -> None:
    with pytest.raises(GuardUsageError, match=f"a {type(config).__name__} is no config"):
        config_digest(config)


def test_a_config_that_holds_itself_is_said() -> None:
    config: dict[str, Any] = {}
    config["self"] = config
    with pytest.raises(GuardUsageError, match="does it contain itself"):
        config_digest(config)
