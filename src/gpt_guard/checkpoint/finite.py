"""Find the tensors of a state that are not finite: one reading pass each, an exact count only on suspicion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gpt_guard.checkpoint.fingerprint.naming import printable
from gpt_guard.records import Record


class Count(Record):
    """How many elements of a tensor are not finite."""

    nan: int
    pos_inf: int
    neg_inf: int
    numel: int

    def __str__(self) -> str:
        kinds = {"NaN": self.nan, "+inf": self.pos_inf, "-inf": self.neg_inf}
        return ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count) + f" of {self.numel}"


def non_finite(tensors: Mapping[str, Any], masks: frozenset[str] = frozenset()) -> dict[str, Count]:
    """Return the counts for every tensor that holds NaN or infinity, by name.

    For a name in `masks` -inf alone is taken for an attention mask. Expects tensors on the CPU, where reading is free.
    """
    found: dict[str, Count] = {}
    for name, value in tensors.items():
        if not isinstance(value, Tensor) or value.is_meta or not (value.is_floating_point() or value.is_complex()):
            continue
        count = _count(value.detach())
        if count is not None and not (name in masks and count.nan == count.pos_inf == 0):
            found[name] = count
    return found


def leaves(state: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a nested state with their paths, as in `state.0.exp_avg`."""
    if isinstance(state, Tensor):
        yield path, state
    items = (
        state.items() if isinstance(state, Mapping) else enumerate(state) if isinstance(state, (list, tuple)) else ()
    )
    for key, value in items:
        yield from leaves(value, f"{path}.{key}" if path else str(key))


def listing(found: Mapping[str, Count], limit: int = 4) -> str:
    """Return the first few names with their counts, for a sentence."""
    shown = [f"{printable(name)} ({count})" for name, count in list(found.items())[:limit]]
    return ", ".join(shown) + (f" and {len(found) - limit} more" if len(found) > limit else "")


def _count(value: Tensor) -> Count | None:
    if value.layout is not torch.strided:
        value = value.to_sparse().coalesce().values()
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    if value.element_size() < 4:
        value = value.float()  # a sum in half precision overflows early, and float8 has none
    # NaN and infinity survive a sum, which is some 15 times cheaper than isfinite; finite values can overflow it.
    if value.numel() == 0 or torch.isfinite(value.sum()):
        return None
    nan, pos_inf, neg_inf = (int(test(value).sum()) for test in (torch.isnan, torch.isposinf, torch.isneginf))
    bad = nan + pos_inf + neg_inf
    return Count(nan=nan, pos_inf=pos_inf, neg_inf=neg_inf, numel=value.numel()) if bad else None
