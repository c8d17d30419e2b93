"""Match the names in a checkpoint with a model's, before anything is copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gpt_guard.checkpoint.fingerprint import plain_name


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
