"""Where the values of a tensor come from, read from its autograd graph: past views, casts and selections."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

_FAR = 60
"""More operations than any view of a tensor has; the walk must end."""
# These give the same numbers in another order, shape or dtype, or a part of them.
MOVING = frozenset(
    {
        *("View", "UnsafeView", "ReshapeAlias", "Transpose", "T", "Permute", "Clone", "ToCopy", "Alias"),
        *("Slice", "Select", "Index", "IndexSelect", "Squeeze", "Unsqueeze", "Unbind", "Split", "SplitWithSizes"),
        *("Expand", "Cat", "Stack", "Clamp", "ClampMin", "ClampMax"),
    }
)


def name_of(node: Any) -> str:
    """An operation as autograd names it, without its suffix: `Softmax`, `View`, `AccumulateGrad`."""
    return re.sub(r"Backward\d*$", "", str(node.name()).rpartition("::")[2])


def sequence_of(tensor: Tensor) -> int | None:
    """The number of the operation that made a tensor; None for a leaf. Counts up in each thread."""
    return None if tensor.grad_fn is None else int(tensor.grad_fn._sequence_nr())


def signed(number: int) -> int:
    """Nodes give their integers unsigned: -1 comes as 2**64 - 1."""
    return number - 2**64 if number >= 2**63 else number


def origin(tensor: Tensor) -> Any:
    """The node of the operation that computed these values, or None: a leaf, a detached tensor, no gradients."""
    node = tensor.grad_fn
    for _ in range(_FAR):
        if node is None or name_of(node) not in MOVING:
            return node
        node = next((parent for parent, _ in node.next_functions if parent is not None), None)
    return node


def is_logistic(node: Any) -> bool:
    """Whether a node is a sigmoid, also one written out as 1 / (1 + exp(-x))."""
    if node is not None and name_of(node) == "Sigmoid":
        return True
    names: list[str] = []
    while node is not None and len(names) < 4:
        names.append(name_of(node))
        node = next((parent for parent, _ in node.next_functions if parent is not None), None)
    return [name for name in names if name != "Mul"][:3] == ["Reciprocal", "Add", "Exp"]
