"""Ways to break the example on purpose, so that a reader sees what speaks; MiniGPT itself stays as it is.

A break is one function that takes a part of the training script and gives back a broken one. The decorator says which
part (`point`), what is broken, what should speak, and which command of gpt-guard finds it, or explains it.
"""

from __future__ import annotations

import argparse
import copy
import shlex
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from torch import Tensor

from broken_models import WRONG, in_a_list, unmasked
from checkpoints import load_for_resume
from gpt_guard import GuardError, load_checkpoint, read_run
from gpt_guard.records import Severity
from gpt_guard.testing import inject_nonfinite
from mini_gpt import MiniGPT, MiniGPTConfig

Part = TypeVar("Part")
Change = Callable[[Any], Any]
GetBatch = Callable[[Tensor], tuple[Tensor, Tensor]]
Evaluate = Callable[[MiniGPT, Tensor], float]

FACTORY = "--model broken_models:{} --config mini_gpt:MiniGPTConfig"


@dataclass(frozen=True)
class Break:
    """One way to break the run: what `change` does to the part of the script that `point` names.

    `command` is what follows `gpt-guard`, to be run in the folder `out` of the run.
    """

    name: str
    point: str
    what: str
    speaks: str
    command: str
    change: Change
    out: Path = Path()

    def __call__(self, point: str, part: Part) -> Part:
        """Give the broken part at this break's point; every other part comes back as it is."""
        if self.name and point == "loop" and isinstance(part, tuple):
            part[0].push(self._say_what_spoke)
        if point != self.point:
            return part
        print(f"broken on purpose (--break {self.name}): {self.what}. {self.speaks}.", flush=True)
        broken: Part = self.change(part)
        return broken

    def _say_what_spoke(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        """At the end of the loop, however it ends: the findings of the run, and the command to run next."""
        print(f"\nwhat spoke (--break {self.name}):")
        found = [finding for finding in read_run(self.out).findings if finding.severity is not Severity.INFO]
        said = [f"{each.code} {each.title}, step {each.step}, {each.guard}" for each in found]
        if error is not None and not isinstance(error, GuardError):
            said.append(f"torch itself: {type(error).__name__}: {error}")
        if self.name == "wrong-arch":
            said += load_into_wrong_models(self.out / "checkpoints" / "mini_gpt_latest.pt")
        for line in said or ["nothing"]:
            print(f"  {line}")
        here = f"cd {shlex.quote(str(self.out))} && PYTHONPATH={shlex.quote(str(Path(__file__).resolve().parent))}"
        print(f"run next:\n  {here} gpt-guard {self.command}\n", flush=True)


BREAKS: dict[str, Break] = {}


def breaks(name: str, point: str, what: str, speaks: str, command: str) -> Callable[[Change], Change]:
    """Register the decorated function as `--break name`."""

    def register(change: Change) -> Change:
        BREAKS[name] = Break(name, point, what, speaks, command, change)
        return change

    return register


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add `--break NAME` to the script's options."""
    parser.add_argument("--break", dest="broken", choices=BREAKS, help="break the run on purpose and see what speaks")


def chosen(args: argparse.Namespace) -> Break:
    """The break that was asked for, or one that breaks nothing."""
    if not args.broken:
        return Break("", "", "", "", "", lambda part: part)
    return replace(BREAKS[args.broken], out=args.out)


@breaks(
    "no-shift",
    "get_batch",
    "the targets are the inputs themselves, not one token later: the loss in training falls to nothing, "
    "the loss on true targets at each validation rises",
    "LossInputs (GG653) should speak in the first step, and preflight's trained loss (GG658)",
    "check --only initial-loss",
)
def targets_not_shifted(get_batch: GetBatch) -> GetBatch:
    def get_unshifted(ids: Tensor) -> tuple[Tensor, Tensor]:
        x, _ = get_batch(ids)
        return x, x.clone()

    return get_unshifted


@breaks(
    "token-id",
    "data",
    "every hundredth training id is vocab_size, one more than the last that exists",
    "IndexCalls (GG631) should speak before torch stops at the embedding, and preflight before both",
    "check --only token-ids",
)
def ids_beyond_the_vocabulary(data: tuple[Tensor, int]) -> tuple[Tensor, int]:
    ids, vocab_size = data
    ids[50::100] = vocab_size
    return data


@breaks(
    "no-mask",
    "model",
    "attention has no causal mask, so that each position sees the token it should predict",
    "ModelProbe (GG660) should speak in the first step, and preflight's causality",
    f"check {FACTORY.format('unmasked')} --only causality",
)
def no_causal_mask(model: MiniGPT) -> MiniGPT:
    return unmasked(model.config).to(model.head.weight.device)


@breaks(
    "lr",
    "settings",
    "the learning rate is 0.1 from the first step, thirty times too high",
    "ParamDeltaProbe (GG308) should speak",
    "explain GG308",
)
def learning_rate_far_too_high(args: argparse.Namespace) -> argparse.Namespace:
    args.lr, args.warmup = 0.1, 1
    return args


@breaks(
    "freeze",
    "optimized model",
    "the optimizer holds an old copy of the model, which stays as it is",
    "ParamDeltaProbe (GG307) should speak",
    "explain GG307",
)
def optimizer_holds_an_old_copy(model: MiniGPT) -> MiniGPT:
    return copy.deepcopy(model)


@breaks(
    "wrong-arch",
    "settings",
    "nothing in training; at its end, the checkpoint is loaded into three models of other sizes",
    "load_checkpoint and preflight (GG705) should name the size that differs",
    f"check {FACTORY.format('wider')} --only checkpoint",
)
def nothing_until_the_checkpoint_is_loaded(args: argparse.Namespace) -> argparse.Namespace:
    return args


def load_into_wrong_models(path: Path) -> list[str]:
    """Load a checkpoint of the example into models of another vocabulary, width and depth; returns what is said."""
    if not path.is_file():
        return [f"{path} was not written"]
    said = []
    config = MiniGPTConfig(**load_for_resume(path)["config"])
    for what, build in WRONG.items():
        try:
            load_checkpoint(path, build(config))
        except GuardError as error:
            said.append(f"{what}: {error.finding.code} {error.finding.seen}\n    {error.finding.causes[0]}")
    return said


@breaks(
    "dropout",
    "settings",
    "dropout is 0.2; try 0.0 as well (--dropout 0) and compare the losses at the end",
    "Nothing should speak, it is no bug; overfitting one batch with both shows what dropout costs",
    "check --only overfit --compare-dropout",
)
def more_dropout(args: argparse.Namespace) -> argparse.Namespace:
    args.dropout = 0.2
    return args


@breaks(
    "nan",
    "loop",
    "a NaN is planted in blocks.1.mlp.up.weight at step 30",
    "FiniteGuard (GG105) should stop the run, and leave a bundle from which its last step can be run again",
    "replay crash-step-000030 --model mini_gpt:MiniGPT",
)
def nan_in_a_weight(loop: tuple[ExitStack, MiniGPT]) -> tuple[ExitStack, MiniGPT]:
    stack, model = loop
    stack.enter_context(inject_nonfinite(model, "blocks.1.mlp.up.weight", step=30))
    return loop


@breaks(
    "python-list",
    "model",
    "the blocks are in a Python list instead of a ModuleList",
    "ParamDeltaProbe (GG303) should speak",
    f"check {FACTORY.format('in_a_list')} --fresh --only gradients",
)
def blocks_in_a_python_list(model: MiniGPT) -> MiniGPT:
    return in_a_list(model.config).to(model.head.weight.device)


@breaks(
    "no-eval",
    "evaluate",
    "validation runs without eval(), its dropout (any --dropout above 0) stays on",
    "EvalModeAssert (GG501) should speak",
    "explain GG501",
)
def validation_without_eval(evaluate: Evaluate) -> Evaluate:
    def evaluate_in_training_mode(model: MiniGPT, ids: Tensor, *rows: int) -> float:
        with mock.patch.object(model, "eval", lambda: model):
            return evaluate(model, ids, *rows)

    return evaluate_in_training_mode
