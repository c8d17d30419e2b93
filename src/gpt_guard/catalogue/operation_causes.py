"""The causes that operations point to, read once from guides/operations.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from functools import cache
from importlib import resources

from gpt_guard.records import LikelyCause

_HIDDEN = "where_unselected"
# They are a fault also where the rows they make are left out later.
_OF_ROWS = ("fully_masked_row", "two_masks_added", "mask_beyond_dtype", "inf_minus_inf")


@cache
def causes() -> dict[str, LikelyCause]:
    """All causes by key, in the order of the file."""
    source = resources.files("gpt_guard.catalogue").joinpath("guides", "operations.toml")
    found = tomllib.loads(source.read_text(encoding="utf-8"))
    return {key: LikelyCause(key=key, **words) for key, words in found.items()}


def likely(keys: Iterable[str]) -> tuple[LikelyCause, ...]:
    """The causes of these keys, each once, in this order. Raises KeyError for a key that does not exist."""
    return tuple(causes()[key] for key in dict.fromkeys(keys))


def hidden_first(found: tuple[LikelyCause, ...]) -> tuple[LikelyCause, ...]:
    """The causes with that of a value which is masked in the forward only in front; behind a fully masked row."""
    keys = [cause.key for cause in found]
    first = keys[:1] if keys and keys[0] in _OF_ROWS else []
    return likely((*first, _HIDDEN, *keys))
