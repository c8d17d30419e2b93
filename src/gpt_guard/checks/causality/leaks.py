"""Does the future leak into the past? Asked by changing a suffix, and by the gradient to the embedded inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpt_guard.checks.runner.forward import call
from gpt_guard.checks.runner.perturb import Forward, other_ids
from gpt_guard.hooks.isolation.compare import (
    FirstDifference,
    at_positions,
    difference,
    first_difference,
    rounding,
    traced,
)
from gpt_guard.hooks.isolation.preserve import quiet

SEEDS = 3
_OFFSETS_FROM = 24
"""Positions that are changed one by one to find the distances of a leak: all of a row that is no longer than this."""


class Suffix(NamedTuple):
    """The largest change that a new suffix made before itself: where, how much, and how much rounding may make.

    `position` saw a change from `prefix` on; `inputs` are the ids before and after.
    """

    change: float
    allowed: float
    scale: float
    prefix: int
    row: int
    position: int
    inputs: tuple[Tensor, Tensor] | None

    @property
    def leaks(self) -> bool:
        """True where it is more than rounding."""
        return self.change > self.allowed


def prefixes(length: int) -> list[int]:
    """Prefix lengths to keep: one token, a quarter, half, and all but the last."""
    return sorted({max(1, min(length - 1, k)) for k in (1, length // 4, length // 2, length - 1)})


def change_suffix(forward: Forward, x: Tensor, vocab: int, seed: int, avoid: int | None = None) -> Suffix:
    """Replace the tokens behind several prefixes, in every row at once, and compare the logits of the prefix.

    Reads the device. Call it in eval mode and without gradient.
    """
    before = forward(x)
    allowed, scale = rounding(before), float(before.abs().max())
    worst = Suffix(0.0, allowed, scale, 0, 0, 0, None)
    for number in range(SEEDS):
        generator = torch.Generator().manual_seed(seed + number)
        for prefix in prefixes(x.size(1)):
            changed = x.clone()
            changed[:, prefix:] = other_ids(x[:, prefix:], vocab, generator, avoid)
            apart = difference(before[:, :prefix], forward(changed)[:, :prefix]).amax(-1)
            if float(apart.max()) > worst.change:
                row, position = divmod(int(apart.argmax()), prefix)
                worst = Suffix(float(apart.max()), allowed, scale, prefix, row, position, (x, changed))
    return worst


class Pairs(NamedTuple):
    """Which position reads which later one. `share` is the largest such change by the largest that the past makes."""

    pairs: frozenset[tuple[int, int]]
    share: float


def leak_pairs(forward: Forward, x: Tensor, vocab: int, seed: int) -> Pairs:
    """One token is changed at a time: who, before and behind it, sees that? Call it like `change_suffix`."""
    generator = torch.Generator().manual_seed(seed)
    before = forward(x)
    allowed = rounding(before)
    found: set[tuple[int, int]] = set()
    future = past = 0.0
    length = x.size(1)
    for source in range(1, length, max(1, length // _OFFSETS_FROM)):
        changed = x.clone()
        changed[:, source] = other_ids(x[:, source], vocab, generator)
        apart = difference(before, forward(changed)).amax((0, 2)).tolist()
        found |= {(reader, source) for reader in range(source) if apart[reader] > allowed}
        future = max(future, *apart[:source])
        past = max([past, *apart[source + 1 :]])
    return Pairs(frozenset(found), future / past if past else 1.0)


def leaking_module(model: nn.Module, forward: Forward, found: Suffix) -> FirstDifference | None:
    """The module whose output first changed at positions before the new suffix."""
    if found.inputs is None:
        return None
    before, after = found.inputs
    one = traced(model, lambda: forward(before))
    other = traced(model, lambda: forward(after))
    rows, length = before.shape
    return first_difference(model, one, other, at_positions(rows, length, slice(0, found.prefix)))


class Reach(NamedTuple):
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


def reach(model: nn.Module, x: Tensor, row: int | None = None) -> Reach:
    """Largest gradient of the logits at some positions by each embedded input, over all rows of the batch.

    With `row` only that row's logits are asked, and the strength is by row of the batch: `[1, B]`. Runs one forward
    and one backward per position; parameters keep their gradients. Call it in eval mode.
    """
    positions = sorted({0, *prefixes(x.size(1)), x.size(1) - 1} - {x.size(1)})
    with _Embedded(model, x) as embedded, torch.enable_grad():
        try:
            logits = call(model, x).logits
        except Exception as error:
            return Reach(positions, None, f"a forward with gradient is not possible: {type(error).__name__}: {error}")
        if not embedded.leaves:
            return Reach(positions, None, "no nn.Embedding takes the token ids")
        weights = torch.randn(logits.size(-1), generator=torch.Generator().manual_seed(0)).to(logits)
        picked = [logits[row]] if row is not None else [logits[:, position] for position in positions]
        try:
            rows = [_strength(part @ weights, embedded.leaves, by_row=row is not None) for part in picked]
        except RuntimeError as error:
            return Reach(positions, None, f"no gradient: {' '.join(str(error).split())[:200]}")
    return Reach(positions, torch.stack(rows))


def _strength(outputs: Tensor, leaves: Sequence[Tensor], *, by_row: bool) -> Tensor:
    grads = torch.autograd.grad(outputs.sum(), leaves, retain_graph=True, allow_unused=True)
    known = [grad.detach().abs().amax(-1) for grad in grads if grad is not None]
    if not known:
        return torch.zeros(leaves[0].shape[0 if by_row else 1], device=leaves[0].device)
    return torch.stack(known).amax(0).amax(1 if by_row else 0).float()


class _Embedded:
    """While it is open, each embedding of the token ids hands out a leaf, whose gradient can be asked for."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self.leaves: list[Tensor] = []
        self._x = x
        self._tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        self._handles: list[Any] = []

    def __enter__(self) -> _Embedded:
        self._handles = [table.register_forward_hook(self._hand_out) for table in self._tables]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hand_out(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if not args or not isinstance(args[0], Tensor) or not self._is_ids(args[0]):
            return None
        leaf = output.detach().requires_grad_()
        self.leaves.append(leaf)
        # A copy is no leaf: code that writes into its embedding in place (`x += positions`) may go on doing so.
        return leaf.clone()

    def _is_ids(self, ids: Tensor) -> bool:
        return ids.shape == self._x.shape and bool((ids == self._x).all())


def train_briefly(model: nn.Module, loss: Any, steps: int = 8, lr: float = 2e-3) -> str:
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


def asked(model: nn.Module, forward: Forward, x: Tensor, vocab: int, seed: int, avoid: int | None) -> Suffix:
    """`change_suffix` in eval mode and without gradient."""
    with quiet(model):
        return change_suffix(forward, x, vocab, seed, avoid)
