"""What a loss depends on, read from its autograd graph: leaves, the order of backward, the operations on top.

Each walk costs a visit of every node: only after a failure, or once at the start.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

_MOST_NODES = 200_000
_OPERATIONS = 6


def nodes(loss: Tensor) -> Iterator[Any]:
    """Every node under the loss, each once, those nearest to it first."""
    if loss.grad_fn is None:
        return
    seen: set[Any] = {loss.grad_fn}
    pending = [loss.grad_fn]
    for node in pending:
        yield node
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen and len(seen) < _MOST_NODES:
                seen.add(parent)
                pending.append(parent)


def leaves(loss: Tensor) -> list[Tensor]:
    """The leaf tensors that `loss.backward()` would give a gradient to, each once; reads no values."""
    if loss.grad_fn is None:
        return [loss] if loss.requires_grad else []
    return [node.variable for node in nodes(loss) if hasattr(node, "variable")]


def reaches(loss: Tensor, tensors: Iterable[Tensor]) -> bool:
    """Whether any of the tensors is a leaf under this loss."""
    wanted = {id(tensor) for tensor in tensors}
    return any(id(leaf) in wanted for leaf in leaves(loss))


def uses(loss: Tensor) -> dict[int, list[int]]:
    """For each leaf, by id, the sequence numbers of the operations that read it, highest first.

    Autograd numbers operations as the forward makes them and runs them backward from the highest number down, so the
    first entry tells when the gradient of this leaf begins. A leaf inside a reentrant checkpoint is not in the graph.
    """
    found: dict[int, list[int]] = {}
    for node in nodes(loss):
        for parent, _ in node.next_functions:
            variable = getattr(parent, "variable", None)
            if variable is not None:
                found.setdefault(id(variable), []).append(node._sequence_nr())
    return {leaf: sorted(numbers, reverse=True) for leaf, numbers in found.items()}


def operations(loss: Tensor) -> list[str]:
    """The last few operations that made a loss, newest first, as autograd names them without its suffix."""
    names: list[str] = []
    for node in nodes(loss):
        if len(names) == _OPERATIONS:
            break
        if not hasattr(node, "variable"):
            names.append(re.sub(r"Backward\d*$", "", node.name()))
    return names


class Labels(NamedTuple):
    """Targets of a loss that leaves one label out: how many there are, how many of them teach anything."""

    labels: int
    supervised: int
    ignore_index: int


def labels_of(loss: Tensor) -> Labels | None:
    """The targets of the first cross entropy (or NLL loss) under a loss, kept by autograd until backward() frees them.

    None if there is none in the graph, or its tensors have been freed. Reads the targets.
    """
    for node in nodes(loss):
        if not node.name().startswith("NllLoss"):
            continue
        try:
            target, ignored = node._saved_target, node._saved_ignore_index
        except RuntimeError:
            return None
        # Autograd gives a signed argument back as an unsigned one: -100 comes as 2**64 - 100.
        ignored = ignored - 2**64 if ignored >= 2**63 else ignored
        return Labels(target.numel(), int((target != ignored).sum()), ignored)
    return None
