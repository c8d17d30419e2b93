"""Which functions and classes a pickle would import, read from its opcodes; nothing is imported or run."""

from __future__ import annotations

import pickletools
import re
from pathlib import Path

from torch.serialization import get_unsafe_globals_in_checkpoint

HOSTILE_MODULES = frozenset(
    {"os", "posix", "nt", "sys", "subprocess", "shutil", "socket", "pty", "ctypes", "importlib", "runpy", "code"}
    | {"webbrowser", "pickle", "operator"}
)
HOSTILE_BUILTINS = frozenset(
    {"eval", "exec", "compile", "open", "__import__", "getattr", "setattr", "delattr", "globals", "input", "breakpoint"}
)

_LEGACY_PICKLES = 4
"""torch's format before 1.6 is a row of pickles: magic number, protocol, system, and the content."""

_TENSOR_PARTS = re.compile(r"torch\.(_utils\.|\w+$|nn\.parameter\.)|collections\.OrderedDict$|_codecs\.encode$")


def unsafe_globals(path: Path) -> list[str]:
    """Return the names that `torch.load` with `weights_only=True` would refuse; none where there is no pickle."""
    try:
        return sorted(get_unsafe_globals_in_checkpoint(path))
    except Exception:  # torch scans zip archives only, and broken ones make it raise anything
        return sorted(name for name in _scan(path) if not _TENSOR_PARTS.match(name))


def is_hostile(name: str) -> bool:
    """Whether no checkpoint has a reason to call this."""
    module, _, function = name.rpartition(".")
    if module in ("builtins", "__builtin__"):
        return function in HOSTILE_BUILTINS
    return name.partition(".")[0] in HOSTILE_MODULES


def _scan(path: Path) -> set[str]:
    found: set[str] = set()
    with path.open("rb") as stream:
        for _ in range(_LEGACY_PICKLES):
            strings: list[str] = []
            memo: dict[int, str] = {}
            try:
                for opcode, argument, _ in pickletools.genops(stream):
                    _follow(opcode.name, argument, strings, memo, found)
            except Exception:  # the end of the pickles, or what is none
                break
    return found


def _follow(name: str, argument: object, strings: list[str], memo: dict[int, str], found: set[str]) -> None:
    """STACK_GLOBAL takes module and name from the two strings pushed last, which may come from the memo."""
    if name in ("GLOBAL", "INST"):
        found.add(str(argument).replace(" ", "."))
    elif name == "STACK_GLOBAL":
        found.add(".".join(strings[-2:]))
    elif name == "MEMOIZE":
        memo[len(memo)] = strings[-1] if strings else ""
    elif name in ("PUT", "BINPUT", "LONG_BINPUT") and isinstance(argument, int):
        memo[argument] = strings[-1] if strings else ""
    elif name in ("GET", "BINGET", "LONG_BINGET") and isinstance(argument, int):
        strings.append(memo.get(argument, ""))
    elif "UNICODE" in name or "STRING" in name:
        strings.append(str(argument))
