"""Refuse weights that do not fit before the first copy, then copy them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gpt_guard.checkpoint.causes import clues
from gpt_guard.checkpoint.fingerprint import plain_name
from gpt_guard.checkpoint.fingerprint.naming import printable, some
from gpt_guard.checkpoint.keys import Match, match
from gpt_guard.checkpoint.layout import Stored
from gpt_guard.checkpoint.say import Voice

MAX_LISTED = 200
"""Names of one kind that a finding's evidence lists."""


def fit_weights(
    model: nn.Module, stored: Stored, config: Mapping[str, Any] | None, strict: bool, voice: Voice
) -> Match:
    """Match a checkpoint with a model; refuse (GG705) what does not fit. Changes nothing.

    A module that reads old checkpoints in a way of its own is asked in a trial, on which its weights are put back.
    """
    found = match(model, stored.weights)
    if found.unwrapped and found.fits:
        prefixes = sorted({name.removesuffix(plain_name(name)) for name in stored.weights} - {""})
        where = f"names in the checkpoint carry `{printable(prefixes[0])}`" if prefixes else "the model is wrapped"
        seen = f"{where}: matched without the wrapper's prefix, all {found.total} fit ({stored.path})"
        voice.say("GG705", seen, title="The names carry a wrapper's prefix", severity="info", likely=["prefix"])
    if found.fits or _takes(model, found, stored):
        return found
    evidence = clues(found, model, stored.config, config)
    seen = _seen(found, stored, "; ".join(clue.text for clue in evidence))
    fields: dict[str, Any] = {"likely": [clue.cause for clue in evidence], "evidence": _evidence(found)}
    if strict or found.unfit:
        voice.refuse("GG705", f"nothing was loaded: {seen}", **fields)
    voice.say("GG705", f"loaded in part (strict=False): {seen}", severity="warning", **fields)
    return found


def copy_weights(model: nn.Module, found: Match, stored: Stored, strict: bool, voice: Voice) -> None:
    """Copy matched weights into the model, in place."""
    state = _with_versions(found, stored)
    try:
        model.load_state_dict(state, strict=strict and found.fits)
    except RuntimeError as error:
        lines = [printable(line.strip(), 200) for line in str(error).splitlines()[1:4]]
        seen = f"{type(model).__name__} does not take the weights in {stored.path}: {' '.join(lines)}"
        voice.refuse("GG705", seen, because=error)


def _takes(model: nn.Module, found: Match, stored: Stored) -> bool:
    """Let torch itself try, where a module has its own way to load: an old BatchNorm, a rename by a pre-hook."""
    own_way = any(map(_has_its_own_way, model.modules()))
    # A lazy module takes its shapes from what it loads, which could not be put back.
    if found.untied or found.kinds or not own_way or any(map(is_lazy, model.parameters())):
        return False
    before = {
        name: (value, value.detach().clone())
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor)
    }
    whole = OrderedDict({**found.state, **found.unexpected})
    try:
        rejected = model.load_state_dict(_versioned(whole, found, stored), strict=False)
        accepted = not rejected.missing_keys and not rejected.unexpected_keys
    except (RuntimeError, KeyError, AttributeError, TypeError):
        accepted = False
    finally:
        with torch.no_grad():
            for value, old in before.values():
                value.copy_(old)
    if accepted:
        found.state = dict(whole)
        found.unexpected = {}
    return accepted


def _has_its_own_way(module: nn.Module) -> bool:
    own = type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
    return own or bool(module._load_state_dict_pre_hooks)


def _with_versions(found: Match, stored: Stored) -> OrderedDict[str, Any]:
    return _versioned(OrderedDict(found.state), found, stored)


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
