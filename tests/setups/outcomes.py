"""What watching a set-up shows: four runs of each, judged column by column."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import torch

from . import frameworks, loops, optimizers
from .parts import BREAKS_AT, COLUMNS, Setup, Trial, true

# Compiled models and several processes have files of their own: add their SETUPS here.
SETUPS: tuple[Setup, ...] = (*loops.SETUPS, *optimizers.SETUPS, *frameworks.SETUPS)


def installed(setup: Setup) -> bool:
    return setup.missing is None or find_spec(setup.missing) is not None


@cache
def outcome(setup: Setup) -> dict[str, str]:
    """By column: "yes", or what was seen instead."""
    with _quiet():
        bare = Trial(watched=False).run(setup.train)
        healthy = Trial().run(setup.train)
        broken = Trial(breaks=True).run(setup.train)
        leaking = Trial(leaks=True).run(setup.train)
    answers = (_silent(healthy), _halts(setup, broken), _found(leaking), _norm(healthy), _detached(healthy, broken),
               _identical(healthy, bare))  # fmt: skip
    return dict(zip(COLUMNS, answers, strict=True))


def _silent(trial: Trial) -> str:
    assert trial.guardian is not None
    return ", ".join(found.code for found in trial.guardian.findings) or "yes"


def _halts(setup: Setup, trial: Trial) -> str:
    found = trial.halted
    if found is None:
        return "went on"
    assert trial.guardian is not None
    wrong = []
    if found.module != setup.place:
        wrong.append(f"names {found.module}")
    if found.step != BREAKS_AT:
        wrong.append(f"at step {found.step}")
    now = [parameter.detach() for parameter in trial.model.parameters()]
    if not all(torch.equal(before, after) for before, after in zip(trial.before, now, strict=True)):
        wrong.append("after an update")
    return ", ".join(wrong) or "yes"


def _found(trial: Trial) -> str:
    assert trial.guardian is not None
    codes = [found.code for found in trial.guardian.findings]
    return "yes" if codes == ["GG660"] else ", ".join(codes) or "missed"


def _norm(trial: Trial) -> str:
    assert trial.guardian is not None
    seen = trial.guardian.latest
    norm = None if seen is None else seen.grad_norm
    return "yes" if true(norm, trial.norms[-1]) else f"{norm} for {trial.norms[-1]}"


def _detached(*trials: Trial) -> str:
    left = [type(hook).__name__ for trial in trials for hook in _hooks(trial) if _ours(hook)]
    left += ["backward"] if _ours(torch.autograd.backward) else []
    return ", ".join(left) or "yes"


def _hooks(trial: Trial) -> Iterator[object]:
    for module in trial.model.modules():
        yield from (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        yield from module._backward_hooks.values()
    for optimizer in trial.optimizers:
        inner = getattr(optimizer, "optimizer", optimizer)
        yield from (*inner._optimizer_step_pre_hooks.values(), *inner._optimizer_step_post_hooks.values())


def _ours(thing: object) -> bool:
    return type(thing).__module__.startswith("gpt_guard") or hasattr(thing, "__wrapped__")


def _identical(watched: Trial, bare: Trial) -> str:
    same = [torch.equal(ours, theirs) for ours, theirs in zip(watched.weights, bare.weights, strict=True)]
    return "yes" if same and all(same) else f"{same.count(False)} of {len(same)} differ"


@contextmanager
def _quiet() -> Iterator[None]:
    """The frameworks advise; what they say is not what is tried here."""
    names = ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "transformers")
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
