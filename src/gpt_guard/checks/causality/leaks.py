"""Does the future leak into the past, or a row into another? Asked by changing tokens, and by gradient."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpt_guard import catalogue
from gpt_guard.callbacks.probes.findings import distances, likely_future
from gpt_guard.checkpoint.fingerprint import unwrap
from gpt_guard.checks.runner.forward import call
from gpt_guard.checks.runner.perturb import other_ids, repeatable
from gpt_guard.hooks.isolation.compare import (
    FirstDifference,
    across_shapes,
    at_positions,
    at_row,
    difference,
    everything,
    first_difference,
    rounding,
    traced,
)
from gpt_guard.hooks.isolation.preserve import quiet
from gpt_guard.records import Finding

SEEDS = 3
_OFFSETS_FROM = 24
"""Positions that are changed one by one to find the distances of a leak: all of a row that is no longer than this."""
_MASK = "attention_mask"
"""The argument that says by 1 which tokens are real (Hugging Face); others exist in either sense: none is guessed."""


class LogitChange(NamedTuple):
    """The largest change of logits that should have stayed: where, how much, and how much rounding may make.

    `scale` is the largest logit, `inputs` are the ids before and after. A new suffix starts at `prefix`; where it is 0
    all other rows were changed, or, with `moved`, the rows changed places.
    """

    size: float
    allowed: float
    scale: float
    row: int = 0
    position: int = 0
    prefix: int = 0
    moved: bool = False
    inputs: tuple[Tensor, Tensor] | None = None

    @property
    def leaks(self) -> bool:
        """True where it is more than rounding."""
        return self.size > self.allowed


class FutureLeak(NamedTuple):
    """What is known of a leak of the future: `pairs` of a position and a later one that it reads, `[T]` long rows.

    `blame` is the module that made it; None where the leak is too small for the model's precision.
    """

    blame: FirstDifference | None
    pairs: frozenset[tuple[int, int]]
    likely: list[str]
    length: int

    @property
    def distances(self) -> str:
        """How far ahead, in words."""
        return distances(self.pairs, self.length)

    def finding(self, seen: str, likely: Iterable[str] = ()) -> Finding:
        """GG660 with these causes first, then those that the evidence points to."""
        fields: dict[str, Any] = self.blame.named if self.blame is not None else {}
        evidence = {"offsets": sorted({source - reader for reader, source in self.pairs})}
        keys = list(dict.fromkeys([*likely, *self.likely]))
        return catalogue.finding("GG660", seen, likely=keys, evidence=evidence, **fields)


class Padding(NamedTuple):
    """How far the logits of real tokens move when padding stands behind them, and how far rounding may move them."""

    change: float
    allowed: float
    real: int
    padding: int
    mask_given: bool


def prefixes(length: int) -> list[int]:
    """Prefix lengths to keep: one token, a quarter, half, and all but the last."""
    return sorted({max(1, min(length - 1, k)) for k in (1, length // 4, length // 2, length - 1)})


@dataclass(frozen=True)
class TokenChanges:
    """What a model's logits do when some of its ids `x` `[B, T]` become other ids, none of them `avoid`.

    Each forward has the same random numbers. All of it reads the device; call it in eval mode and without gradient.
    """

    model: nn.Module
    x: Tensor
    vocab: int
    seed: int
    avoid: int | None = None

    def logits(self, ids: Tensor) -> Tensor:
        """`[B, T, V]`."""
        return repeatable(self.model, self.seed)(ids)

    def suffix(self) -> LogitChange:
        """Replace the tokens behind several prefixes, in every row at once, and compare the logits of the prefix."""
        before = self.logits(self.x)
        worst = LogitChange(0.0, rounding(before), float(before.abs().max()))
        for number in range(SEEDS):
            generator = torch.Generator().manual_seed(self.seed + number)
            for prefix in prefixes(self.x.size(1)):
                changed = self.x.clone()
                changed[:, prefix:] = self._others(self.x[:, prefix:], generator)
                apart = difference(before[:, :prefix], self.logits(changed)[:, :prefix]).amax(-1)
                if (size := float(apart.max())) > worst.size:
                    row, position = divmod(int(apart.argmax()), prefix)
                    worst = LogitChange(
                        size, worst.allowed, worst.scale, row, position, prefix, inputs=(self.x, changed)
                    )
        return worst

    def cut(self) -> LogitChange:
        """Cut the rows behind several prefixes and compare the logits of the prefix: no token of it has changed."""
        before = self.logits(self.x)
        worst = LogitChange(0.0, across_shapes(before), float(before.abs().max()))
        for prefix in prefixes(self.x.size(1)):
            alone = self.logits(self.x[:, :prefix])
            if alone.shape[:2] != (self.x.size(0), prefix):
                continue
            apart = difference(before[:, :prefix], alone).amax(-1)
            if (size := float(apart.max())) > worst.size:
                row, position = divmod(int(apart.argmax()), prefix)
                worst = worst._replace(size=size, row=row, position=position, prefix=prefix)
        return worst

    def turned(self) -> bool:
        """True where a single token has the logits that it has at the end of a long row of itself, not at its front."""
        same = self.x[:, :1].expand(-1, self.x.size(1))
        whole, alone = self.logits(same), self.logits(same[:, :1])
        front, end = (float(difference(whole[:, at : at + 1], alone[:, :1]).mean()) for at in (0, same.size(1) - 1))
        return end < front

    def rows(self) -> LogitChange:
        """For each row in turn: all other rows get other tokens, and this row's logits must stay."""
        before = self.logits(self.x)
        worst = LogitChange(0.0, rounding(before), float(before.abs().max()))
        generator = torch.Generator().manual_seed(self.seed)
        for row in range(self.x.size(0)):
            changed = self._others(self.x, generator)
            changed[row] = self.x[row]
            size = float(difference(before[row], self.logits(changed)[row]).max())
            if size > worst.size:
                worst = worst._replace(size=size, row=row, inputs=(self.x, changed))
        return worst

    def moved_rows(self) -> LogitChange:
        """Each row one place down, the last on top: the logits must move along, whatever kernels make of rounding."""
        before, moved = self.logits(self.x), self.x.roll(1, 0)
        apart = difference(before, self.logits(moved).roll(-1, 0)).amax((1, 2))
        worst = LogitChange(float(apart.max()), across_shapes(before), float(before.abs().max()), int(apart.argmax()))
        return worst._replace(moved=True, inputs=(self.x, moved))

    def readers(self) -> dict[int, list[int]]:
        """Which row reacts to which others, each of them changed alone."""
        before = self.logits(self.x)
        allowed = rounding(before)
        generator = torch.Generator().manual_seed(self.seed)
        found: dict[int, list[int]] = {}
        for source in range(self.x.size(0)):
            changed = self.x.clone()
            changed[source] = self._others(self.x[source], generator)
            apart = difference(before, self.logits(changed)).amax((1, 2)).tolist()
            for row, change in enumerate(apart):
                if row != source and change > allowed:
                    found.setdefault(row, []).append(source)
        return found

    def padding(self, pad: int) -> Padding:
        """Compare rows alone with the same rows padded to twice their length; an `attention_mask` is given if taken."""
        x, length = self.x, max(1, self.x.size(1) // 2)
        real = torch.where(x == pad, (x + 1) % self.vocab, x)[:, :length]
        padded = torch.cat([real, torch.full_like(x[:, length:], pad)], 1)
        mask_given = _MASK in inspect.signature(unwrap(self.model).forward).parameters
        forward = repeatable(_Masked(self.model, pad) if mask_given else self.model, self.seed)
        alone, behind = forward(real), forward(padded)[:, :length]
        change = float(difference(alone, behind).max())
        return Padding(change, across_shapes(alone), length, x.size(1) - length, mask_given)

    def look_into(self, found: LogitChange) -> FutureLeak:
        """Who reads whom, and which module made a new suffix show before itself. Runs many forwards."""
        pairs, share = self._pairs()
        blame = self.leaking_module(found)
        likely = likely_future(self.model, blame, pairs, share, self.x.size(1))
        return FutureLeak(blame, pairs, likely, self.x.size(1))

    def leaking_module(self, found: LogitChange) -> FirstDifference | None:
        """The module whose output first changed where it should have stayed."""
        if found.inputs is None:
            return None
        (before, after), (rows, length) = found.inputs, self.x.shape
        one = traced(self.model, lambda: self.logits(before))
        other = traced(self.model, lambda: self.logits(after))
        pick = at_positions(rows, length, slice(0, found.prefix)) if found.prefix else at_row(rows, length, found.row)
        if found.moved:
            other = [each._replace(tensors=tuple(_moved_back(part, rows) for part in each.tensors)) for each in other]
            pick = everything
        return first_difference(self.model, one, other, pick)

    def _pairs(self) -> tuple[frozenset[tuple[int, int]], float]:
        """Who sees a token that is changed alone; the largest such change by the largest that the past makes."""
        generator = torch.Generator().manual_seed(self.seed)
        before = self.logits(self.x)
        allowed = rounding(before)
        found: set[tuple[int, int]] = set()
        future = past = 0.0
        length = self.x.size(1)
        for source in range(1, length, max(1, length // _OFFSETS_FROM)):
            changed = self.x.clone()
            changed[:, source] = self._others(self.x[:, source], generator)
            apart = difference(before, self.logits(changed)).amax((0, 2)).tolist()
            found |= {(reader, source) for reader in range(source) if apart[reader] > allowed}
            future = max(future, *apart[:source])
            past = max([past, *apart[source + 1 :]])
        return frozenset(found), future / past if past else 1.0

    def _others(self, ids: Tensor, generator: torch.Generator) -> Tensor:
        return other_ids(ids, self.vocab, generator, self.avoid)


def _moved_back(tensor: Tensor, rows: int) -> Tensor:
    """Undo the move, where the tensor has rows in front; what has none (positions, a mask) stays."""
    return tensor.roll(-1, 0) if tensor.dim() >= 2 and tensor.size(0) == rows else tensor


class _Masked(nn.Module):
    """A model that is told which tokens are real."""

    def __init__(self, model: nn.Module, pad: int) -> None:
        super().__init__()
        self.model, self.pad = model, pad

    def forward(self, x: Tensor) -> Any:
        return self.model(x, attention_mask=(x != self.pad).long())


class InputGradients(NamedTuple):
    """Gradient of some output positions by the embedded inputs: `strength` [positions, T], or why there is none."""

    positions: list[int]
    strength: Tensor | None
    why_not: str = ""

    @property
    def leak(self) -> tuple[int, int, float] | None:
        """The reading position, the future position it reads, and its share of the largest gradient; the worst one."""
        if self.strength is None:
            return None
        worst: tuple[int, int, float] | None = None
        allowed = rounding(self.strength)
        for reader, row in zip(self.positions, self.strength, strict=True):
            future = row[reader + 1 :]
            if future.numel() and float(future.max()) > max(allowed, worst[2] if worst else 0.0):
                worst = (reader, reader + 1 + int(future.argmax()), float(future.max()))
        return worst and (*worst[:2], worst[2] / float(self.strength.max()))


def input_gradients(model: nn.Module, x: Tensor) -> InputGradients:
    """Largest gradient of the logits at some positions by each embedded input, over all rows of the batch.

    Runs one forward and one backward per position; parameters keep their gradients. In eval mode.
    """
    positions = sorted({0, *prefixes(x.size(1)), x.size(1) - 1})
    with quiet(model), torch.enable_grad(), _embedded(model, x) as leaves:
        try:
            logits = call(model, x).logits
        except Exception as error:
            why_not = f"a forward with gradient is not possible: {type(error).__name__}: {error}"
            return InputGradients(positions, None, why_not)
        if not leaves:
            return InputGradients(positions, None, "no nn.Embedding takes the token ids")
        weights = torch.randn(logits.size(-1), generator=torch.Generator().manual_seed(0)).to(logits)
        try:
            rows = [_strength(logits[:, position] @ weights, leaves) for position in positions]
        except RuntimeError as error:
            return InputGradients(positions, None, f"no gradient: {' '.join(str(error).split())[:200]}")
    return InputGradients(positions, torch.stack(rows))


def _strength(outputs: Tensor, leaves: list[Tensor]) -> Tensor:
    grads = torch.autograd.grad(outputs.sum(), leaves, retain_graph=True, allow_unused=True)
    known = [grad.detach().abs().amax(-1) for grad in grads if grad is not None]
    if not known:
        return torch.zeros(leaves[0].size(1), device=leaves[0].device)
    return torch.stack(known).amax((0, 1)).float()


@contextmanager
def _embedded(model: nn.Module, x: Tensor) -> Iterator[list[Tensor]]:
    """While it is open, each embedding of the token ids hands out a leaf, whose gradient can be asked for."""
    leaves: list[Tensor] = []

    def hand_out(_module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        ids = args[0] if args else None
        if not isinstance(ids, Tensor) or ids.shape != x.shape or not bool((ids == x).all()):
            return None
        leaf = output.detach().requires_grad_()
        leaves.append(leaf)
        # A copy is no leaf: code that writes into its embedding in place (`x += positions`) may go on doing so.
        return leaf.clone()

    handles = [module.register_forward_hook(hand_out) for module in model.modules() if isinstance(module, nn.Embedding)]
    try:
        yield leaves
    finally:
        for handle in handles:
            handle.remove()


def train_briefly(model: nn.Module, loss: Callable[[], Tensor], steps: int = 8, lr: float = 2e-3) -> str:
    """Move every trainable parameter by the sign of its gradient, as Adam's first steps do. Returns why not, or "".

    What is zero at initialisation hides a leak behind it: after a few steps it is zero no longer. Needs no memory for
    an optimizer. The caller puts the parameters back.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        return "no parameter is trainable"
    model.train()
    for _ in range(steps):
        with torch.enable_grad():
            value = loss()
            if not value.requires_grad or not bool(value.isfinite().all()):
                return "its loss is not finite or has no gradient"
            grads = torch.autograd.grad(value.mean(), parameters, allow_unused=True)
        with torch.no_grad():
            for parameter, grad in zip(parameters, grads, strict=True):
                if grad is not None:
                    parameter.sub_(lr * grad.to_dense().sign())
    return ""
