"""One leak of the future as a finding: who reads whom, which module made it, and what it most likely is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpt_guard import catalogue
from gpt_guard.callbacks.probes.findings import distances, likely_future
from gpt_guard.checks.causality.leaks import Pairs, Suffix, change_suffix, leak_pairs, leaking_module
from gpt_guard.checks.runner.perturb import Forward, repeatable, widened
from gpt_guard.hooks.isolation.compare import FirstDifference
from gpt_guard.hooks.isolation.preserve import quiet
from gpt_guard.records import Finding

_SOFT = 1e-3
"""A gradient below this share of the largest one gets past a mask rather than through none."""


class Leaked(NamedTuple):
    """What is known of a leak; `blame` and `seen` may be empty where it is too small for the model's precision."""

    blame: FirstDifference | None
    seen: Pairs
    likely: list[str]
    length: int

    @property
    def distances(self) -> str:
        """How far ahead, in words."""
        return distances(self.seen.pairs, self.length)

    def finding(self, seen: str, likely: Iterable[str] = ()) -> Finding:
        """GG660 with these causes first, then those that the evidence points to."""
        fields: dict[str, Any] = self.blame.named if self.blame is not None else {}
        evidence = {"offsets": sorted({source - reader for reader, source in self.seen.pairs})}
        keys = list(dict.fromkeys([*likely, *self.likely]))
        return catalogue.finding("GG660", seen, likely=keys, evidence=evidence, **fields)


def look_into(model: nn.Module, forward: Forward, x: Tensor, vocab: int, found: Suffix, seed: int) -> Leaked:
    """Who reads whom, and which module made it. Call it in eval mode and without gradient; runs many forwards."""
    seen = leak_pairs(forward, x, vocab, seed)
    blame = leaking_module(model, forward, found)
    return Leaked(blame, seen, likely_future(model, blame, seen.pairs, seen.share, x.size(1)), x.size(1))


def look_closer(
    model: nn.Module, x: Tensor, vocab: int, seed: int, leak: tuple[int, int, float], avoid: int | None
) -> Leaked:
    """The same for a leak that only the gradient shows: in float64, where it is no longer below rounding.

    Not asked in float64 from the start: what a model computes in float32 inside would be taken for a leak.
    """
    with widened(model, x, torch.float64) as runs:
        if runs:
            with quiet(model):
                forward = repeatable(model, seed)
                found = change_suffix(forward, x, vocab, seed, avoid)
                if found.leaks:
                    return look_into(model, forward, x, vocab, found, seed)
    reader, source, share = leak
    return Leaked(None, Pairs(frozenset({(reader, source)}), share), ["soft_mask"] if share < _SOFT else [], x.size(1))
