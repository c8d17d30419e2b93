"""The user's own code by name, `package.module:Name`: imported from the current folder, its errors told in one line."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from gpt_guard.checks.runner.forward import user_line
from gpt_guard.errors import GuardUsageError

T = TypeVar("T")


def find(spec: str, option: str, required: bool) -> Any:
    """What `package.module:Name` names, the current folder included. None where it is not there and nobody asked."""
    module_name, _, attribute = spec.partition(":")
    if not module_name or not attribute:
        raise GuardUsageError(f"{option} {spec!r}: write package.module:Name, such as mini_gpt:MiniGPT")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise _broken(error, f"{option} {spec}: importing {module_name}") from error
        if not required:
            return None
        seen = f"there is no module {module_name} in {here} or among the installed packages"
        fix = f"run it in the folder of {module_name.partition('.')[0]}.py, or give {option} package.module:Name"
        raise GuardUsageError(f"{option} {spec}: {seen}; {fix}") from error
    except Exception as error:
        raise _broken(error, f"{option} {spec}: importing {module_name}") from error
    found = _member(module, attribute)
    if found is None and not required:
        return None
    if found is None:
        names = ", ".join(sorted(n for n, v in vars(module).items() if isinstance(v, type) and not n.startswith("_")))
        raise GuardUsageError(
            f"{option} {spec}: {module.__name__} has no {attribute}; its classes are {names or 'none'}"
        )
    return found


def _member(module: Any, path: str) -> Any:
    """What a module has under a name, or a class in it (`Model.loss`); None if it has no such."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def user_code(run: Callable[[], T], doing: str) -> T:
    """Run the user's code. Raises GuardUsageError with the exception and its line where it raises."""
    try:
        return run()
    except GuardUsageError:
        raise
    except SystemExit as error:
        # Such as the argparse of a script, which has read the arguments of this command.
        raise _broken(error, doing) from error
    except Exception as error:
        raise _broken(error, doing) from error


def _broken(error: BaseException, doing: str) -> GuardUsageError:
    where = user_line(error.__traceback__)
    place = f" ({where.file}:{where.line} in {where.function})" if where is not None else ""
    return GuardUsageError(f"{doing} failed: {type(error).__name__}: {error}{place}")


def parameters_of(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The arguments that a class or function takes; none where it does not tell."""
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):
        return {}


def required_of(target: Callable[..., Any]) -> list[str]:
    """The names of the arguments without which it cannot be called."""
    collecting = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = parameters_of(target).items()
    return [name for name, each in parameters if each.kind not in collecting and each.default is each.empty]


def can_be_called(target: Callable[..., Any], **given: Any) -> bool:
    """True where nothing that is required is missing from `given`."""
    return set(required_of(target)) <= set(given)


def takes(target: Callable[..., Any], settings: Mapping[str, Any]) -> bool:
    """True where it can be called with exactly these settings."""
    parameters = parameters_of(target)
    anything = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    return can_be_called(target, **settings) and (anything or set(settings) <= set(parameters))
