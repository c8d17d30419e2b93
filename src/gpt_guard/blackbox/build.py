"""Build the model again from code that the person names, by file or by module, and never code that trains.

A bundle's own words are data and never imported by it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from torch import nn

from gpt_guard.blackbox.code import EDITED, module_of, runs_when_imported
from gpt_guard.blackbox.source import Source, shown
from gpt_guard.checkpoint.fingerprint import file_digest
from gpt_guard.checks.files.project import can_be_called, find, required_of, takes, user_code
from gpt_guard.errors import GuardUsageError
from gpt_guard.records.render import printable


def trusted_model(config: str | None, source: Source) -> nn.Module:
    """What the class that a bundle names makes, for a person who has said that its source is to be trusted.

    Only a subclass of nn.Module is called: a bundle must not name any other function of this machine. Raises
    GuardUsageError.
    """
    spec = trusted(source)
    target = find(spec, "--trust-source", required=True)
    if not isinstance(target, type) or not issubclass(target, nn.Module):
        raise GuardUsageError(f"--trust-source: {spec} is no class of a model; give --model package.module:factory")
    return build_model(spec, config, source)


def build_model(spec: str, config: str | None, source: Source) -> nn.Module:
    """What `package.module:Name` makes, imported from the current folder, or `folder/file.py:Name` from its own.

    A class or function that can be called without arguments is; otherwise it gets the settings that the bundle
    recorded, as keywords, or as the one object that `config`, by default the name with `Config` behind it, makes of
    them. Raises GuardUsageError where that does not give a model.
    """
    spec = named(spec, "--model", source)
    config = None if config is None else named(config, "--config", source)
    target = find(spec, "--model", required=True)
    if isinstance(target, nn.Module):
        return target
    if not callable(target):
        raise GuardUsageError(f"--model {spec} is a {type(target).__name__}; give a class or a function")
    model = user_code(_call(spec, target, config, source), f"building --model {spec}")
    if not isinstance(model, nn.Module):
        raise GuardUsageError(f"--model {spec} gave a {type(model).__name__}, not an nn.Module")
    return model


def _call(spec: str, target: Callable[..., Any], config: str | None, source: Source) -> Callable[[], Any]:
    settings = source.config
    kind = find(config or f"{spec}Config", "--config", required=config is not None)
    if kind is None and can_be_called(target):
        return target
    if settings is not None and kind is not None and takes(kind, settings):
        return lambda: target(kind(**settings))
    if settings is not None and kind is None and takes(target, settings):
        return lambda: target(**settings)
    if can_be_called(target):
        return target
    wanted = ", ".join(required_of(target))
    recorded = f"recorded are {', '.join(settings)}" if settings else "the model has no .config that could be recorded"
    raise GuardUsageError(
        f"--model {spec} needs {wanted}; {recorded}. Give a function without arguments that builds the model, or "
        f"--config package.module:ConfigClass"
    )


def named(spec: str, option: str, source: Source) -> str:
    """`package.module:Name` for what was typed, which may be `folder/file.py:Name`: it can be imported from then on.

    `source` is what the bundle says of its model: no code is looked for that the person has not named.
    Raises GuardUsageError for a file that is not there, a module that only another folder has, and for the script of
    the run where importing it would train again.
    """
    path, _, name = spec.rpartition(":")
    if path.endswith(".py"):
        if not Path(path).is_file():
            raise GuardUsageError(f"{option} {spec}: there is no file {path} in {Path.cwd()}")
        folder, module = _place(Path(path).resolve(), source)
        _search(folder)
        spec = f"{module}:{name}"
    else:
        _search(Path.cwd())
        module = spec.partition(":")[0]
    found = _found(module)
    if found is None and module == source.module:
        _explain(spec, option, source)
    if source.script is not None and module.rpartition(".")[2] == source.script.rpartition(".")[2]:
        _check_script(f"{option} {spec}", found, source)
    return spec


def trusted(source: Source) -> str:
    """The class that a bundle names, for a person who trusts it: its folder is searched too. Raises GuardUsageError."""
    if source.spec is None:
        raise GuardUsageError(
            f"--trust-source: {source} cannot be imported from another process; give --model package.module:factory"
        )
    if source.root is not None and _found(source.module) is None:
        _search(source.root)
    return named(source.spec, "--trust-source", source)


def like(source: Source) -> str:
    """What to give as `--model` to build the model of a bundle, as far as this machine has its code."""
    if source.spec is None:
        return "--model package.module:factory"
    there = source.file is not None and Path(source.file).is_file()
    return f"--model {source.typed if there else source.spec}"


def _place(file: Path, source: Source) -> tuple[Path, str]:
    """Whence and as what a file is imported: that of the model as in the run, others by the packages around them."""
    if source.file is not None and source.root is not None and file == Path(source.file).resolve():
        return source.root, source.module
    return module_of(file)


def _search(folder: Path) -> None:
    """Look for modules in this folder first, and in the current one."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    if str(folder) != sys.path[0]:
        sys.path.insert(0, str(folder))


def _found(module: str) -> ModuleSpec | None:
    # Packages around a module are imported by this, and what they raise is told by whoever imports it.
    with suppress(Exception, SystemExit):
        return importlib.util.find_spec(module)
    return None


def _explain(spec: str, option: str, source: Source) -> None:
    """Say where the run had a module that is not here."""
    root = source.root
    if root is None or root == Path.cwd() or not Path(str(source.file)).is_file():
        return
    name = spec.partition(":")[2]
    raise GuardUsageError(
        f"{option} {spec}: there is no module {source.module} in {Path.cwd()}; the run had it in "
        f"{printable(root, 1000)}: give {option} {printable(shown(Path(str(source.file))), 1000)}:{name}, or run this "
        f"in that folder"
    )


def _check_script(what: str, found: ModuleSpec | None, source: Source) -> None:
    """Refuse the script of the run as it was then, if whatever it does is done by importing it."""
    file = Path(found.origin) if found is not None and found.origin is not None else None
    if file is None or not file.is_file() or not runs_when_imported(file):
        return
    recorded = source.code.get(str(source.script), EDITED)
    if recorded == EDITED or recorded == file_digest(file):
        raise GuardUsageError(
            f'{what}: {file.name} is the script of the run and has no `if __name__ == "__main__":`, so importing it '
            f"would run it again, training and all. Put what it does below such a line, or move the class into a file "
            f"of its own"
        )
