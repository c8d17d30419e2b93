"""What a leak most likely is: the kind of module that made it, how far ahead it sees, and when it shows."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from gpt_guard.hooks.isolation.compare import FirstDifference

_SMALL = 1e-2
"""A change by the future below this share of one by the past is what gets past a mask; without one they are alike."""
_ROUTING = ("moe", "expert", "router", "switch", "gating", "topk")
_ATTENTION = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


Pairs = Iterable[tuple[int, int]]
"""A position and the later one that it reads."""


def likely_future(
    model: nn.Module, blame: FirstDifference | None, pairs: Pairs, share: float, length: int
) -> list[str]:
    """Cause keys of GG660, the likeliest first: from who reads whom, and how much by the past's share."""
    seen = list(pairs)
    farthest = max((source - reader for reader, source in seen), default=0)
    # Each layer that sees one token too far adds one to the distance.
    layers = sum(type(module) is type(blame.module) for module in model.modules()) if blame is not None else 1
    by_kind = _future_by_kind(blame.module) if blame is not None else []
    if by_kind and by_kind[0] in ("bidirectional", "norm_over_time", "batch_norm", "conv_padding"):
        return by_kind
    if 0 < farthest <= layers and farthest < length - 1:
        return ["off_by_one", *by_kind]
    if 0 < farthest <= min(8, length // 3):
        return ["conv_padding", "off_by_one", *by_kind]
    if share < _SMALL:
        return ["soft_mask", *by_kind, "no_mask"]
    # Without a mask every position reads every later one; mixed-up dimensions leave some out.
    if seen and len(seen) < sum({source for _, source in seen}):
        return [*by_kind, "reshape", "no_mask"]
    return [*by_kind, "no_mask"]


def _future_by_kind(module: nn.Module) -> list[str]:
    if isinstance(module, nn.RNNBase):
        return ["bidirectional"]
    if isinstance(module, _BatchNorm):
        return ["batch_norm"]
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _InstanceNorm)):
        return ["norm_over_time"]
    if isinstance(module, (nn.Conv1d, nn.Conv2d)):
        return ["conv_padding"]
    if isinstance(module, _ATTENTION):
        return ["no_mask", "mask_sense"]
    name = type(module).__name__.lower()
    if is_router(module):
        return ["routing"]
    if "norm" in name:
        return ["norm_over_time"]
    if "conv" in name:
        return ["conv_padding"]
    return []


def likely_rows(model: nn.Module, blame: FirstDifference | None, how: str) -> list[str]:
    """Cause keys of GG661, the likeliest first. `how` is "moved" where only the place of a row made the difference."""
    if how == "moved":
        return ["row_index", "capacity"] if not _routes(blame) else ["capacity", "row_index"]
    if blame is None:
        return ["capacity"] if any(is_router(module) for module in model.modules()) else []
    module = blame.module
    if isinstance(module, _BatchNorm):
        return ["batch_norm"]
    if isinstance(module, (*_ATTENTION, nn.RNNBase)):
        first = bool(getattr(module, "batch_first", False))
        return ["norm_over_batch"] if first else ["batch_first"]
    if _routes(blame):
        return ["capacity"]
    if "norm" in type(module).__name__.lower():
        return ["norm_over_batch"]
    if "att" in type(module).__name__.lower():
        return ["reshape", "norm_over_batch"]
    return ["norm_over_batch", "reshape"]


def _routes(blame: FirstDifference | None) -> bool:
    return blame is not None and is_router(blame.module)


def is_router(module: nn.Module) -> bool:
    """Whether a module, by its name or by those of its parts, sends tokens to experts."""
    parts = (name.lower() for name, _ in module.named_children())
    named = any(word in type(module).__name__.lower() for word in _ROUTING)
    return named or any("expert" in name or "router" in name for name in parts)


def distances(pairs: Pairs, length: int) -> str:
    """The distances in words: "the next token", "later tokens, +1, +2", "later tokens at every distance"."""
    seen = sorted({source - reader for reader, source in pairs})
    if not seen:
        return "later tokens"
    if seen == [1]:
        return "the next token (+1) only"
    if seen[-1] >= length - 2:
        return f"later tokens at every distance (+{seen[0]} to +{seen[-1]})"
    return f"later tokens, {', '.join(f'+{each}' for each in seen[:6])}{', ...' if len(seen) > 6 else ''}"
