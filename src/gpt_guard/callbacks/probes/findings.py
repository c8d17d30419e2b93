"""The findings of ModelProbe, and what a leak most likely is: the module that made it, how far ahead it sees."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from gpt_guard.callbacks.probes.batch import Attended, Batch, ShiftedTargets
from gpt_guard.catalogue import finding
from gpt_guard.hooks.isolation.compare import FirstDifference
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Severity
from gpt_guard.records.render import number

_SMALL = 1e-2
"""A change by the future below this share of one by the past is what gets past a mask; without one they are alike."""
_ROUTING = ("moe", "expert", "router", "switch", "gating", "topk")
_ATTENTION = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_BY_MASK = ("no_mask", "off_by_one", "soft_mask", "mask_sense")

Pairs = Iterable[tuple[int, int]]
"""A position and the later one that it reads."""


class Leak(NamedTuple):
    """The largest change before the token that was changed; `readers` are the positions that saw it."""

    change: float
    scale: float
    row: int
    reader: int
    source: int
    readers: list[int]
    share: float


class Mixed(NamedTuple):
    """The largest change of a row that stayed the same itself, and the inputs that made it."""

    change: float
    scale: float
    row: int
    replaced: dict[str, Tensor]


def future_leak(
    watch: Watch, batch: Batch, shift: ShiftedTargets, leak: Leak, blame: FirstDifference | None
) -> Finding:
    """GG660: logits that change with a token which comes later."""
    length = shift.valid.size(shift.time)
    pairs = [(reader, leak.source) for reader in leak.readers]
    attended = next((each for each in batch.attended if blame is not None and _made_by(blame, each)), None)
    bare = attended is not None and not attended.masked
    seen = (
        f"The logits at position {leak.reader} of row {leak.row} change by {number(leak.change)} when token "
        f"{leak.source} alone changes (the largest logit is {number(leak.scale)}), and the loss compares them with the "
        f"token that follows: {len(leak.readers)} positions see {distances(pairs, length)}."
    )
    if bare:
        seen += " The attention call there has neither a mask nor is_causal=True."
    likely = likely_future(watch.model, blame, pairs, leak.share, length)
    likely = ["no_mask", *likely] if bare else likely
    named = blame.named if blame is not None else {}
    if attended is not None and attended.where is not None and likely and likely[0] in _BY_MASK:
        named["where"] = attended.where
    # Experts with a capacity share it between positions, too: true of them by construction.
    fields = {"severity": Severity.INFO} if blame is not None and is_router(blame.module) else {}
    return finding(
        "GG660",
        seen,
        likely=likely,
        step=watch.step,
        moment=Moment.BEFORE_STEP,
        evidence={"change": leak.change, "source": leak.source, "readers": leak.readers[:50]},
        **named,
        **fields,
    )


def _made_by(blame: FirstDifference, call: Attended) -> bool:
    """Whether the call is in the blamed module's own code, or in one of torch's layers that it is made of."""
    torchs = type(blame.module).__module__.startswith("torch.")
    return call.path == blame.path or (torchs and call.path.startswith(f"{blame.path}."))


def mixed_rows(
    watch: Watch,
    mixed: Mixed,
    blame: FirstDifference | None,
    count: int,
    *,
    reshaped: bool = False,
    joined: bool = False,
) -> Finding:
    """GG661: what is answered for one row changes with the others. `joined` where they may be one sequence."""
    likely = likely_rows(watch.model, blame, "others")
    # Experts with a capacity share it between the rows of a batch: true of them by construction.
    fields = {"severity": Severity.INFO} if joined or likely[:1] == ["capacity"] else {}
    return finding(
        "GG661",
        f"What the model answers for row {mixed.row} of {count} changes by {number(mixed.change)} when only other rows "
        f"change (the largest value is {number(mixed.scale)}).",
        likely=["reshape", *likely] if reshaped and likely[:1] != ["capacity"] else likely,
        step=watch.step,
        moment=Moment.BEFORE_STEP,
        evidence={"change": mixed.change, "row": mixed.row},
        **fields,
        **(blame.named if blame is not None else {}),
    )


def growing(watch: Watch, grown: list[str], sizes: list[int], apart: float, *, meant: bool) -> Finding:
    """GG667: what the model keeps in these (`path:attribute`) grows with each call, and changes its answer."""
    path, _, attribute = grown[0].rpartition(":")
    fields = {"severity": Severity.INFO} if meant else {}
    return finding(
        "GG667",
        f"`{attribute}` of {f'`{path}`' if path else 'the model'} holds {', then '.join(f'{n:,}' for n in sizes)} "
        f"elements after one forward more of the same batch each, and the answers differ by {apart:.3g}.",
        likely=["cache"],
        step=watch.step,
        moment=Moment.BEFORE_STEP,
        module=path,
        module_class=type(watch.model.get_submodule(path)).__name__,
        **fields,
        evidence={"sizes": sizes, "attributes": [each.replace(":", ".") for each in grown[:20]]},
    )


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
