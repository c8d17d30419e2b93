"""A model's weights and a checkpoint's: which go together, which are not finite, and the copy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gpt_guard.checkpoint.fingerprint import plain_name
from gpt_guard.checkpoint.match import Match, clues, match
from gpt_guard.checkpoint.read import Stored
from gpt_guard.checkpoint.reporter import Reporter
from gpt_guard.records import Record
from gpt_guard.records.render import printable, some

MAX_LISTED = 200
"""Names of one kind that a finding's evidence lists."""


def fit_weights(
    model: nn.Module, stored: Stored, config: Mapping[str, Any] | None, strict: bool, reporter: Reporter
) -> Match:
    """Match a checkpoint with a model; refuse (GG705) what does not fit. Changes nothing.

    A module that reads old checkpoints in a way of its own is asked in a trial, on which its weights are put back.
    """
    found = match(model, stored.weights)
    if found.unwrapped and found.fits:
        prefixes = sorted({name.removesuffix(plain_name(name)) for name in stored.weights} - {""})
        where = f"names in the checkpoint carry `{printable(prefixes[0])}`" if prefixes else "the model is wrapped"
        seen = f"{where}: matched without the wrapper's prefix, all {found.total} fit ({stored.path})"
        reporter.say("GG705", seen, title="The names carry a wrapper's prefix", severity="info", likely=["prefix"])
    if found.fits or _takes(model, found, stored):
        return found
    evidence = clues(found, model, stored.config, config)
    seen = _seen(found, stored, "; ".join(clue.text for clue in evidence))
    fields: dict[str, Any] = {"likely": [clue.cause for clue in evidence], "evidence": _evidence(found)}
    if strict or found.unfit:
        reporter.refuse("GG705", f"nothing was loaded: {seen}", **fields)
    reporter.say("GG705", f"loaded in part (strict=False): {seen}", severity="warning", **fields)
    return found


def copy_weights(model: nn.Module, found: Match, stored: Stored, strict: bool, reporter: Reporter) -> None:
    """Copy matched weights into the model, in place; where one of them cannot be copied, all are as before.

    For that long the old weights are kept a second time, in the memory of the host.
    """
    state = _versioned(OrderedDict(found.state), found, stored)
    before = _kept(model)
    try:
        model.load_state_dict(state, strict=strict and found.fits)
    except BaseException as error:
        _put_back(before)
        if not isinstance(error, (RuntimeError, TypeError, ValueError, KeyError, AttributeError)):
            raise
        lines = [printable(line.strip(), 200) for line in str(error).splitlines()[:4] if line.strip()]
        seen = f"{type(model).__name__} does not take the weights in {stored.path}: {' '.join(lines[-3:])}"
        reporter.refuse("GG705", seen, because=error)


def _kept(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """The tensors of a model's state, each with a copy; a lazy one has no values, and one on `meta` neither."""
    values = (value for value in model.state_dict(keep_vars=True).values() if isinstance(value, Tensor))
    return [(value, value.detach().to("cpu", copy=True)) for value in values if not (is_lazy(value) or value.is_meta)]


@torch.no_grad()
def _put_back(before: list[tuple[Tensor, Tensor]]) -> None:
    for value, old in before:
        value.copy_(old)


def _takes(model: nn.Module, found: Match, stored: Stored) -> bool:
    """Let torch itself try, where a module has its own way to load: an old BatchNorm, a rename by a pre-hook."""
    own_way = any(map(_has_its_own_way, model.modules()))
    # A lazy module takes its shapes from what it loads, which could not be put back.
    if found.untied or found.kinds or not own_way or any(map(is_lazy, model.parameters())):
        return False
    before = _kept(model)
    whole = OrderedDict({**found.state, **found.unexpected})
    try:
        rejected = model.load_state_dict(_versioned(whole, found, stored), strict=False)
        accepted = not rejected.missing_keys and not rejected.unexpected_keys
    except (RuntimeError, KeyError, AttributeError, TypeError):
        accepted = False
    finally:
        _put_back(before)
    if accepted:
        found.state = dict(whole)
        found.unexpected = {}
    return accepted


def _has_its_own_way(module: nn.Module) -> bool:
    own = type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
    return own or bool(module._load_state_dict_pre_hooks)


def _versioned(state: OrderedDict[str, Any], found: Match, stored: Stored) -> OrderedDict[str, Any]:
    """Give a state the versions that torch saved beside it: by them modules know an old layout."""
    versions = getattr(stored.weights, "_metadata", None)
    if isinstance(versions, Mapping) and all(isinstance(value, Mapping) for value in versions.values()):
        names = {plain_name(f"{key}.").removesuffix(".") if found.unwrapped else key: key for key in map(str, versions)}
        state._metadata = OrderedDict((name, versions[key]) for name, key in names.items())  # type: ignore[attr-defined]
    return state


def _seen(found: Match, stored: Stored, why: str) -> str:
    parts = []
    if found.missing:
        parts.append(f"{len(found.missing)} of {found.total} names are missing ({some(found.missing)})")
    if found.unexpected:
        parts.append(f"{len(found.unexpected)} are unexpected ({some(found.unexpected)})")
    if found.sizes:
        shown = [
            f"{printable(name)} {list(theirs)} in the checkpoint, {list(ours)} in the model"
            for name, (theirs, ours) in list(found.sizes.items())[:3]
        ]
        parts.append(f"{len(found.sizes)} have another size ({'; '.join(shown)})")
    if found.kinds:
        parts.append(f"{len(found.kinds)} are of another kind ({some(found.kinds)})")
    if found.untied:
        parts.append(f"{len(found.untied)} tied weights differ ({some(found.untied[0])})")
    return f"{', '.join(parts)} in {stored.path}" + (f". Likely: {why}" if why else "")


def _evidence(found: Match) -> dict[str, Any]:
    return {
        "missing": [printable(name) for name in list(found.missing)[:MAX_LISTED]],
        "unexpected": [printable(name) for name in list(found.unexpected)[:MAX_LISTED]],
        "sizes": {
            printable(name): {"checkpoint": list(theirs), "model": list(ours)}
            for name, (theirs, ours) in list(found.sizes.items())[:MAX_LISTED]
        },
        "kinds": {printable(name): list(kinds) for name, kinds in list(found.kinds.items())[:MAX_LISTED]},
        "tied": [list(pair) for pair in found.untied[:MAX_LISTED]],
    }


class NonFiniteCount(Record):
    """How many elements of a tensor are not finite."""

    nan: int
    pos_inf: int
    neg_inf: int
    numel: int

    def __str__(self) -> str:
        kinds = {"NaN": self.nan, "+inf": self.pos_inf, "-inf": self.neg_inf}
        return ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count) + f" of {self.numel}"


def non_finite(tensors: Mapping[str, Any], masks: frozenset[str] = frozenset()) -> dict[str, NonFiniteCount]:
    """Return the counts for every tensor that holds NaN or infinity, by name.

    For a name in `masks` -inf alone is taken for an attention mask. Expects tensors on the CPU, where reading is free.
    """
    found: dict[str, NonFiniteCount] = {}
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


def listing(found: Mapping[str, NonFiniteCount], limit: int = 4) -> str:
    """Return the first few names with their counts, for a sentence."""
    shown = [f"{printable(name)} ({count})" for name, count in list(found.items())[:limit]]
    return ", ".join(shown) + (f" and {len(found) - limit} more" if len(found) > limit else "")


def _count(value: Tensor) -> NonFiniteCount | None:
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
    return NonFiniteCount(nan=nan, pos_inf=pos_inf, neg_inf=neg_inf, numel=value.numel()) if bad else None
