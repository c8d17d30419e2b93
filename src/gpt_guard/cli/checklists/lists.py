"""The items of the three checklists, read once from guides/checklists.toml, and what an answer to one looks like."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from typing import Literal, NamedTuple, get_args

from gpt_guard.records import Record

Phase = Literal["before", "during", "after"]
PHASES: tuple[Phase, ...] = get_args(Phase)


class Item(Record):
    """One thing to make sure of; `run` is what answers it where a run directory does not."""

    key: str
    ask: str
    run: str
    stage: str | None = None


class Answer(NamedTuple):
    """`ok` is None for what is not known from here; `seen` is the evidence, or why it is not known."""

    ok: bool | None
    seen: str


@cache
def checklists() -> dict[Phase, tuple[Item, ...]]:
    """The three lists, in order."""
    file = resources.files("gpt_guard.catalogue").joinpath("guides", "checklists.toml")
    lists = tomllib.loads(file.read_text(encoding="utf-8"))
    return {phase: tuple(Item.model_validate(item) for item in lists[phase]) for phase in PHASES}
