"""Which outputs of a model a loss is computed from, read from the autograd graph: each path to them is walked once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

_MOST_NODES = 200_000


class Frontier(NamedTuple):
    """Sequence numbers of the nodes that a backward comes to `first`, and of those that it comes to `again`.

    A node that is only reached through another one is left out. One that is reached both ways is among `again`: its
    gradient holds what comes through the other, and counting both would count that twice.
    """

    first: list[int]
    again: list[int]


def frontier(losses: Sequence[Tensor], numbers: Collection[int]) -> Frontier:
    """Of nodes given by their sequence numbers (in one thread), those that the losses are computed from directly."""
    found: dict[int, Any] = {}
    for node in _walk([loss.grad_fn for loss in losses if loss.grad_fn is not None], numbers):
        found[node._sequence_nr()] = node
    behind: set[int] = set()
    if len(found) > 1:
        for node in found.values():
            above = [parent for parent, _ in node.next_functions if parent is not None]
            behind |= {inner._sequence_nr() for inner in _walk(above, numbers)}
    return Frontier([each for each in found if each not in behind], [each for each in found if each in behind])


def bypassed(losses: Sequence[Tensor], numbers: Collection[int], parameter: Tensor) -> bool:
    """Whether the losses depend on a parameter by a way that leads through none of these nodes."""
    seen = {loss.grad_fn for loss in losses if loss.grad_fn is not None}
    pending: list[Any] = list(seen)
    for node in pending:
        if getattr(node, "variable", None) is parameter:
            return True
        if node._sequence_nr() not in numbers:
            above = {parent for parent, _ in node.next_functions if parent is not None} - seen
            pending += above
            seen |= above
    return False


def _walk(roots: Sequence[Any], numbers: Collection[int]) -> Iterator[Any]:
    """Yield the wanted nodes that can be reached, and go no further at any of them."""
    seen = set(roots)
    pending = list(roots)
    for node in pending:
        if node._sequence_nr() in numbers:
            yield node
            continue
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen and len(seen) < _MOST_NODES:
                seen.add(parent)
                pending.append(parent)
