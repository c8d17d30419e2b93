"""The forward operations by autograd's sequence numbers, so that a step of the backward finds the user's line.

Autograd numbers its nodes as they are made. An operation is seen right after its node was, so the newest number is that
of its own node; one that makes no node finds the number taken.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch

from gpt_guard.records import Operand
from gpt_guard.replaying.memory import Maker
from gpt_guard.replaying.places import Place
from gpt_guard.replaying.words import word_for, word_for_node

# A write to a view makes two nodes after the operation itself.
_LATE = 2


@dataclass(frozen=True, slots=True)
class Hazard:
    """Values at which an operation is finite, or masked later, and its derivative is not; `key` names the cause."""

    operand: Operand
    shows: str
    key: str


@dataclass(frozen=True, slots=True)
class Forward:
    """An operation of the forward, as far as its derivative may need it."""

    base: str
    place: Place
    maker: Maker
    hazard: Hazard | None = None


class Forwards:
    """What each node of the graph stands for, for each thread that has made nodes."""

    def __init__(self) -> None:
        self._made: dict[int, dict[int, Forward]] = {}

    def note(self, forward: Forward) -> None:
        """Record the operation that has just been dispatched, in the thread that called it."""
        self._made.setdefault(threading.get_ident(), {}).setdefault(_newest(), forward)

    def free(self) -> bool:
        """Whether the newest node of this thread has no operation yet."""
        return _newest() not in self._made.get(threading.get_ident(), {})

    def of(self, node: Any) -> Forward | None:
        """The operation that a node is the derivative of; None if it was made before the trace, or unseen."""
        number, word = node._sequence_nr(), word_for_node(node.name())
        here = threading.get_ident()
        threads = sorted(self._made.items(), key=lambda item: item[0] != here)
        found = [made[number] for _, made in threads if number in made]
        named = [forward for forward in found if word_for(forward.base) == word]
        if named or found:
            return (named or found)[0]
        if node.name().startswith(("CopySlices", "AsStrided")):
            late = (made.get(number - back) for back in range(1, _LATE + 1) for _, made in threads)
            return next((forward for forward in late if forward is not None), None)
        return None


def _newest() -> int:
    return int(torch._C._autograd._get_sequence_nr()) - 1


def current_node() -> Any:
    """The node of the graph that the running backward computes; None outside of a backward."""
    return torch._C._current_autograd_node() if torch._C._current_graph_task_id() != -1 else None
