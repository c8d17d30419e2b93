"""Why a checkpoint's names and shapes do not fit a model: the evidence for each likely cause."""

from __future__ import annotations

import difflib
import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from gpt_guard.checkpoint.fingerprint.naming import printable
from gpt_guard.checkpoint.keys import Clue, Match
from gpt_guard.checkpoint.size_causes import size_clues

SAMPLE = 50
MAX_CANDIDATES = 200
"""Bounds on how many names are compared with how many: a file's author chooses its names."""


def clues(found: Match, model: nn.Module, saved: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> list[Clue]:
    """Return the likely causes in order, strongest first."""
    prefixed = list(_prefix(found))
    if found.total and len(found.missing) == found.total and len(found.unexpected) > 0:
        return (
            prefixed
            or list(_renamed(found))
            or [Clue("other_model", "no name in the checkpoint is one of the model's")]
        )
    return [
        *prefixed,
        *_layers(found, model),
        *size_clues(found, model, saved or {}, now or {}),
        *_kinds(found),
        *_tied(found),
        *_adapter(found),
        *_bias(found),
        *_buffers(found, model),
        *([] if prefixed else _renamed(found)),
    ]


def _prefix(found: Match) -> Iterator[Clue]:
    """One side's names are the other's behind something."""
    for longer, shorter, where in (
        (found.unexpected, found.missing, "the checkpoint's"),
        (found.missing, found.unexpected, "the model's"),
    ):
        sample = list(shorter)[:SAMPLE]  # names in a file can be many; each of these is compared with all others
        fronts = Counter(name.removesuffix(short) for short in sample for name in longer if name.endswith(f".{short}"))
        for prefix, _ in fronts.most_common(1):
            count = sum(_kind(short, w) == _kind(short, longer.get(f"{prefix}{short}")) for short, w in shorter.items())
            if 2 * count > len(shorter):
                shown = printable(prefix)
                new = f'name.removeprefix("{shown}")' if longer is found.unexpected else f'"{shown}" + name'
                yield Clue(
                    "prefix",
                    f"{count} of {where} names fit but for the prefix `{shown}`; "
                    f"rename with {{{new}: weight for name, weight in state.items()}}",
                )


def _layers(found: Match, model: nn.Module) -> Iterator[Clue]:
    """Numbered submodules of which one side has more."""
    present = {path for path, _ in model.named_modules()}
    theirs, ours = _numbers(found.unexpected), _numbers(found.missing)
    for container in sorted({*theirs, *ours}):
        if container not in present:
            continue
        inside = model.get_submodule(container)
        have = {int(name) for name, _ in inside.named_children() if name.isdigit()}
        extra = theirs.get(container, set()) - have
        lost = {
            number
            for number in ours.get(container, set())
            if f"{container}.{number}" in present and _all_missing(found, model, f"{container}.{number}")
        }
        # With all of them gone it is another name for the container, not another count.
        if lost != have and (extra or lost) and not (extra and lost):
            count = len(have) + len(extra) - len(lost)
            yield Clue("layers", f"the checkpoint has {count} of `{printable(container)}.N`, the model {len(have)}")


def _numbers(names: Mapping[str, Any]) -> dict[str, set[int]]:
    """`blocks.3.mlp.weight` says that `blocks` has a 3; only the outermost number counts."""
    found: dict[str, set[int]] = {}
    for name in names:
        segments = name.split(".")
        for index, segment in enumerate(segments[1:], start=1):
            if segment.isdecimal() and len(segment) < 6:
                found.setdefault(".".join(segments[:index]), set()).add(int(segment))
                break
    return found


def _all_missing(found: Match, model: nn.Module, path: str) -> bool:
    return all(f"{path}.{name}" in found.missing for name in model.get_submodule(path).state_dict())


def _kinds(found: Match) -> Iterator[Clue]:
    for name, (theirs, ours) in list(found.kinds.items())[:1]:
        yield Clue("integers", f"{printable(name)} is {theirs} in the checkpoint, {ours} in the model")


def _tied(found: Match) -> Iterator[Clue]:
    for one, other in found.untied[:1]:
        yield Clue("tied", f"the model ties {one} to {other}, but the checkpoint holds two different tensors")


def _adapter(found: Match) -> Iterator[Clue]:
    for names, where in ((found.missing, "the model"), (found.unexpected, "the checkpoint")):
        if count := sum("lora_" in name or "adapter" in name for name in names):
            yield Clue("adapter", f"{count} adapter weights are in {where} only")


def _bias(found: Match) -> Iterator[Clue]:
    for names, where in ((found.missing, "the model"), (found.unexpected, "the checkpoint")):
        if names and all(name.endswith("bias") for name in names):
            yield Clue("bias", f"only {where} has these {len(names)} biases")


def _buffers(found: Match, model: nn.Module) -> Iterator[Clue]:
    made = {name for name, _ in model.named_buffers()}
    if own := [name for name in found.unexpected if name in made]:
        yield Clue("buffer", f"{printable(own[0])} is a buffer that the model makes itself")


def _renamed(found: Match) -> Iterator[Clue]:
    """The one change of a path that explains most, by shape and by likeness of names."""
    changes: Counter[tuple[str, str]] = Counter()
    alike: dict[Any, list[str]] = {}
    for name, value in found.unexpected.items():
        alike.setdefault(_kind(name, value), []).append(name)
    for name, value in list(found.missing.items())[:SAMPLE]:
        candidates = alike.get(_kind(name, value), [])[:MAX_CANDIDATES]
        if candidates:
            best = max(candidates, key=functools.partial(_likeness, name))
            changes[_change(best, name)] += 1
    for (old, new), _ in changes.most_common(1):
        before = {name: f".{name}.".replace(f".{new}.", f".{old}.")[1:-1] for name in found.missing}
        count = sum(
            _kind(name, found.missing[name]) == _kind(name, found.unexpected.get(other))
            for name, other in before.items()
        )
        yield Clue(
            "renamed",
            f"`{printable(old)}` in the checkpoint fits `{printable(new)}` in the model: "
            f"{count} of {len(found.missing)} missing names and shapes",
        )


def _kind(name: str, value: Any) -> tuple[str, Any]:
    """What two tensors have in common that are the same weight under two names."""
    return name.rpartition(".")[2], tuple(value.shape) if isinstance(value, Tensor) else None


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other, autojunk=False).ratio()


def _change(old: str, new: str) -> tuple[str, str]:
    """What is left of two paths without the segments that they begin and end with alike."""
    theirs, ours = old.split("."), new.split(".")
    while len(theirs) > 1 and len(ours) > 1 and theirs[-1] == ours[-1]:
        del theirs[-1], ours[-1]
    while len(theirs) > 1 and len(ours) > 1 and theirs[0] == ours[0]:
        del theirs[0], ours[0]
    return ".".join(theirs), ".".join(ours)
