"""Where the code of a model is: names and a place for a person to open, never something to run by itself."""

from __future__ import annotations

import inspect
from contextlib import suppress

from pydantic import Field, JsonValue
from torch import nn

from gpt_guard.checkpoint.belongs import model_config
from gpt_guard.fingerprint import unwrap
from gpt_guard.records import Record


class Source(Record):
    """The class of a model: its module, its name in it, file and line, and the model's own `.config`, if it has one."""

    module: str = Field(max_length=1000)
    qualname: str = Field(max_length=1000)
    file: str | None = Field(default=None, max_length=10_000)
    line: int | None = None
    config: dict[str, JsonValue] | None = None

    @property
    def spec(self) -> str | None:
        """`package.module:Class`, where another process can import it: not out of a script, nor out of a function."""
        importable = self.module != "__main__" and "<locals>" not in self.qualname
        return f"{self.module}:{self.qualname}" if importable else None

    def __str__(self) -> str:
        place = f" ({self.file}:{self.line})" if self.file is not None else ""
        return f"{self.module}.{self.qualname}{place}"


def source_of(model: nn.Module) -> Source:
    """Look up the class of what is inside the wrappers; reads the user's file, runs nothing of it."""
    kind = type(unwrap(model))
    file: str | None = None
    line: int | None = None
    with suppress(OSError, TypeError):  # a class made in a notebook or by exec() has no file
        file = inspect.getsourcefile(kind)
        line = inspect.getsourcelines(kind)[1]
    config = None
    with suppress(Exception):  # it may be anything, with properties that raise
        config = model_config(model, None)
    return Source(module=kind.__module__, qualname=kind.__qualname__, file=file, line=line, config=config)
