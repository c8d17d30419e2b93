"""What a model is made of beside its tensors: the class of each module, and the plain values among its attributes."""

from __future__ import annotations

from itertools import islice
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn

from gpt_guard.blackbox.code import home_of
from gpt_guard.blackbox.paths import plain_path
from gpt_guard.checkpoint.fingerprint import unwrap
from gpt_guard.replaying.state import REGISTRIES

MOST = 50_000
"""Entries of a table: a model of more modules is compared in the first ones."""

_PLAIN = (int, float, str, bool, type(None), torch.dtype)
_LONGEST = 100
_MOST_ITEMS = 20


def _modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules by path; of a wrapper and what is in it, which share a path, the inner one."""
    return {plain_path(path): module for path, module in unwrap(model).named_modules()}


def _kind_of(module: nn.Module) -> type:
    # A lazy layer takes its class with the first forward.
    return getattr(module, "cls_to_become", None) or type(module)


def kinds_of(model: nn.Module) -> list[type]:
    """The classes of all modules, each once."""
    return list(dict.fromkeys(map(_kind_of, _modules_of(model).values())))


def classes_of(model: nn.Module) -> dict[str, str]:
    """`module:Class` of each module by its path in the plain model."""
    names = {kind: f"{home_of(kind).module}:{kind.__qualname__}" for kind in kinds_of(model)}
    return {path: names[_kind_of(module)] for path, module in islice(_modules_of(model).items(), MOST)}


def settings_of(model: nn.Module) -> dict[str, str]:
    """Numbers, short texts, short lists of them and functions among the attributes of all modules, as text."""
    found = (
        (f"{path}.{name}" if path else name, text)
        for path, module in _modules_of(model).items()
        for name, value in vars(module).items()
        if name not in REGISTRIES and (text := _text(value)) is not None
    )
    return dict(islice(found, MOST))


def _text(value: Any) -> str | None:
    """A value in writing; None for what has no short one that is the same in another process."""
    if isinstance(value, (FunctionType, BuiltinFunctionType)):
        return value.__qualname__
    if type(value) in (list, tuple):
        plain = len(value) <= _MOST_ITEMS and all(type(each) in _PLAIN for each in value)
    else:
        plain = type(value) in _PLAIN and not (isinstance(value, str) and len(value) > _LONGEST)
    text = repr(value) if plain else None
    return text if text is not None and len(text) <= _LONGEST else None
