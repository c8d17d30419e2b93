"""Which operations stand between a loss and the first bad gradient, and which of them have a steep derivative.

Works on the graph that `backward()` has left behind: tensors are freed by then, but names, numbers and edges are not.
Walks the whole graph: only after a failure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from gpt_guard.hooks.autograd_graph.nodes import name_of, nodes

_ROOTS = {"Sqrt", "Rsqrt", "Pow"}
_EDGES = {"Log", "Log2", "Log10", "Log1P", "Acos", "Asin", "Acosh", "Atanh", "Atan2", "Xlogy", "Logit", "Div"}
_DECOMPOSITIONS = re.compile(r"Linalg(Eig|Svd|Qr|Cholesky)|^Cholesky|^Svd|^Eigh?$|^Symeig")
_SOFTMAX = re.compile(r"Softmax|ScaledDotProduct")
# A weight reaches its product through one of these.
_PASSING = ("T", "Transpose", "ToCopy")
_SHAPES = {"View", "Reshape", "Transpose", "Permute", "T", "Expand", "Unsqueeze", "Squeeze", "Slice", "Select", "Clone"}
# A full backward hook of a module is a custom function as well, but not one that the user wrote.
_MODULE_HOOK = "BackwardHookFunction"


class PathStep(NamedTuple):
    """An operation: its name as autograd has it without suffix, whether the user wrote it, its exponent if a power."""

    name: str
    own: bool
    exponent: float | None


def operations_above(loss: Tensor, bad: Tensor, good: Iterable[Tensor]) -> list[PathStep]:
    """The operations on the way from the loss down to `bad`, the last before backward() first.

    Those above a gradient that is still finite are left out. A parameter that is read in several places goes by the
    last one that has a steep operation above it. Empty if the graph does not lead to `bad`.
    """
    readers: dict[int, list[Any]] = {}
    parents: dict[Any, list[Any]] = {}
    for node in nodes(loss):
        for below, _ in node.next_functions:
            if below is None:
                continue
            parents.setdefault(below, []).append(node)
            if (variable := getattr(below, "variable", None)) is not None:
                readers.setdefault(id(variable), []).append(node)
    # A finite gradient proves that what came down to the operation which read its parameter was finite.
    finite = {node for each in good for node in readers.get(id(each), [])}
    finite |= {above for node in finite if name_of(node) in _PASSING for above in parents.get(node, [])}
    first: list[PathStep] = []
    for start in sorted(readers.get(id(bad), []), key=_latest_first):
        steps = _way_up(start, parents, finite)
        if next(suspects(steps), None) is not None:
            return steps
        first = first or steps
    return first


def _way_up(start: Any, parents: dict[Any, list[Any]], finite: set[Any]) -> list[PathStep]:
    way, pending = {start}, [start]
    while pending:
        node = pending.pop()
        for above in () if node in finite and node is not start else parents.get(node, []):
            if above not in way:
                way.add(above)
                pending.append(above)
    return [_step(node) for node in sorted(way, key=_latest_first)]


def _latest_first(node: Any) -> int:
    return -int(node._sequence_nr())


def _step(node: Any) -> PathStep:
    name = name_of(node)
    origin = getattr(type(node), "_forward_cls", None)
    own = isinstance(node, BackwardCFunction) and not getattr(origin, "__module__", "").startswith("torch.")
    # A number is kept as it is; an exponent that is a tensor (PowBackward1) is a saved one, and freed by now.
    exponent = node._saved_exponent if node.name() == "PowBackward0" else None
    return PathStep(name, own or name == _MODULE_HOOK, exponent if isinstance(exponent, (int, float)) else None)


def names_of(steps: list[PathStep]) -> list[str]:
    """What the operations are called, each once; those that only move numbers are left out."""
    return [name for name in dict.fromkeys(step.name for step in steps) if name not in _SHAPES]


def suspects(steps: list[PathStep]) -> Iterator[str]:
    """Keys of GG104's causes that fit the operations, the likeliest first."""
    names = [step.name for step in steps]
    risky = [number for number, step in enumerate(steps) if _is_risky(step)]
    if any(step.own for step in steps):
        yield "hook_or_manual"
    if any(_DECOMPOSITIONS.search(name) for name in names):
        yield "decomposition"
    if risky and "Where" in names[: risky[-1]]:
        yield "where_unselected"
    for number in risky:
        if names[number] in _ROOTS:
            yield from _root(names[number + 1 :])
        elif names[number] != "Div":
            yield "log_at_zero"
    if any(_SOFTMAX.search(name) for name in names):
        yield "masked_row"


def _root(below: list[str]) -> Iterator[str]:
    """A root of a sum of squares is a norm written out."""
    if "Sum" in below[:2] and any(name in ("Pow", "Mul") for name in below[:4]):
        yield "norm_at_zero"
    yield "sqrt_at_zero"


def _is_risky(step: PathStep) -> bool:
    if step.name == "Pow":
        return step.exponent is None or step.exponent < 1
    return step.name in _ROOTS or step.name in _EDGES
