"""How gradients change over the depth of a network, in its first steps: falling off or growing towards the input."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from gpt_guard.callbacks.gradients.level import middle
from gpt_guard.catalogue import finding
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Observation
from gpt_guard.records.render import number

_LEAST_BLOCKS = 4
_TRIES = 4


class _Stack(NamedTuple):
    """Repeated blocks of one container: path, class names, and the weight matrices of each with their sizes."""

    path: str
    kind: str
    blocks: tuple[tuple[str, tuple[tuple[str, int], ...]], ...]


class DepthProfile:
    """Compares the gradient of the first block with that of the last, for each ModuleList or Sequential of blocks.

    The figure of a block is the root mean square over the elements of its weight matrices, so that blocks of different
    width compare. Embeddings (most rows have no gradient) and exact zeros (zero-initialised projections) are left out.
    Finished after `steps` steps, and free from then on.
    """

    def __init__(self, watch: Watch, *, limit: float, steps: int) -> None:
        self._limit = limit
        self._steps = steps
        self._stacks = _stacks(watch)
        self._ratios: dict[str, list[float]] = {stack.path: [] for stack in self._stacks}
        self._tries = _TRIES * steps * max(1, len(watch.optimizers))

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to compare."""
        return not self._stacks

    def judge(self, seen: Observation) -> Iterator[Finding]:
        """Yield one finding for each stack whose median ratio over the first steps is out of bounds."""
        if not self._stacks:
            return
        self._tries -= 1
        for stack in list(self._stacks):
            profile = _profile(stack, seen.grad_norms)
            if len(profile) < _LEAST_BLOCKS:
                continue
            figures = list(profile.values())
            ratios = self._ratios[stack.path]
            ratios.append(figures[0] / figures[-1])
            if len(ratios) == self._steps:
                self._stacks.remove(stack)
                ratio = middle(sorted(ratios))
                if ratio < self._limit or ratio * self._limit > 1.0:
                    yield self._finding(stack, profile, ratio, seen)
        if self._tries <= 0:
            self._stacks.clear()

    def _finding(self, stack: _Stack, profile: dict[str, float], ratio: float, seen: Observation) -> Finding:
        first, last = next(iter(profile)), next(reversed(profile))
        how = "smaller" if ratio < 1.0 else "larger"
        apart = 1.0 / ratio if ratio < 1.0 else ratio
        where = f"`{stack.path}`" if stack.path else "the model"
        steps = f"median ratio of the first {self._steps} steps" if self._steps > 1 else "in one step"
        return finding(
            "GG205",
            f"In {where} ({stack.kind} of {len(stack.blocks)} blocks) the gradient of block `{first}` is "
            f"{apart:.1e} times {how} than that of `{last}`: {number(profile[first])} against {number(profile[last])} "
            f"per weight (root mean square, {steps}).",
            likely=["saturation" if ratio < 1.0 else "growing"],
            step=seen.step,
            moment=Moment.BEFORE_STEP,
            module=stack.path,
            evidence={"per_weight": dict(profile), "ratio": ratio, "limit": self._limit},
        )


def _profile(stack: _Stack, norms: dict[str, float | None]) -> dict[str, float]:
    """Root mean square gradient per weight, by block, in the order of the container; unusable blocks left out."""
    profile: dict[str, float] = {}
    for path, weights in stack.blocks:
        known = [(norm, size) for name, size in weights if (norm := norms.get(name))]
        if known and all(math.isfinite(norm) for norm, _ in known):
            # A quotient of norms, not of their squares, which could underflow.
            largest = max(norm for norm, _ in known)
            square = math.fsum((norm / largest) ** 2 for norm, _ in known) / sum(size for _, size in known)
            profile[path] = largest * math.sqrt(square)
    return profile


def _stacks(watch: Watch) -> list[_Stack]:
    found: list[_Stack] = []
    for path, module in watch.model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) >= _LEAST_BLOCKS:
            named = [(f"{path}.{key}" if path else key, child) for key, child in module.named_children()]
            blocks = [(name, weights) for name, child in named if (weights := _weights(watch, child))]
            if len(blocks) >= _LEAST_BLOCKS:
                found.append(_Stack(path, type(module).__name__, tuple(blocks)))
    return found


def _weights(watch: Watch, block: nn.Module) -> tuple[tuple[str, int], ...]:
    found: list[tuple[str, int]] = []
    for module in block.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        for parameter in module.parameters(recurse=False):
            name = watch.name_of(parameter)
            if name is not None and parameter.dim() >= 2 and parameter.requires_grad and parameter.numel():
                found.append((name, parameter.numel()))
    return tuple(found)
