"""The terms that a loss is the sum of, found in its graph, with the constants that weigh them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from gpt_guard.hooks.autograd_graph.origin import name_of
from gpt_guard.hooks.autograd_graph.reach import nodes
from gpt_guard.records import SourceLine

_PASSING = ("View", "UnsafeView", "Squeeze", "Unsqueeze", "Clone", "ToCopy", "Select")
_REDUCING = (*_PASSING, "Mean", "Sum", "Div", "Mul", "Neg", "Add", "Sub")
_MOST_TERMS = 12
_WORDS_OF = 3


class Origin(NamedTuple):
    """A call of one of torch's losses: its name, its line, and whether it compares with data."""

    name: str
    line: SourceLine | None
    data: bool


class Term(NamedTuple):
    """One addend: its node, its constant weight, what to call it, and whether it compares with data."""

    node: Any
    weight: float
    name: str
    data: bool
    line: SourceLine | None = None


def terms_of(loss: Tensor, known: Mapping[int, Origin]) -> list[Term]:
    """The addends of a scalar loss, by its graph; one alone for a loss that is no sum. `known` is by operation number.

    Reads constants that terms are multiplied by. A factor that has a gradient of its own belongs to its term.
    """
    found: list[Term] = []
    pending: list[tuple[Any, float]] = [(loss.grad_fn, 1.0)] if loss.grad_fn is not None else []
    while pending:
        node, weight = pending.pop(0)
        if len(found) + len(pending) > _MOST_TERMS:
            return []
        parts = None if int(node._sequence_nr()) in known else _parts(node)
        if parts is None:
            found.append(_named(node, weight, known))
        else:
            pending += [(part, weight * factor) for part, factor in parts]
    return _apart(found)


def _parts(node: Any) -> list[tuple[Any, float]] | None:
    """What a node adds up, with weights; None for one that is a term itself."""
    name = name_of(node)
    parents = [parent for parent, _ in node.next_functions if parent is not None]
    if not parents or _numel(node) != 1:
        return None
    if name in ("Add", "Sub"):
        return [(parent, 1.0) for parent in parents if _numel(parent) == 1] if _all_scalar(parents) else None
    if len(parents) != 1:
        return None
    if name in ("Sum", "Mean") and name_of(parents[0]) in ("Stack", "Cat"):
        below = [parent for parent, _ in parents[0].next_functions if parent is not None]
        share = 1.0 / len(below) if name == "Mean" and below else 1.0
        return [(parent, share) for parent in below] if _all_scalar(below) else None
    if not _all_scalar(parents):
        return None
    if name in _PASSING:
        return [(parents[0], 1.0)]
    if name == "Neg":
        return [(parents[0], -1.0)]
    constant = _constant(node) if name in ("Mul", "Div") else None
    if constant is None or constant == 0:
        return None
    return [(parents[0], constant if name == "Mul" else 1.0 / constant)]


def _constant(node: Any) -> float | None:
    """The other factor, if it is a number; of a division, the divisor."""
    first = node.next_functions[0][0] is not None
    other = getattr(node, "_saved_other" if first else "_saved_self", None)
    return float(other) if isinstance(other, Tensor) and other.numel() == 1 and not other.requires_grad else None


def _all_scalar(parents: list[Any]) -> bool:
    return all(_numel(parent) == 1 and not hasattr(parent, "variable") for parent in parents)


def _numel(node: Any) -> int:
    known = getattr(node, "_input_metadata", ())
    return torch.Size(known[0].shape).numel() if known else 0


def _named(node: Any, weight: float, known: Mapping[int, Origin]) -> Term:
    below: Any = node
    names: list[str] = []
    while below is not None and not hasattr(below, "variable") and len(names) < 2 * _WORDS_OF:
        if (origin := known.get(int(below._sequence_nr()))) is not None:
            place = f" ({origin.line.file}:{origin.line.line})" if origin.line is not None else ""
            return Term(node, weight, origin.name + place, origin.data, origin.line)
        names.append(name_of(below).lower())
        parents = [parent for parent, _ in below.next_functions if parent is not None]
        below = parents[0] if parents and (len(parents) == 1 or names[-1].capitalize() in _REDUCING) else None
    return Term(node, weight, " of ".join(names[:_WORDS_OF]), data=False)


def _apart(terms: list[Term]) -> list[Term]:
    """Two terms of one name get numbers."""
    names = [term.name for term in terms]
    return [
        term._replace(name=f"{term.name} #{names[: k + 1].count(term.name)}") if names.count(term.name) > 1 else term
        for k, term in enumerate(terms)
    ]


def may_be_walked(loss: Tensor) -> bool:
    """Whether a backward of our own would run nothing of the user's: no function of theirs, no packed tensors.

    Functions written in Python may count or communicate; hooks on saved tensors recompute a checkpoint, or fetch what
    was offloaded. Reads no values.
    """
    return not any(isinstance(node, BackwardCFunction) or _packed(node) for node in nodes(loss))


_SAVED: dict[type, list[str]] = {}


def _packed(node: Any) -> bool:
    kind = type(node)
    if kind not in _SAVED:
        _SAVED[kind] = [name for name in dir(kind) if name.startswith("_raw_saved_")]
    for name in _SAVED[kind]:
        saved = getattr(node, name)
        for each in saved if isinstance(saved, (tuple, list)) else (saved,):
            # An older torch does not tell: then it is better not to look.
            if getattr(each, "unpack_hook", _UNKNOWN) is not None:
                return True
    return False


_UNKNOWN = object()
