"""Configs of any kind as plain data: to store, to digest, to compare key by key."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import os
from collections.abc import Callable, Collection, Mapping
from types import FunctionType
from typing import Any

from pydantic import BaseModel

from gpt_guard.errors import GuardUsageError

MAX_DEPTH = 32
"""Nesting deeper than this is taken for a cycle."""

VOLATILE = frozenset({"transformers_version"})
"""Keys that a library writes about itself; those that start with an underscore are left out too."""


def config_digest(config: Any) -> str:
    """Return the SHA-256, in hex, of a config's values as sorted JSON.

    The order of keys, tuple or list, and 0 or 0.0 make no difference. Takes what `config_dict` takes and raises what
    it raises.
    """
    return hashlib.sha256(_canonical(config_dict(config)).encode("utf-8", "surrogatepass")).hexdigest()


def config_dict(config: Any) -> dict[str, Any]:
    """Return a config as a plain dict: nothing but dicts, lists, strings, numbers, booleans and None.

    Takes a mapping, a dataclass, a pydantic model, an object with `to_dict()`, or any object or class by its public
    attributes. Raises GuardUsageError for anything else.
    """
    fields = _fields(config)
    if fields is None:
        raise GuardUsageError(
            f"a {type(config).__name__} is no config: give a dict, a dataclass, a pydantic model, or an object whose "
            "attributes are the settings"
        )
    return _plain_fields(fields, depth=0)


def config_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the keys that both configs have with different values, as (old, new); nested keys are joined by dots."""
    changes: dict[str, tuple[Any, Any]] = {}
    for key in sorted(old.keys() & new.keys()):
        if isinstance(old[key], Mapping) and isinstance(new[key], Mapping):
            inner = config_changes(old[key], new[key])
            changes |= {f"{key}.{name}": values for name, values in inner.items()}
        elif _canonical(old[key]) != _canonical(new[key]):
            changes[key] = (old[key], new[key])
    return changes


def plain(value: Any, depth: int = 0) -> Any:
    """Return any value as plain data; what has no plain form is written as the name of its type."""
    if depth > MAX_DEPTH:
        raise GuardUsageError(f"the config is nested deeper than {MAX_DEPTH} levels: does it contain itself?")
    if isinstance(value, enum.Enum):
        return plain(value.value, depth + 1)
    if value is None or isinstance(value, (bool, int, float, str)):
        return _builtin(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (list, tuple)):
        return [plain(item, depth + 1) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item, depth + 1) for item in value), key=_canonical)
    if isinstance(value, (type, FunctionType)):
        return f"{value.__module__}.{value.__qualname__}"
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "shape", None) == ():  # a scalar of NumPy or torch, without importing either
        return plain(item(), depth + 1)
    if type(value).__module__.partition(".")[0] == "torch":  # dtype, device: their text is their value
        return str(value)
    fields = _fields(value)
    return _plain_fields(fields, depth) if fields else f"<{type(value).__module__}.{type(value).__qualname__}>"


def _builtin(value: Any) -> Any:
    """A subclass such as numpy.float64 is written as the built-in that it is."""
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def _fields(config: Any) -> Mapping[Any, Any] | None:
    if isinstance(config, Mapping):
        return config
    if isinstance(config, BaseModel):
        return config.model_dump()
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    if not isinstance(config, type):
        for method in ("to_dict", "_asdict"):
            convert: Callable[[], Any] | None = getattr(config, method, None)
            if callable(convert) and isinstance(found := convert(), Mapping):
                return found
    return _attributes(config)


def _attributes(config: Any) -> dict[str, Any] | None:
    """Settings written as attributes, on the object or on its class (`class Config: n_layer = 2`)."""
    kind = config if isinstance(config, type) else type(config)
    if kind.__module__ == "builtins":
        return None
    merged: dict[str, Any] = {}
    for base in reversed(kind.__mro__[:-1]):
        merged |= vars(base)
    if kind is not config:
        merged |= getattr(config, "__dict__", {})
    skipped = (property, staticmethod, classmethod, FunctionType)
    return {
        name: value
        for name, value in merged.items()
        if not name.startswith("_") and not isinstance(value, skipped) and not hasattr(value, "__objclass__")
    } or None


def _plain_fields(fields: Mapping[Any, Any], depth: int) -> dict[str, Any]:
    return {
        str(key): plain(value, depth + 1)
        for key, value in fields.items()
        if not str(key).startswith("_") and key not in VOLATILE
    }


def without(config: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """Return a config without some of its top-level keys."""
    return {key: value for key, value in config.items() if key not in keys}


def _canonical(value: Any) -> str:
    return json.dumps(_whole(value), sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _whole(value: Any) -> Any:
    """Write 0.0 as 0: a config read from YAML or a command line must not differ from one written in Python."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _whole(item) for key, item in value.items()}
    return [_whole(item) for item in value] if isinstance(value, list) else value
