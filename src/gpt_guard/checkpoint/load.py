"""Load a checkpoint: verify everything first, then copy; never half a model without a word."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic import Field
from torch import nn
from torch.optim import Optimizer

from gpt_guard.checkpoint.belongs import model_config, verify
from gpt_guard.checkpoint.fingerprint import Fingerprint, unwrap
from gpt_guard.checkpoint.optimizer_state import misfits, move_to_parameters, parameter_names
from gpt_guard.checkpoint.read import Stored, read_payload, take_apart
from gpt_guard.checkpoint.reporter import OnFinding, Reporter, checked_path
from gpt_guard.checkpoint.weights import copy_weights, fit_weights, listing, non_finite
from gpt_guard.hooks.optimizer import unwrap as plain_optimizers
from gpt_guard.records import Finding, Record
from gpt_guard.records.render import some


class LoadedCheckpoint(Record):
    """What a checkpoint held beside the states that were loaded, and what was found about it."""

    path: str
    step: int | None = None
    config: dict[str, Any] | None = None
    fingerprint: dict[str, str] = Field(default_factory=dict)
    verified: tuple[str, ...] = Field((), description="parts whose digests agreed")
    findings: tuple[Finding, ...] = ()
    guard_state: dict[str, Any] = Field(default_factory=dict, repr=False)
    extra: dict[str, Any] = Field(default_factory=dict, repr=False)


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    tokenizer: Any = None,
    *,
    config: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    fingerprint: Fingerprint | None = None,
    strict: bool = True,
    ignore_config: Collection[str] = (),
    on_finding: OnFinding | None = None,
    max_bytes: int | None = None,
) -> LoadedCheckpoint:
    """Load a checkpoint of `save_checkpoint`, or of any common layout, into a model and what belongs to its training.

    The file is read as data (`weights_only=True`) onto the CPU; states then go to where each parameter is. Compared
    are the tokenizer, the config (given, or the model's `.config`, without the keys in `ignore_config`), the digests
    of weights and optimizer state recorded in the file, and the parts of `fingerprint` (data files, texts). Names may
    carry the prefixes of wrappers (`module.`, `_orig_mod.`) on either side: they are matched without them, and it is
    said. Everything is verified before the first copy: after an error, model, optimizer and scheduler are as before.

    `strict=False` accepts missing and unexpected names (as a warning), an absent optimizer state, but never other
    shapes. Without `on_finding`, errors raise and the rest is logged; with it the caller decides about mismatches,
    while what cannot be loaded raises all the same. Weights that are not finite are a warning: one may want to look
    at them. `max_bytes` limits the file's size; by default it is this machine's memory.

    Raises FingerprintMismatch (GG701 to GG703) or CheckpointError (GG705, GG707, GG708).
    """
    reporter = Reporter(on_finding)
    path = checked_path("load_checkpoint", path, model)
    bare = unwrap(model)
    optimizers = plain_optimizers(optimizer)
    stored = take_apart(path, read_payload(path, reporter, max_bytes), reporter)
    settings = model_config(bare, config)
    verified = verify(
        stored,
        reporter,
        tokenizer=tokenizer,
        config=settings,
        config_given=config is not None,
        fingerprint=fingerprint or Fingerprint(),
        ignore_config=ignore_config,
    )
    found = fit_weights(bare, stored, settings, strict, reporter)
    _check_optimizers(bare, stored, optimizers, strict, reporter)
    schedulers, scalers = _listed(scheduler), _listed(scaler)
    _check_parts(stored, "scheduler", schedulers, stored.schedulers, reporter)
    _check_parts(stored, "scaler", scalers, stored.scalers, reporter)
    _warn_of_non_finite(bare, stored, found.state, reporter)
    parts = (*zip(schedulers, stored.schedulers, strict=False), *zip(scalers, stored.scalers, strict=False))
    with _Undo(*optimizers, *(part for part, _ in parts)) as undo:
        for one, state in zip(optimizers, stored.optimizers, strict=False):
            _load_part(one, state, stored, reporter)
            move_to_parameters(one)
        for part, saved in parts:
            _load_part(part, saved, stored, reporter)
        copy_weights(bare, found, stored, strict, reporter)
        undo.keep()
    return LoadedCheckpoint(
        path=str(path),
        step=stored.step,
        config=stored.config,
        fingerprint=stored.stamp.parts,
        verified=verified,
        findings=tuple(reporter.findings),
        guard_state=stored.stamp.gpt_guard,
        extra=stored.extra,
    )


class _Undo:
    """Gives optimizers, schedulers and scalers their old state back if the block does not end with `keep()`."""

    def __init__(self, *parts: Any) -> None:
        self._old = [(part, part.state_dict()) for part in parts]

    def keep(self) -> None:
        self._old = []

    def __enter__(self) -> _Undo:
        return self

    def __exit__(self, *_: object) -> None:
        for part, state in self._old:
            part.load_state_dict(state)


def _check_optimizers(
    model: nn.Module, stored: Stored, optimizers: tuple[Optimizer, ...], strict: bool, reporter: Reporter
) -> None:
    there, here = len(stored.optimizers), len(optimizers)
    if here and not there:
        seen = f"{stored.path} holds no optimizer state; {here} optimizer(s) would start afresh"
        if strict:
            reporter.refuse("GG708", seen, known=["absent"])
        reporter.say("GG708", seen, known=["absent"], severity="warning")
    elif here and here != there:
        reporter.refuse(
            "GG708", f"{stored.path} holds the state of {there} optimizers, {here} are given", known=["groups"]
        )
    saved = stored.stamp.optimizer_parameters
    names = parameter_names(model, optimizers)
    for index, (one, state) in enumerate(zip(optimizers, stored.optimizers, strict=False)):
        theirs = saved[index] if saved is not None and index < len(saved) else None
        if clues := misfits(state, theirs, names[index], one):
            which = f" number {index}" if here > 1 else ""
            seen = f"{type(one).__name__}{which}: {'; '.join(clue.text for clue in clues)} ({stored.path})"
            reporter.refuse("GG708", seen, known=[clue.cause for clue in clues])


def _listed(part: Any) -> list[Any]:
    if part is None:
        return []
    return list(part) if isinstance(part, (list, tuple)) else [part]


def _check_parts(
    stored: Stored, name: str, parts: list[Any], states: Sequence[Mapping[str, Any]], reporter: Reporter
) -> None:
    """A scheduler takes any dict for its attributes, so that the state of another kind must be seen here."""
    if parts and not states:
        seen = f"{stored.path} holds no {name} state: the {name} starts afresh"
        reporter.say("GG708", seen, known=["absent"], severity="warning", cause_id=name)
        return
    if parts and len(parts) != len(states):
        seen = f"{stored.path} holds the state of {len(states)} {name}s, {len(parts)} are given"
        reporter.refuse("GG708", seen, known=["scheduler"])
    for part, state in zip(parts, states, strict=False):
        ours = part.state_dict()
        more, less = sorted(state.keys() - ours.keys()), sorted(ours.keys() - state.keys())
        # A key that is no state of a scheduler but one of its other attributes would replace that.
        if more and (less or (name == "scheduler" and any(hasattr(part, key) for key in more))):
            seen = f"{name} state in {stored.path} is not that of a {type(part).__name__}: it has {some(more)}"
            reporter.refuse("GG708", seen + (f" and lacks {some(less)}" if less else ""), known=["scheduler"])


def _warn_of_non_finite(model: nn.Module, stored: Stored, state: Mapping[str, Any], reporter: Reporter) -> None:
    masks = frozenset(name for name, _ in model.named_buffers())
    if bad := non_finite(state, masks=masks):
        reporter.say(
            "GG706",
            f"{len(bad)} of {len(state)} tensors in {stored.path} are not finite: {listing(bad)}",
            likely=["saved_bad"],
            severity="warning",
            parameter=next(iter(bad)),
            evidence={"non_finite": {name: count.model_dump() for name, count in bad.items()}},
        )


def _load_part(part: Any, state: dict[str, Any], stored: Stored, reporter: Reporter) -> None:
    try:
        part.load_state_dict(state)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        seen = f"{type(part).__name__} does not take the state in {stored.path}: {error}"
        reporter.refuse("GG708", seen, likely=["kind"], because=error)
