"""The hooks that pack and unpack what autograd saves for a backward: checkpointing and offloading work by them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

Pair = tuple[Callable[..., Any], Callable[..., Any]]
# Older versions of torch cannot be asked for the newest pair.
_TOP: Callable[[bool], Pair | None] | None = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def _unknown() -> None:
    return None


# Without a function of ours in between: it is asked in every forward.
newest_pair: Callable[[], Pair | None] = _unknown if _TOP is None else partial(_TOP, False)
"""Gives the hooks that act now, or None: of several on top of each other only the newest do. 100 ns."""


@contextmanager
def only(pair: Pair | None) -> Iterator[None]:
    """Inside, none act but this pair; afterwards all that did before, on every way out."""
    own = torch._C._autograd
    if _TOP is None:
        with torch.autograd.graph.saved_tensors_hooks(_same, _same):
            yield
        return
    others: list[Pair] = []
    while (newest := newest_pair()) is not None:
        others.append(newest)
        own._pop_saved_tensors_default_hooks()
    try:
        if pair is None:
            yield
        else:
            with torch.autograd.graph.saved_tensors_hooks(*pair):
                yield
    finally:
        for pack, unpack in reversed(others):
            own._push_saved_tensors_default_hooks(pack, unpack)


def _same(value: Any) -> Any:
    return value
