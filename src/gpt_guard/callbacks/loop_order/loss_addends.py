"""How a loss was averaged, read from the top of its graph: a mean or a sum over how many elements, times which factors.

Reads no value: factors and counts that are tensors stay where they are. Knows torch's own losses, means and sums; of
anything else it says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

_MOST_NODES = 40
_MEAN, _SUM = 1, 2
# Losses that keep their reduction and what they compared with.
_LOSSES = {
    "MseLoss": "_saved_target",
    "SmoothL1Loss": "_saved_target",
    "HuberLoss": "_saved_target",
    "BinaryCrossEntropy": "_saved_target",
    "BinaryCrossEntropyWithLogits": "_saved_target",
    "KlDiv": "_saved_target",
}
# A single number goes through these as it is.
_PASSING = {"View", "UnsafeView", "Reshape", "Squeeze", "Unsqueeze", "Clone", "ToCopy", "Alias", "Select", "Neg"}


class Factor(NamedTuple):
    """A number that the loss was multiplied by (`power` 1) or divided by (-1)."""

    value: Any
    power: int


class Addend(NamedTuple):
    """One addend of a loss, by autograd's name: `mean` or sum over `count` elements, times all `factors`."""

    kind: str
    mean: bool
    count: Any
    factors: tuple[Factor, ...]


def addends(loss: Tensor) -> list[Addend]:
    """The addends of a loss that are known; empty if any part of its top is of an unknown kind."""
    found: list[Addend] = []
    budget = [_MOST_NODES]
    try:
        found.extend(_walk(loss.grad_fn, (), budget))
    except (_Unknown, RuntimeError):
        # RuntimeError: an earlier backward has freed the graph.
        return []
    return found


class _Unknown(Exception):
    """An operation that says nothing about how the loss was averaged."""


def _walk(node: Any, factors: tuple[Factor, ...], budget: list[int]) -> Iterator[Addend]:
    budget[0] -= 1
    if node is None or budget[0] < 0:
        raise _Unknown
    name = str(node.name()).split("Backward")[0]
    below = [each for each, _ in node.next_functions]
    if name in ("Mul", "Div"):
        yield from _walk(_other_than_constant(below), (*factors, _factor(node, name)), budget)
    elif name in ("Add", "Sub"):
        for each in below:
            if each is not None:
                yield from _walk(each, factors, budget)
    elif name in _PASSING:
        yield from _walk(below[0], factors, budget)
    else:
        yield _addend(node, name, factors, budget)


def _other_than_constant(below: list[Any]) -> Any:
    graphs = [each for each in below if each is not None]
    if len(graphs) != 1:
        raise _Unknown
    return graphs[0]


def _factor(node: Any, name: str) -> Factor:
    value = getattr(node, "_saved_other", None)
    value = getattr(node, "_saved_self", None) if value is None else value
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise _Unknown
        value = value.detach().reshape(())
    elif not isinstance(value, (int, float)):
        raise _Unknown
    return Factor(value, -1 if name == "Div" else 1)


def _addend(node: Any, name: str, factors: tuple[Factor, ...], budget: list[int]) -> Addend:
    if name in ("NllLoss", "NllLoss2D"):
        if (reduction := node._saved_reduction) not in (_MEAN, _SUM):
            raise _Unknown
        return Addend(name, reduction == _MEAN, node._saved_total_weight.detach().reshape(()), factors)
    if name in _LOSSES:
        if (reduction := node._saved_reduction) not in (_MEAN, _SUM):
            raise _Unknown
        return Addend(name, reduction == _MEAN, node._saved_target.numel(), factors)
    if name in ("Mean", "Sum"):
        numel = math.prod(int(size) for size in node._saved_self_sym_sizes)
        if numel == 1:
            # A mean of the losses of several devices, of which there is one.
            return next(_walk(node.next_functions[0][0], factors, budget))
        return Addend(name, name == "Mean", numel, factors)
    raise _Unknown


def same_graph(loss: Tensor, earlier: set[int]) -> bool:
    """Whether one of the operations with these sequence numbers stands under this loss, or is its own.

    Autograd numbers operations in the order of the forward, so only those made since the earliest are visited.
    """
    if loss.grad_fn is None or not earlier:
        return False
    first = min(earlier)
    seen, pending = {loss.grad_fn}, [loss.grad_fn]
    for node in pending:
        if node._sequence_nr() in earlier and "AccumulateGrad" not in node.name():
            return True
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen and first <= parent._sequence_nr() < _ACCUMULATES:
                seen.add(parent)
                pending.append(parent)
    return False


# AccumulateGrad nodes have the highest number there is, so that they run first.
_ACCUMULATES = 2**62
