"""The gradients that reach the outputs of a model: what the loop does to its loss, whatever it is, in a few tensors.

A hook that waits for one costs about 15 µs in a backward of a small model, so the first backward calls are used to
learn for which outputs it is needed. For a loss that the model itself returns and backward is called on, none is: then
only the numbers of what was returned are kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gpt_guard.hooks.capture.outputs_reached import frontier
from gpt_guard.hooks.tensors import walk

# GAN loops and schedules of losses alternate: as many backward calls are looked at before a pattern is trusted.
_LEARN = 4
# What most models return is one of these, or a tuple of them.
_USUAL = frozenset((Tensor, type(None)))
_PLACES = [f"[{place}]" for place in range(16)]
# The sequence number of a tensor's node, or of each in a tuple of tensors and None.
Numbers = int | list[int | None]


class Arrival:
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


def await_gradients(output: Any, positions: Collection[str] | None = None) -> list[Arrival]:
    """List the tensors of an output that a backward can reach, and wait at those positions, or at all for None."""
    found: list[Arrival] = []
    for position, tensor in _tensors(output):
        node: Any = tensor.grad_fn
        if node is not None:
            arrival = Arrival(position, node._sequence_nr(), tensor.output_nr)
            found.append(arrival)
            if positions is None or position in positions:
                node.register_prehook(arrival)
    return found


def _tensors(output: Any) -> Iterable[tuple[str, Tensor]]:
    kind = type(output)
    if kind is Tensor:
        return (("", output),)
    if kind is tuple and len(output) <= len(_PLACES) and _USUAL.issuperset(map(type, output)):
        # As `walk` goes through it, without a generator and names to be made for it.
        return [each for each in zip(_PLACES, output, strict=False) if each[1] is not None]
    return walk(output)


def numbers_of(output: Any) -> Numbers | None:
    """What is kept of an output where nothing waits; None for one that has to be walked through."""
    kind = type(output)
    if kind is Tensor:
        node = output.grad_fn
        return [] if node is None else node._sequence_nr()
    if kind is not tuple or not _USUAL.issuperset(map(type, output)):
        return None
    nodes = [None if each is None else each.grad_fn for each in output]
    return [None if node is None else node._sequence_nr() for node in nodes]


def listed(numbers: Numbers) -> list[Arrival]:
    """The arrivals that `await_gradients` would have listed, waiting nowhere."""
    if isinstance(numbers, int):
        return [Arrival("", numbers, 0)]
    return [Arrival(f"[{place}]", number, 0) for place, number in enumerate(numbers) if number is not None]


class Pattern:
    """Which outputs a loop computes its loss from: learnt anew when a loss comes from elsewhere than ever before."""

    __slots__ = ("_left", "_used", "positions")

    def __init__(self) -> None:
        self._left = _LEARN
        self._used: set[str] = set()
        self.positions: frozenset[str] | None = None

    def backward_begins(self, losses: Sequence[Tensor], calls: Iterable[Sequence[Arrival]]) -> None:
        """Look at where the losses of a backward come from, while that is not known or nothing waits for it."""
        if self.positions is None:
            self._learn(losses, [arrival for arrivals in calls for arrival in arrivals])
        elif not self.positions and not any(direct(losses, arrivals) for arrivals in calls):
            self.positions, self._left = None, _LEARN

    def _learn(self, losses: Sequence[Tensor], arrivals: Sequence[Arrival]) -> None:
        if not any(direct(losses, [arrival]) for arrival in arrivals):
            first, again = frontier(losses, {arrival.number for arrival in arrivals})
            self._used |= {arrival.position for arrival in arrivals if arrival.number in (*first, *again)}
        self._left -= 1
        if self._left == 0:
            self.positions = frozenset(self._used)


def returned(losses: Sequence[Tensor], numbers: Numbers) -> bool:
    """Whether backward is called on one of these outputs itself, as `direct` finds it."""
    if len(losses) != 1 or (node := losses[0].grad_fn) is None or losses[0].dim():
        return False
    number = node._sequence_nr()
    return number == numbers if isinstance(numbers, int) else number in numbers


def direct(losses: Sequence[Tensor], arrivals: Iterable[Arrival]) -> Arrival | None:
    """The output, a single number, that backward is called on itself: its gradient is 1."""
    if len(losses) != 1 or losses[0].grad_fn is None or losses[0].dim():
        return None
    number = losses[0].grad_fn._sequence_nr()
    return next((arrival for arrival in arrivals if arrival.number == number), None)


def gradients_of(arrivals: Sequence[Arrival], losses: Sequence[Tensor]) -> dict[str, Tensor]:
    """The gradients that have arrived, by position."""
    found = {arrival.position: arrival.gradient for arrival in arrivals if arrival.gradient is not None}
    if (itself := direct(losses, arrivals)) is not None and itself.position not in found:
        found[itself.position] = torch.ones_like(losses[0], requires_grad=False)
    return found
