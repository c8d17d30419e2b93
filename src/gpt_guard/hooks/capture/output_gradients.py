"""The gradients that reach the outputs of a model: what the loop does to its loss, whatever it is, in a few tensors.

A hook that waits for one costs about 15 µs in a backward of a small model, so the first backward calls are used to
learn for which outputs it is needed. For a loss that the model itself returns and backward is called on, none is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt_guard.hooks.tensors import walk

# GAN loops and schedules of losses alternate: as many backward calls are looked at before what they use is trusted.
_LEARN = 4
_MOST_NODES = 200_000
# What most models return is one of these, or a tuple of them.
_USUAL = frozenset((Tensor, type(None)))
_PLACES = [f"[{place}]" for place in range(16)]


class OutputGradient:
    """An output that a gradient can reach: a pre-hook of its node, once it waits.

    On the node and not on the tensor: a pickled tensor would warn of it, and an in-place change made later would
    move it. `number` is the node's sequence number, by which it is found again without keeping the graph alive.
    """

    __slots__ = ("gradient", "number", "place", "position")

    def __init__(self, position: str, number: int, place: int) -> None:
        self.position = position
        self.number = number
        self.place = place
        self.gradient: Tensor | None = None

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        self.gradient = gradients[self.place]


def await_gradients(output: Any, positions: Collection[str] | None = None) -> list[OutputGradient]:
    """List the tensors of an output that a backward can reach, and wait at those positions, or at all for None."""
    found: list[OutputGradient] = []
    for position, tensor in _tensors(output):
        node: Any = tensor.grad_fn
        if node is not None:
            waiting = OutputGradient(position, node._sequence_nr(), tensor.output_nr)
            found.append(waiting)
            if positions is None or position in positions:
                node.register_prehook(waiting)
    return found


def _tensors(output: Any) -> Iterable[tuple[str, Tensor]]:
    kind = type(output)
    if kind is Tensor:
        return (("", output),)
    if kind is tuple and len(output) <= len(_PLACES) and _USUAL.issuperset(map(type, output)):
        # As `walk` goes through it, without a generator and names to be made for it.
        return [each for each in zip(_PLACES, output, strict=False) if each[1] is not None]
    return walk(output)


class UsedOutputs:
    """Which outputs a loop computes its loss from, None while that is not known.

    Learnt anew when a loss comes from elsewhere than ever before.
    """

    __slots__ = ("_found", "_left", "positions")

    def __init__(self) -> None:
        self._left = _LEARN
        self._found: set[str] = set()
        self.positions: frozenset[str] | None = None

    def backward_begins(self, losses: Sequence[Tensor], calls: Iterable[Sequence[OutputGradient]]) -> None:
        """Look at where the losses of a backward come from, while that is not known or nothing waits for it."""
        if self.positions is None:
            self._learn(losses, [output for outputs in calls for output in outputs])
        elif not self.positions and not any(direct(losses, outputs) for outputs in calls):
            self.positions, self._left = None, _LEARN

    def _learn(self, losses: Sequence[Tensor], outputs: Sequence[OutputGradient]) -> None:
        if direct(losses, outputs) is None:
            first, again = reached(losses, {output.number for output in outputs})
            self._found |= {output.position for output in outputs if output.number in (*first, *again)}
        self._left -= 1
        if self._left == 0:
            self.positions = frozenset(self._found)


def direct(losses: Sequence[Tensor], outputs: Iterable[OutputGradient]) -> OutputGradient | None:
    """The output, a single number, that backward is called on itself: its gradient is 1."""
    if len(losses) != 1 or losses[0].grad_fn is None or losses[0].dim():
        return None
    number = losses[0].grad_fn._sequence_nr()
    return next((output for output in outputs if output.number == number), None)


def gradients_of(outputs: Sequence[OutputGradient], losses: Sequence[Tensor]) -> dict[str, Tensor]:
    """The gradients that have come, by position."""
    found = {output.position: output.gradient for output in outputs if output.gradient is not None}
    if (itself := direct(losses, outputs)) is not None and itself.position not in found:
        found[itself.position] = torch.ones_like(losses[0], requires_grad=False)
    return found


class Reached(NamedTuple):
    """Sequence numbers of the nodes that a backward comes to `first`, and of those that it comes to `again`.

    A node that is only reached through another one is left out. One that is reached both ways is among `again`: its
    gradient holds what comes through the other, and counting both would count that twice.
    """

    first: list[int]
    again: list[int]


def reached(losses: Sequence[Tensor], numbers: Collection[int]) -> Reached:
    """Of nodes given by their sequence numbers (in one thread), those that the losses are computed from directly.

    Read from the autograd graph, where each path to them is walked once.
    """
    found: dict[int, Any] = {}
    for node in _walk([loss.grad_fn for loss in losses if loss.grad_fn is not None], numbers):
        found[node._sequence_nr()] = node
    behind: set[int] = set()
    if len(found) > 1:
        for node in found.values():
            above = [parent for parent, _ in node.next_functions if parent is not None]
            behind |= {inner._sequence_nr() for inner in _walk(above, numbers)}
    return Reached([each for each in found if each not in behind], [each for each in found if each in behind])


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
