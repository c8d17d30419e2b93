"""Match a checkpoint's names and shapes with a model's; where they do not fit, the evidence for each likely cause."""

from __future__ import annotations

import difflib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gpt_guard.checkpoint.fingerprint import config_changes, plain_name
from gpt_guard.records.render import printable


@dataclass(frozen=True)
class Clue:
    """A cause's key in the catalogue, and the sentence that shows it for this checkpoint."""

    cause: str
    text: str


@dataclass
class Match:
    """Which of a checkpoint's tensors goes to which name of the model, and what does not fit.

    `state` holds the tensors under the model's names; the other names are as they stand in the checkpoint or model,
    without wrappers where those had to be taken off.
    """

    state: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, Any] = field(default_factory=dict)
    unexpected: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    kinds: dict[str, tuple[str, str]] = field(default_factory=dict)
    untied: list[tuple[str, str]] = field(default_factory=list)
    unwrapped: bool = False
    total: int = 0

    @property
    def fits(self) -> bool:
        """True where every name has its tensor, and no tensor is left over or of another shape."""
        return not (self.missing or self.unexpected or self.unfit)

    @property
    def unfit(self) -> bool:
        """True where something could not be copied at all, whatever `strict` says."""
        return bool(self.sizes or self.kinds or self.untied)


def match(model: nn.Module, weights: Mapping[str, Any]) -> Match:
    """Match a checkpoint's weights with a model (already unwrapped).

    Names are taken as they are; where they do not all fit, also without the prefixes that wrappers add, on both
    sides, if more fit that way. Reads shapes only; where tied weights stand twice, their values too.
    """
    expected = model.state_dict(keep_vars=True)
    exact = _match(expected, weights, lambda name: name)
    if exact.fits:
        return exact
    bare = _match(expected, weights, plain_name)
    if _left(bare) < _left(exact):
        bare.unwrapped = True
        return bare
    return exact


def _left(found: Match) -> int:
    return len(found.missing) + len(found.unexpected)


def _match(expected: Mapping[str, Any], weights: Mapping[str, Any], to: Callable[[str], str]) -> Match:
    theirs = {to(name): value for name, value in weights.items()}
    ours = {to(name): name for name in expected}
    if len(theirs) < len(weights) or len(ours) < len(expected):  # two names fell into one: this is no renaming
        return Match(missing=dict(expected), unexpected=dict(weights), total=len(expected))
    found = Match(total=len(expected))
    aliases = _aliases(expected, ours)
    for name, model_name in ours.items():
        source = next((other for other in (name, *aliases[name]) if other in theirs), None)
        if source is None:
            found.missing[name] = expected[model_name]
            continue
        found.state[model_name] = theirs[source]
        _judge(found, name, theirs[source], expected[model_name])
    used = {_place(theirs[name]) for name in ours if name in theirs}
    found.unexpected = {
        name: value
        for name, value in theirs.items()
        # A second name for a tensor that is loaded anyway loses nothing: weights that the model ties in its code.
        if name not in ours and (not isinstance(value, Tensor) or _place(value) not in used)
    }
    found.untied = [
        (name, other)
        for name in ours
        for other in aliases[name]
        if name < other and name in theirs and other in theirs and not _equal(theirs[name], theirs[other])
    ]
    return found


def _aliases(expected: Mapping[str, Any], ours: Mapping[str, str]) -> dict[str, list[str]]:
    """For each name, the other names of the very same tensor: tied weights."""
    by_tensor: dict[int, list[str]] = {}
    for name, model_name in ours.items():
        by_tensor.setdefault(id(expected[model_name]), []).append(name)
    return {name: [other for other in group if other != name] for group in by_tensor.values() for name in group}


def _judge(found: Match, name: str, theirs: Any, ours: Any) -> None:
    if not isinstance(ours, Tensor):
        return  # extra state: only the module itself can judge it
    if not isinstance(theirs, Tensor):
        found.kinds[name] = (type(theirs).__name__, str(ours.dtype))
    elif not is_lazy(ours) and theirs.shape != ours.shape:
        found.sizes[name] = (tuple(theirs.shape), tuple(ours.shape))
    elif isinstance(ours, nn.Parameter) and ours.is_floating_point() and not theirs.is_floating_point():
        # copy_ would turn int8 codes into floats without a word.
        found.kinds[name] = (str(theirs.dtype), str(ours.dtype))


def _place(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return id(value)
    return value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride(), value.dtype


def _equal(one: Any, other: Any) -> bool:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return True
    return _place(one) == _place(other) or (one.shape == other.shape and torch.equal(one, other))


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
