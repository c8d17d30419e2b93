"""Bugs of the loss: a number that falls, and is not the cross entropy of each position and its target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mini_gpt import MiniGPT

from .bugs_shapes import Output, with_forward
from .project import TOKENIZER, Project
from .table import mutant

Loss = Callable[[Tensor, Tensor], Tensor]


def losing(loss: Loss) -> type[MiniGPT]:
    """MiniGPT with another loss of its logits `[B, T, V]` and targets `[B, T]`."""

    def forward(self: MiniGPT, ids: Tensor, targets: Tensor | None = None) -> Output:
        logits = MiniGPT.forward(self, ids)[0]
        return logits, None if targets is None else loss(logits, targets)

    return with_forward("Losing", forward)


def flat(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **options)


@mutant("initial-loss", "GG656", "unnormalised")
def nll_loss_of_raw_logits(project: Project) -> None:
    project.model_class = losing(lambda logits, y: F.nll_loss(logits.flatten(0, 1), y.flatten()))


@mutant("initial-loss", "GG656", "unnormalised")
def nll_loss_of_raw_logits_by_a_loss_fn(project: Project) -> None:
    project.given["loss_fn"] = lambda logits, y: F.nll_loss(logits.flatten(0, 1), y.flatten())


@mutant("initial-loss", "GG656", "unnormalised")
def a_gather_without_a_log_softmax(project: Project) -> None:
    project.model_class = losing(lambda logits, y: -logits.gather(-1, y[..., None]).mean())


@mutant("initial-loss", "GG656", "negated")
def the_loss_is_negated(project: Project) -> None:
    project.model_class = losing(lambda logits, y: -flat(logits, y))


@mutant("initial-loss", "GG656", "negated")
def the_log_likelihood_lacks_its_minus(project: Project) -> None:
    project.model_class = losing(lambda logits, y: 0.5 * logits.log_softmax(-1).gather(-1, y[..., None]).mean())


@mutant("initial-loss", "GG654", "permuted")
def targets_are_sorted(project: Project) -> None:
    project.model_class = losing(lambda logits, y: flat(logits, y.sort(-1).values))


@mutant("initial-loss", "GG654", "permuted")
def targets_are_reversed(project: Project) -> None:
    project.model_class = losing(lambda logits, y: flat(logits, y.flip(1)))


@mutant("initial-loss", "GG654", "permuted")
def targets_are_of_the_next_row(project: Project) -> None:
    project.model_class = losing(lambda logits, y: flat(logits, y.roll(1, 0)))


@mutant("initial-loss", "GG654", "permuted")
def all_targets_are_sorted_as_one(project: Project) -> None:
    project.given["loss_fn"] = lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten().sort().values)


@mutant("initial-loss", "GG657", "ignore_index")
def ignore_index_is_the_blank(project: Project) -> None:
    blank = TOKENIZER.encode(" ")[0]
    project.model_class = losing(lambda logits, y: flat(logits, y, ignore_index=blank))


@mutant("initial-loss", "GG657", "ignore_index")
def ignore_index_is_the_letter_e(project: Project) -> None:
    letter = TOKENIZER.encode("e")[0]
    project.model_class = losing(lambda logits, y: flat(logits, y, ignore_index=letter))


@mutant("initial-loss", "GG657", "ignore_index")
def one_class_has_weight_zero(project: Project) -> None:
    weight = torch.ones(len(TOKENIZER))
    weight[TOKENIZER.encode("o")[0]] = 0.0
    project.model_class = losing(lambda logits, y: flat(logits, y, weight=weight))


@mutant("initial-loss", "GG656", "squared")
def squares_of_softmax(project: Project) -> None:
    project.model_class = losing(
        lambda logits, y: F.mse_loss(logits.softmax(-1), F.one_hot(y, logits.size(-1)).to(logits))
    )


@mutant("initial-loss", "GG656", "squared")
def squares_of_softmax_by_a_loss_fn(project: Project) -> None:
    project.given["loss_fn"] = lambda logits, y: (
        (logits.softmax(-1) - F.one_hot(y, logits.size(-1)).to(logits)).square().sum(-1).mean()
    )


@mutant("initial-loss", "GG652", "in_loss")
def softmax_before_a_smoothed_cross_entropy(project: Project) -> None:
    project.model_class = losing(lambda logits, y: flat(logits.softmax(-1), y, label_smoothing=0.1))


@mutant("initial-loss", "GG656", "some_positions")
def only_the_last_position_counts(project: Project) -> None:
    project.model_class = losing(lambda logits, y: F.cross_entropy(logits[:, -1], y[:, -1]))


@mutant("initial-loss", "GG656", "some_positions")
def only_the_first_half_counts(project: Project) -> None:
    project.model_class = losing(lambda logits, y: flat(logits[:, : y.size(1) // 2], y[:, : y.size(1) // 2]))


@mutant("initial-loss", "GG656", "some_positions")
def only_the_first_row_counts(project: Project) -> None:
    project.model_class = losing(lambda logits, y: F.cross_entropy(logits[0], y[0]))


@mutant("gradients", "GG220", "detached_loss")
def the_loss_is_detached(project: Project) -> None:
    project.model_class = losing(lambda logits, y: flat(logits, y).detach())


@mutant("gradients", "GG220", "detached_loss")
def the_loss_is_made_anew_from_a_number(project: Project) -> None:
    project.model_class = losing(lambda logits, y: torch.tensor(flat(logits, y).item(), requires_grad=True))
