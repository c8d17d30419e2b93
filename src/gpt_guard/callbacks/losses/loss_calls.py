"""What is known of a loss call while it is looked at, and of the calls before it in the same step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gpt_guard.callbacks.data.inputs import is_plain
from gpt_guard.hooks.autograd_graph.origin import sequence_of
from gpt_guard.hooks.frames import running_module
from gpt_guard.hooks.functions.functions import FunctionCall
from gpt_guard.records import Severity, SourceLine

CLASS_LOSSES = ("cross_entropy", "nll_loss")
BINARY_LOSSES = ("binary_cross_entropy", "binary_cross_entropy_with_logits")
DISTANCES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
LOSSES = (*CLASS_LOSSES, *BINARY_LOSSES, *DISTANCES, "kl_div")
SQUASHES = ("softmax", "log_softmax")
_LARGE = 1e3
"""What a mask that is added takes off is far more than any score: -1e4, -1e9, -inf."""


class Told(NamedTuple):
    """What a rule has to say of one call; `severity` None leaves it to the catalogue.

    The guard adds where the call was, unless `line` or `module` (path and class) name where the trouble is made.
    """

    code: str
    seen: str
    likely: tuple[str, ...] = ()
    severity: Severity | None = None
    evidence: dict[str, Any] | None = None
    line: SourceLine | None = None
    module: tuple[str, str] | None = None


class Place:
    """A line that calls a loss, and the module whose code it is."""

    def __init__(self, call: FunctionCall, paths: dict[int, str]) -> None:
        module = running_module(paths)
        self.line: SourceLine | None = call.line
        self.module = None if module is None else paths[id(module)]
        self.module_class = None if module is None else type(module).__name__

    @property
    def key(self) -> str:
        """The line as a string."""
        return f"{self.line.file}:{self.line.line}" if self.line is not None else ""


class Squash(NamedTuple):
    """A softmax or log_softmax call: its name, its line, path and class of the module that made it, if one did."""

    name: str
    line: SourceLine | None
    module: tuple[str, str] | None

    @property
    def words(self) -> str:
        """Its name and where it is."""
        module = f" in module {self.module[0]!r} ({self.module[1]})" if self.module and self.module[0] else ""
        return f"{self.name}{module}" + (f" ({self.line.file}:{self.line.line})" if self.line else "")


class Ids(NamedTuple):
    """Token ids `[B, T]` that an embedding looked up, and the id that it declares as padding."""

    ids: Tensor
    padding: int | None


@dataclass
class Seen:
    """Paths of modules by id, and what has been seen in this step.

    That is softmaxes by the number of their operation, embedded ids, the shapes that integer targets were flattened
    from, whether gradients were hooked, and whether attention was kept from looking ahead.
    """

    paths: dict[int, str] = field(default_factory=dict)
    squashes: dict[int, Squash] = field(default_factory=dict)
    ids: list[Ids] = field(default_factory=list)
    sources: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    hooked: bool = False
    causal: bool = False

    def note(self, call: FunctionCall) -> None:
        """Take note of a call that is no loss."""
        if call.kind in SQUASHES:
            if isinstance(call.result, Tensor) and (number := sequence_of(call.result)) is not None:
                self.squashes[number] = self._squash(call)
        elif call.kind == "embedding":
            self._embedded(call)
        elif call.kind == "gradient_hook":
            self.hooked = True
        elif call.kind == "attention":
            self.causal = self.causal or bool(call.get("is_causal", False)) or _hides_later(call.get("attn_mask"))
        elif call.kind == "masked_fill":
            self.causal = self.causal or _hides_later(call.get("mask"), hidden=True)
        elif call.kind == "reshape":
            source, result = call.get("input"), call.result
            if isinstance(source, Tensor) and not source.is_floating_point() and source.dim() == 2:
                self.sources[result] = tuple(source.shape)

    def _squash(self, call: FunctionCall) -> Squash:
        module = running_module(self.paths)
        known = None if module is None else (self.paths[id(module)], type(module).__name__)
        return Squash(call.name, call.line, known)

    def _embedded(self, call: FunctionCall) -> None:
        ids = call.get("input")
        if isinstance(ids, Tensor) and ids.dim() == 2 and min(ids.shape) > 0:
            self.ids.append(Ids(ids.detach(), call.get("padding_idx")))

    def shape_of(self, targets: Tensor) -> tuple[int, int] | None:
        """`[B, T]` or `[T, B]` as targets were before they were flattened, if that was seen."""
        if targets.dim() == 2:
            return (targets.size(0), targets.size(1))
        found = self.sources.get(targets)
        return found if isinstance(found, tuple) else None

    def clear(self) -> None:
        """Forget what belongs to the step that is over."""
        self.squashes.clear()
        self.ids.clear()
        self.sources.clear()
        self.hooked = self.causal = False


def _hides_later(mask: Any, *, hidden: bool = False) -> bool:
    """Whether a mask `[..., T, T]` hides what comes later; `hidden` is what a boolean one says of hidden places."""
    if not isinstance(mask, Tensor) or mask.dim() < 2 or mask.size(-1) != mask.size(-2) or mask.size(-1) < 2:
        return False
    hides = mask == hidden if mask.dtype is torch.bool else mask < -_LARGE
    later = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)
    return bool(hides[..., later].all()) and not bool(hides.diagonal(dim1=-2, dim2=-1).all())


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
