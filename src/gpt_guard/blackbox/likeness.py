"""Whether model and loss function of a replay are those that its bundle was made of, and whether their code is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from gpt_guard.blackbox.code import EDITED, UNKNOWN, code_files, digests, home_of, is_torch
from gpt_guard.blackbox.source import MOST, Source, classes_of, config_of, kinds_of, settings_of
from gpt_guard.blackbox.stored import function_name
from gpt_guard.checkpoint.fingerprint import config_changes
from gpt_guard.records.render import printable


@dataclass(frozen=True)
class Likeness:
    """What is known to be other than when the bundle was written; nothing is, of a bundle that recorded nothing.

    `parts` tells of modules of another class and of another loss function, `settings` of attributes, each as a part of
    a sentence. `edited` are files that hold something else by now. `unedited` are those that do not, and is empty
    unless all that the model's classes and the loss function are written in is among them.
    """

    parts: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    edited: tuple[str, ...] = ()
    unedited: tuple[str, ...] = ()


def likeness(
    source: Source, model: nn.Module, loss: str | None = None, loss_fn: Callable[..., Any] | None = None
) -> Likeness:
    """Compare a model, before it has run, with what a bundle says of the one that failed.

    `loss` is the name of the loss function that the bundle has, `loss_fn` the one that is given now.
    """
    now = None if loss is None or loss_fn is None else function_name(loss_fn)
    needed = {home_of(kind).module for kind in kinds_of(model)}
    if now is not None:
        needed.add(now.partition(":")[0])
    edited, unedited = _compared(source, model, {module for module in needed if not is_torch(module)})
    parts = [*_classes(source, model), *_loss(loss, now)]
    return Likeness(tuple(parts), tuple(_settings(source, model)), edited, unedited)


def _loss(was: str | None, now: str | None) -> Iterator[str]:
    if was is not None and now is not None and not _same_class(was, now):
        yield f"the loss function was {_class_name(was)}, is {_class_name(now)}"


def _classes(source: Source, model: nn.Module) -> Iterator[str]:
    for path, was, now in _changes(source.classes, classes_of(model)):
        if was is None or now is None or not _same_class(was, now):
            name = f"`{printable(path, 200)}`" if path else "the model itself"
            yield f"{name} was {_class_name(was)}, is {_class_name(now)}"


def _class_name(recorded: str | None) -> str:
    return "not there" if recorded is None else printable(recorded.replace(":", "."), 200)


def _same_class(was: str, now: str) -> bool:
    """The same name in the same module, which two processes may import from two folders."""
    (old, _, name), (new, _, other) = was.partition(":"), now.partition(":")
    return name == other and (_same_module(old, new) or UNKNOWN in (old, new) or (is_torch(old) and is_torch(new)))


def _same_module(one: str, other: str) -> bool:
    return f".{one}".endswith(f".{other}") or f".{other}".endswith(f".{one}")


def _settings(source: Source, model: nn.Module) -> Iterator[str]:
    for name, was, now in _changes(source.settings, settings_of(model)):
        yield f"`{printable(name, 200)}` was {_value(was)}, is {_value(now)}"
    config = config_of(model) if source.config is not None else None
    for name, (before, after) in config_changes(source.config or {}, config or {}).items():
        yield f"`config.{printable(name, 200)}` was {printable(before)}, is {printable(after)}"


def _value(text: str | None) -> str:
    return "not set" if text is None else printable(text, 120)


def _changes(was: Mapping[str, str], now: Mapping[str, str]) -> Iterator[tuple[str, str | None, str | None]]:
    """What differs; what only one of them has differs too, unless the record is none or was cut short."""
    whole = 0 < len(was) < MOST
    for name in (*was, *(name for name in now if name not in was)):
        if was.get(name) != now.get(name) and (whole or (name in was and name in now)):
            yield name, was.get(name), now.get(name)


def _compared(source: Source, model: nn.Module, needed: set[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The files that have been edited since, and those that have not, where that can be said of what is needed."""
    files = code_files(kinds_of(model))
    now = digests(files)
    edited: list[str] = []
    unedited: list[str] = []
    for recorded, digest in source.code.items():
        name = _here(recorded, now)
        if name is not None and digest != EDITED:
            (unedited if now[name] == digest else edited).append(name)
    known = needed <= set(unedited)
    return _names(edited, files), _names(unedited, files) if known and not edited else ()


def _here(recorded: str, now: Mapping[str, str]) -> str | None:
    """The name under which this process has loaded a module that the run may have known by another."""
    if recorded in now:
        return recorded
    found = [name for name in now if _same_module(recorded, name)]
    return found[0] if len(found) == 1 else None


def _names(modules: list[str], files: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(Path(files[module]).name for module in modules))


def environment_changes(recorded: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What is not as it was, each as a sentence part: "torch was 2.12.0, is 2.13.0"."""
    shared = [name for name in recorded if name in now and name != "gpt_guard"]
    return [f"{name} was {recorded[name]}, is {now[name]}" for name in shared if recorded[name] != now[name]]
