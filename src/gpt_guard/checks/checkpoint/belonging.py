"""Does a checkpoint belong to what is in use: its config, its digests and its optimizer state against those here."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_guard.catalogue import finding
from gpt_guard.checkpoint.belongs import model_config, verify
from gpt_guard.checkpoint.fingerprint import (
    Difference,
    Fingerprint,
    config_changes,
    config_dict,
    tokenizer_digest,
    unwrap,
)
from gpt_guard.checkpoint.fingerprint.record import tokenizer_finding
from gpt_guard.checkpoint.optimizer_state import misfits, parameter_names
from gpt_guard.checkpoint.read import Stored
from gpt_guard.checkpoint.reporter import Reporter
from gpt_guard.checks.checkpoint.reload import eval_logits, load_weights
from gpt_guard.checks.runner.base import Subject
from gpt_guard.checks.runner.forward import in_form_of, plain_device
from gpt_guard.errors import CheckpointError, GuardUsageError
from gpt_guard.hooks.isolation.compare import difference, rounding
from gpt_guard.hooks.isolation.preserve import preserved
from gpt_guard.hooks.optimizer import unwrap as plain_optimizers
from gpt_guard.records import Finding, Severity


def config_of(subject: Subject) -> dict[str, Any] | None:
    """The config in use as a plain dict, or None where there is none that can be read."""
    if subject.model is None:
        return None
    with contextlib.suppress(GuardUsageError):
        return model_config(subject.model, subject.config)
    return None


def differing(stored: Stored, subject: Subject) -> dict[str, tuple[Any, Any]] | None:
    """The settings that differ between the saved config and the one in use; None where one of them is not there."""
    now = config_of(subject)
    if stored.config is None or now is None:
        return None
    return config_changes(config_dict(stored.config), now)


def same_answers(stored: Stored, model: nn.Module, config: Any, x: Tensor | None, seed: int) -> bool | None:
    """Whether the checkpoint's weights give the same logits in a model of the saved config as in the one in use.

    None where no model can be built from the saved config. The model in use gets the weights for a moment.
    """
    bare = unwrap(model)
    other = next(_built(stored, bare, config), None) if x is not None else None
    if other is None or x is None:
        return None
    with preserved(bare):
        try:
            here, there = (_answer(each, stored, x, seed) for each in (bare, in_form_of(other, bare)))
        except CheckpointError:
            return None
    if here.shape != there.shape:
        return False
    return bool(difference(plain_device(here), plain_device(there)).max() <= rounding(here))


def fingerprint_findings(stored: Stored, subject: Subject) -> tuple[list[str], list[Finding]]:
    """The parts whose digests agree, and what is to be said of the others: GG701, GG703, or GG704 where there is none.

    A digest of the tokenizer that a script made in a way of its own cannot be compared here.
    """
    reporter = Reporter(lambda found: None)
    agreed = verify(
        stored, reporter, tokenizer=None, config=None, config_given=False, fingerprint=Fingerprint(), ignore_config=()
    )
    parts, found = [*agreed], list(reporter.findings)
    theirs, tokenizer = stored.stamp.parts.get("tokenizer"), subject.tokenizer
    if tokenizer is None or theirs is None:
        return parts, found
    with contextlib.suppress(GuardUsageError):
        ours = tokenizer_digest(tokenizer.tokens or tokenizer.raw)
        if ours == theirs:
            parts.insert(0, "tokenizer")
        elif "tokenizer" in stored.stamp.fingerprint or stored.stamp.tokenizer_chars is not None:
            difference_ = Difference(part="tokenizer", ours=ours, theirs=theirs)
            tokens = list(tokenizer.tokens) or None
            where = f"the checkpoint {stored.path}"
            found.append(tokenizer_finding(difference_, where, stored.stamp.tokenizer_chars, tokens))
        else:
            seen = f"{stored.path} names its tokenizer by {theirs[:12]}, a digest of another kind: not compared here"
            found.append(finding("GG704", seen, likely=["foreign"], severity=Severity.INFO))
    return parts, found


def file_misfit(stored: Stored, model: nn.Module, optimizer: Optimizer) -> Finding | None:
    """GG708 where the state in a file is not that of this optimizer: groups, counts, order, shapes, kind."""
    optimizers = plain_optimizers(optimizer)
    if len(optimizers) != len(stored.optimizers):
        seen = f"{stored.path} holds the state of {len(stored.optimizers)} optimizers, {len(optimizers)} are given"
        return finding("GG708", seen, likely=["groups"])
    saved, names = stored.stamp.optimizer_parameters, parameter_names(unwrap(model), optimizers)
    for index, (one, state) in enumerate(zip(optimizers, stored.optimizers, strict=True)):
        theirs = saved[index] if saved is not None and index < len(saved) else None
        if clues := misfits(state, theirs, names[index], one):
            seen = f"{type(one).__name__}: {'; '.join(clue.text for clue in clues)} ({stored.path})"
            return finding("GG708", seen, likely=[clue.cause for clue in clues])
    return None


def _built(stored: Stored, model: nn.Module, config: Any) -> Iterator[nn.Module]:
    """Models of the same class from the saved settings, in the ways that constructors commonly take them."""
    saved = dict(stored.config or {})
    kind = type(config) if config is not None and not isinstance(config, Mapping) else None
    ways: list[Callable[[], nn.Module]] = [lambda: type(model)(**saved), lambda: type(model)(saved)]
    if kind is not None:
        # The file may hold keys of the run beside those of the model.
        known = inspect.signature(kind).parameters
        own = {key: value for key, value in saved.items() if key in known}
        ways = [lambda: type(model)(kind(**saved)), lambda: type(model)(kind(**own)), *ways]
    for way in ways:
        with preserved(), contextlib.suppress(Exception):  # the user's own constructor refuses in its own way
            torch.manual_seed(0)
            yield way()


def _answer(model: nn.Module, stored: Stored, x: Tensor, seed: int) -> Tensor:
    load_weights(model, stored)
    return eval_logits(model, x, seed)
