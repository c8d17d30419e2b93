"""Where code lies: by which name another process can import it, from which folder, and what its files held."""

from __future__ import annotations

import ast
import inspect
import math
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from gpt_guard.checkpoint.fingerprint import file_digest
from gpt_guard.errors import GuardUsageError

UNKNOWN = "__main__"
"""The module of code that no other process can import: of a notebook, or typed in."""

EDITED = ""
"""In place of the digest of a file that was written to when it may have been loaded already."""

_MAIN = (UNKNOWN, "__mp_main__")
_MOST_FILES = 2000
_NAME = re.compile(r"[\w-]+")
_INSTALLED = ("site-packages", "dist-packages")
_PYTHON = tuple({f"{path}/" for name, path in sysconfig.get_paths().items() if name.endswith(("stdlib", "lib"))})


class Home(NamedTuple):
    """The module and the file of a class."""

    module: str
    file: str | None


def home_of(kind: type) -> Home:
    """Where a class is defined; the script of a run goes by the name under which another process could import it."""
    if kind.__module__ not in _MAIN:
        with suppress(OSError, TypeError):  # a class made by exec() has no file
            return Home(kind.__module__, inspect.getsourcefile(kind))
        return Home(kind.__module__, None)
    main = _variables(sys.modules.get(kind.__module__))
    files = [code.co_filename for code in _codes(kind)]
    file = main.get("__file__")
    if files and file not in files:  # run by exec(), as some debuggers do: the main module is another one
        file = next((str(Path(each).absolute()) for each in files if is_own("", each) and Path(each).is_file()), None)
    return Home(_script_name(main, file), file)


def script() -> Home | None:
    """The script that this process runs, by the name under which another could import it; None for a notebook."""
    main = _variables(sys.modules.get(UNKNOWN))
    file = main.get("__file__")
    home = Home(_script_name(main, file), file)
    return home if home.module != UNKNOWN and is_own(home.module, home.file) else None


def _codes(kind: type) -> Iterator[Any]:
    for each in vars(kind).values():
        if isinstance(each, FunctionType):
            yield inspect.unwrap(each).__code__


def _script_name(main: dict[str, Any], file: str | None) -> str:
    if file is None or not file.endswith(".py") or not Path(file).is_file():
        return UNKNOWN
    spec = main.get("__spec__")
    if spec is not None and spec.origin == file:  # python -m package.module
        return str(spec.name)
    stem = Path(file).stem
    return stem if _NAME.fullmatch(stem) else UNKNOWN


def _variables(module: ModuleType | None) -> dict[str, Any]:
    # Asking a module that is loaded late for anything would load it.
    return {} if not isinstance(module, ModuleType) else object.__getattribute__(module, "__dict__")


def is_own(module: str, file: str | None) -> bool:
    """Whether a file is the user's: not Python's, not an installed package's, not of gpt_guard."""
    if file is None or not file.endswith(".py") or module.partition(".")[0] == "gpt_guard":
        return False
    return not file.startswith(_PYTHON) and not any(part in _INSTALLED for part in Path(file).parts)


def code_files(kinds: Iterable[type]) -> dict[str, str]:
    """The files by module of these classes, torch's left out, and of all of the user's own code that is loaded."""
    files: dict[str, str] = {}
    for module, file in map(home_of, kinds):
        if file is not None and file.endswith(".py") and not is_torch(module):
            files[module] = file
    if (main := script()) is not None and main.file is not None:
        files.setdefault(main.module, main.file)
    for name, module_ in list(sys.modules.items()):
        found = _variables(module_).get("__file__")
        if name not in _MAIN and isinstance(found, str) and is_own(name, found):
            files.setdefault(name, found)
    return dict(islice(files.items(), _MOST_FILES))


def is_torch(module: str) -> bool:
    """Whether a module is torch's, whose version stands for its code."""
    return module.partition(".")[0] == "torch"


def digests(files: dict[str, str], since: float = math.inf) -> dict[str, str]:
    """The SHA-256 of each file that can be read; EDITED for what was written to after `since`, in epoch seconds."""
    found: dict[str, str] = {}
    for module, file in files.items():
        with suppress(OSError, GuardUsageError):
            found[module] = EDITED if Path(file).stat().st_mtime > since else file_digest(file)
    return found


def root_of(module: str, file: str) -> Path | None:
    """The folder from which a module is imported that has this name and lies in this file; None if they do not fit."""
    path = Path(file)
    path = path.parent if path.stem == "__init__" else path.with_suffix("")
    parts = tuple(module.split("."))
    return path.parents[len(parts) - 1] if path.parts[-len(parts) :] == parts else None


def module_of(file: Path) -> tuple[Path, str]:
    """The folder from which a file is to be imported and its name there: the packages around it belong to the name."""
    folder = file.parent
    parts = [] if file.stem == "__init__" else [file.stem]
    while (folder / "__init__.py").is_file() and folder != folder.parent:
        parts.insert(0, folder.name)
        folder = folder.parent
    return folder, ".".join(parts)


def runs_when_imported(file: Path) -> bool:
    """Whether a script lacks `if __name__ == "__main__":`, so that what it does it does again when it is imported."""
    try:
        body = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError):  # whoever imports it is told
        return False
    return not any(isinstance(each, ast.If) and _is_guard(each.test) for each in body)


def _is_guard(test: ast.expr) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "__name__" for each in ast.walk(test)) and any(
        isinstance(each, ast.Constant) and each.value == UNKNOWN for each in ast.walk(test)
    )
