"""Whether a loss depends on given tensors: a walk over the autograd graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

_MOST_NODES = 200_000


def leaves(loss: Tensor) -> list[Tensor]:
    """The leaf tensors that `loss.backward()` would give a gradient to, each once; reads no values."""
    found: list[Tensor] = []
    if loss.grad_fn is None:
        return [loss] if loss.requires_grad else found
    seen: set[Any] = set()
    pending = [loss.grad_fn]
    while pending and len(seen) < _MOST_NODES:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.append(variable)
        pending.extend(parent for parent, _ in node.next_functions if parent is not None)
    return found


def reaches(loss: Tensor, tensors: Iterable[Tensor]) -> bool:
    """Whether any of the tensors is a leaf under this loss. Costs a walk of the graph: only after a failure."""
    wanted = {id(tensor) for tensor in tensors}
    return any(id(leaf) in wanted for leaf in leaves(loss))
