"""The calls of torch's losses: which there are, and what of their arguments is compared."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from gpt_guard.callbacks.data.batches import is_plain
from gpt_guard.hooks.functions.function_calls import FunctionCall

CLASS_LOSSES = ("cross_entropy", "nll_loss")
BINARY_LOSSES = ("binary_cross_entropy", "binary_cross_entropy_with_logits")
DISTANCES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
LOSSES = (*CLASS_LOSSES, *BINARY_LOSSES, *DISTANCES, "kl_div")


class ClassIds(NamedTuple):
    """Scores with classes along `dim`, and integer targets, of which those of `ignore_index` do not count."""

    scores: Tensor
    targets: Tensor
    dim: int
    ignore_index: int

    @property
    def classes(self) -> int:
        """How many there are to choose from."""
        return self.scores.size(self.dim)

    @property
    def counted(self) -> Tensor:
        """Which targets count."""
        return self.targets != self.ignore_index


def class_dim(scores: Tensor) -> int:
    """Where torch's class losses take the classes to be."""
    return 0 if scores.dim() == 1 else 1


def class_ids(call: FunctionCall) -> ClassIds | None:
    """Scores and targets of a loss over classes, where the targets are ids."""
    scores, targets = call.get("input"), call.get("target")
    if call.kind not in CLASS_LOSSES or not isinstance(scores, Tensor) or not isinstance(targets, Tensor):
        return None
    if targets.is_floating_point() or scores.dim() == 0 or scores.numel() == 0 or targets.numel() == 0:
        return None
    return ClassIds(scores, targets, class_dim(scores), int(call.get("ignore_index", -100)))


def reduction_of(call: FunctionCall) -> str:
    """How a loss is reduced; the older arguments `size_average` and `reduce` are translated."""
    if call.get("reduce") is False:
        return "none"
    if call.get("size_average") is False:
        return "sum"
    return str(call.get("reduction", "mean"))


def readable(call: FunctionCall) -> bool:
    """Whether what is compared are tensors with values of their own; not nested, sparse, fake or sharded ones."""
    pair = (call.get("input"), call.get("target"))
    return all(isinstance(each, Tensor) and is_plain(each) and not each.is_complex() for each in pair)
