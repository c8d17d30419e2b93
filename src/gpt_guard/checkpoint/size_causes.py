"""Which size it is that differs where a checkpoint's shapes do not fit a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from gpt_guard.checkpoint.fingerprint import config_changes
from gpt_guard.checkpoint.fingerprint.naming import printable
from gpt_guard.checkpoint.keys import Clue, Match

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.modules.batchnorm._BatchNorm, nn.GroupNorm)


def size_clues(found: Match, model: nn.Module, saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Clue]:
    """Which size of the model the shapes that differ come from; a config key that explains it is named."""
    if not found.sizes:
        return
    if all(theirs == ours[::-1] and theirs != ours for theirs, ours in found.sizes.values()):
        yield Clue("transposed", f"all {len(found.sizes)} shapes are the model's reversed")
        return
    pairs = Counter(
        (there, here) for theirs, ours in found.sizes.values() for there, here in zip(theirs, ours, strict=False)
        if there != here
    )  # fmt: skip
    keys = {
        f"{printable(key)} is {printable(old)} in the checkpoint's config, {printable(new)} here"
        for key, (old, new) in config_changes(saved, now).items()
        if isinstance(old, int) and isinstance(new, int) and (old, new) in pairs
    }
    because = f" ({'; '.join(sorted(keys))})" if keys else ""
    for cause, what in _roles(found, model):
        there, here = pairs.most_common(1)[0][0] if cause == "width" else what
        yield Clue(cause, f"{_SIZE_WORDS[cause]}: {there} in the checkpoint, {here} in the model{because}")


_SIZE_WORDS = {
    "width": "the embedding's width",
    "vocabulary": "the vocabulary's size",
    "context": "the number of positions",
    "other_size": "a size inside the layers",
}


def _roles(found: Match, model: nn.Module) -> Iterator[tuple[str, tuple[int, int]]]:
    """What the sizes that differ are sizes of, by the kind of module they belong to."""
    modules = dict(model.named_modules())
    owners = {name: modules.get(name.rpartition(".")[0]) for name in found.sizes}
    tables = {
        name: (theirs[0], ours[0])
        for name, (theirs, ours) in found.sizes.items()
        if isinstance(owners[name], nn.Embedding) and len(theirs) == 2 and theirs[0] != ours[0]
    }
    narrow = [name for name in found.sizes if isinstance(owners[name], _NORMS)]
    columns = [
        name
        for name, (theirs, ours) in found.sizes.items()
        if isinstance(owners[name], nn.Embedding) and len(theirs) == 2 and theirs[1] != ours[1]
    ]
    if narrow or columns:
        yield "width", (0, 0)
    heads = {
        (theirs[0], ours[0])
        for name, (theirs, ours) in found.sizes.items()
        if isinstance(owners[name], nn.Linear) and theirs and theirs[0] != ours[0]
    }
    for name, rows in tables.items():
        positions = any(word in name.lower() for word in ("pos", "wpe")) and rows not in heads
        yield ("context" if positions else "vocabulary"), rows
    if not (narrow or columns or tables):
        theirs, ours = next(iter(found.sizes.values()))
        last = next(((t, o) for t, o in zip(theirs, ours, strict=False) if t != o), (len(theirs), len(ours)))
        yield "other_size", last
