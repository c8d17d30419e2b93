"""What is recorded of a model's code, its parts and the machine: names for a person, never to be run by itself."""

from __future__ import annotations

import inspect
import math
import os
from contextlib import suppress
from importlib import metadata
from itertools import islice
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from pydantic import Field, JsonValue
from torch import nn

from gpt_guard.blackbox.code import UNKNOWN, code_files, digests, home_of, is_own, root_of, script
from gpt_guard.blackbox.stored import plain_path
from gpt_guard.checkpoint.belongs import model_config
from gpt_guard.checkpoint.fingerprint import unwrap
from gpt_guard.checks.environment.facts import surroundings
from gpt_guard.hooks.unregistered import own_attributes
from gpt_guard.records import Record

MOST = 50_000
"""Entries of a table: a model of more modules is compared in the first ones."""

_PLAIN = (int, float, str, bool, type(None), torch.dtype)
_LONGEST = 100
_MOST_ITEMS = 20


class Source(Record):
    """The class of a model: its module, its name in it, file and line, and the model's own `.config`, if it has one.

    `script` is the module that was run as a script. `classes` has each module's class by its path, `settings` plain
    attributes by path and name, `code` the SHA-256 of source files by module; all three are empty in older bundles.
    """

    module: str = Field(max_length=1000)
    qualname: str = Field(max_length=1000)
    file: str | None = Field(default=None, max_length=10_000)
    line: int | None = None
    config: dict[str, JsonValue] | None = None
    script: str | None = Field(default=None, max_length=1000)
    classes: dict[str, str] = Field(default_factory=dict)
    settings: dict[str, str] = Field(default_factory=dict)
    code: dict[str, str] = Field(default_factory=dict)

    @property
    def spec(self) -> str | None:
        """`package.module:Class`, where another process can import it: not out of a notebook, nor out of a function."""
        importable = self.module != UNKNOWN and "<locals>" not in self.qualname
        return f"{self.module}:{self.qualname}" if importable else None

    @property
    def root(self) -> Path | None:
        """The folder from which the model's module is imported, where the file shows it."""
        return None if self.file is None else root_of(self.module, self.file)

    @property
    def typed(self) -> str | None:
        """What to type behind `--model` in the current folder: `folder/file.py:Class` where it is no name from here."""
        if self.spec is None or self.file is None or self.root is None or not is_own(self.module, self.file):
            return self.spec
        return self.spec if self.root.resolve() in _searched() else f"{shown(Path(self.file))}:{self.qualname}"

    def __str__(self) -> str:
        place = f" ({self.file}:{self.line})" if self.file is not None else ""
        return f"{self.module}.{self.qualname}{place}"


def _searched() -> set[Path]:
    """The folders in which every process that begins here looks for a module."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return {Path.cwd().resolve(), *(Path(path).resolve() for path in paths if path)}


def shown(path: Path) -> str:
    """The path as a person would type it in the folder where the program is now."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def config_of(model: nn.Module) -> dict[str, Any] | None:
    """The model's own `.config`, if it has one that is one."""
    with suppress(Exception):  # it may be anything, with properties that raise
        return model_config(model, None)
    return None


def class_of(model: nn.Module) -> Source:
    """Look up the class of what is inside the wrappers, and nothing else; reads the user's file, runs nothing of it."""
    kind = type(unwrap(model))
    home = home_of(kind)
    line: int | None = None
    with suppress(OSError, TypeError):  # a class made in a notebook or by exec() has no file
        line = inspect.getsourcelines(kind)[1]
    return Source(module=home.module, qualname=kind.__qualname__, file=home.file, line=line)


def source_of(model: nn.Module, since: float = math.inf) -> Source:
    """All that is recorded of a model's code; reads the user's files, runs nothing of them.

    Of files that were written to after `since`, in seconds of the epoch, nobody knows what they held before.
    """
    found, main = class_of(model), script()
    own = found.module if type(unwrap(model)).__module__ == UNKNOWN else None
    changes = {
        "config": config_of(model),
        "script": own or (None if main is None else main.module),
        "classes": classes_of(model),
        "settings": settings_of(model),
        "code": digests(code_files(kinds_of(model)), since),
    }
    return found.model_copy(update=changes)


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
        for name, value in own_attributes(module)
        if (text := _text(value)) is not None
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


def environment_of(model: nn.Module) -> dict[str, str]:
    """Versions, platform, devices, dtypes and numeric switches as text; reads nothing from a device."""
    facts = surroundings(model)
    facts["gpt_guard"] = metadata.version("gpt-guard-torch")
    facts["default dtype"] = str(torch.get_default_dtype()).removeprefix("torch.")
    facts["float32 matmul precision"] = torch.get_float32_matmul_precision()
    facts["deterministic algorithms"] = str(torch.are_deterministic_algorithms_enabled())
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # asking must not start it
        facts["cuda"] = str(torch.version.cuda)
        facts["cudnn"] = str(torch.backends.cudnn.version())
        facts["cudnn.benchmark"] = str(torch.backends.cudnn.benchmark)
        facts["gpu"] = torch.cuda.get_device_name()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        facts["rank"] = f"{torch.distributed.get_rank()} of {torch.distributed.get_world_size()}"
    return facts
