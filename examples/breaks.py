"""Ways to break the example on purpose, so that a reader sees each guard speak; MiniGPT itself stays as it is.

A break is one function that takes a part of the training script and gives back a broken one. The decorator says which
part (`point`), what is broken, and which guard should speak.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest import mock

from torch import Tensor

from gpt_guard.testing import inject_nonfinite
from mini_gpt import MiniGPT

Part = TypeVar("Part")
Change = Callable[[Any], Any]
Evaluate = Callable[[MiniGPT, Tensor], float]


@dataclass(frozen=True)
class Break:
    """One way to break the run: what `change` does to the part of the script that `point` names."""

    name: str
    point: str
    what: str
    speaks: str
    change: Change

    def __call__(self, point: str, part: Part) -> Part:
        """Give the broken part at this break's point; every other part comes back as it is."""
        if point != self.point:
            return part
        print(f"broken on purpose (--break {self.name}): {self.what}. {self.speaks} should say so.", flush=True)
        broken: Part = self.change(part)
        return broken


BREAKS: dict[str, Break] = {}


def breaks(name: str, point: str, what: str, speaks: str) -> Callable[[Change], Change]:
    """Register the decorated function as `--break name`."""

    def register(change: Change) -> Change:
        BREAKS[name] = Break(name, point, what, speaks, change)
        return change

    return register


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add `--break NAME` to the script's options."""
    parser.add_argument("--break", dest="broken", choices=BREAKS, help="break the run on purpose and see a guard speak")


def chosen(args: argparse.Namespace) -> Break:
    """The break that was asked for, or one that breaks nothing."""
    return BREAKS[args.broken] if args.broken else Break("", "", "", "", lambda part: part)


@breaks("nan", "loop", "a NaN is planted in blocks.1.mlp.up.weight at step 30", "FiniteGuard (GG105)")
def nan_in_a_weight(loop: tuple[ExitStack, MiniGPT]) -> tuple[ExitStack, MiniGPT]:
    stack, model = loop
    stack.enter_context(inject_nonfinite(model, "blocks.1.mlp.up.weight", step=30))
    return loop


@breaks(
    "lr", "settings", "the learning rate is 0.1 from the first step, thirty times too high", "ParamDeltaProbe (GG308)"
)
def learning_rate_far_too_high(args: argparse.Namespace) -> argparse.Namespace:
    args.lr, args.warmup = 0.1, 1
    return args


@breaks(
    "freeze",
    "optimized model",
    "the optimizer holds an old copy of the model, which stays as it is",
    "ParamDeltaProbe (GG307)",
)
def optimizer_holds_an_old_copy(model: MiniGPT) -> MiniGPT:
    return copy.deepcopy(model)


@breaks("list", "model", "the blocks are in a Python list instead of a ModuleList", "ParamDeltaProbe (GG303)")
def blocks_in_a_python_list(model: MiniGPT) -> MiniGPT:
    blocks = list(model.blocks)
    del model.blocks
    object.__setattr__(model, "blocks", blocks)
    return model


@breaks(
    "no-eval",
    "evaluate",
    "validation runs without eval(), its dropout (any --dropout above 0) stays on",
    "EvalModeAssert (GG501)",
)
def validation_without_eval(evaluate: Evaluate) -> Evaluate:
    def evaluate_in_training_mode(model: MiniGPT, ids: Tensor, *rows: int) -> float:
        with mock.patch.object(model, "eval", lambda: model):
            return evaluate(model, ids, *rows)

    return evaluate_in_training_mode
