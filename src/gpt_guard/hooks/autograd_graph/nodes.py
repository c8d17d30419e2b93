"""Read an autograd graph: its nodes and their names, the leaves a loss depends on, where a tensor's values come from.

Each walk over a loss costs a visit of every node: only after a failure, or once at the start.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

_MOST_NODES = 200_000
_OPERATIONS = 6
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
# What a layer with weights is made of.
_PRODUCTS = frozenset({"Mm", "Addmm", "Bmm", "Mv", "Convolution", "MkldnnConvolution", "Embedding", "Linear"})


def name_of(node: Any) -> str:
    """An operation as autograd names it, without its suffix: `Softmax`, `View`, `AccumulateGrad`."""
    return re.sub(r"Backward\d*$", "", str(node.name()).rpartition("::")[2])


def sequence_of(tensor: Tensor) -> int | None:
    """The number of the operation that made a tensor; None for a leaf. Counts up in each thread."""
    return None if tensor.grad_fn is None else int(tensor.grad_fn._sequence_nr())


def signed(number: int) -> int:
    """Nodes give their integers unsigned: -1 comes as 2**64 - 1."""
    return number - 2**64 if number >= 2**63 else number


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


def uses_any(loss: Tensor, tensors: Iterable[Tensor]) -> bool:
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


def is_network_beside(loss: Tensor, theirs: Iterable[Tensor], own: Iterable[Tensor]) -> bool:
    """Whether some leaves are the weights of a network that meets the one of `own` only behind both, in the loss.

    Its operations read no value that was computed from `own`, those that read `own` none that was computed from it, and
    one of them is a product or a lookup: a scale or a bias alone is no network.
    """
    kinds = {id(leaf): 1 for leaf in theirs} | {id(leaf): 2 for leaf in own}
    behind: dict[Any, int] = {}
    plain: dict[Any, bool] = {}
    computes = False
    for node in reversed(_with_parents_last(loss)):
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        behind[node] = kinds.get(id(getattr(node, "variable", None)), 0)
        for parent in parents:
            behind[node] |= behind.get(parent, 0)
        weights = [behind.get(parent, 0) for parent in parents if plain.get(parent)]
        plain[node] = hasattr(node, "variable") or (name_of(node) in MOVING and len(weights) == len(parents))
        if plain[node] or not any(weights):
            continue
        if behind[node] == 3:
            return False
        computes |= 1 in weights and name_of(node) in _PRODUCTS
    return computes


def _with_parents_last(loss: Tensor) -> list[Any]:
    """The nodes under a loss, each after all that read it."""
    found = list(nodes(loss))
    readers = dict.fromkeys(found, 0)
    for node in found:
        for parent, _ in node.next_functions:
            if parent in readers:
                readers[parent] += 1
    ready = [node for node in found if not readers[node]]
    for node in ready:
        for parent, _ in node.next_functions:
            if parent in readers:
                readers[parent] -= 1
                if not readers[parent]:
                    ready.append(parent)
    return ready


def operations(loss: Tensor) -> list[str]:
    """The last few operations that made a loss, newest first, as autograd names them without its suffix."""
    names: list[str] = []
    for node in nodes(loss):
        if len(names) == _OPERATIONS:
            break
        if not hasattr(node, "variable"):
            names.append(re.sub(r"Backward\d*$", "", node.name()))
    return names


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
