"""The terms that a loss is the sum of, and whether one of them decides alone.

Terms are found in the graph, with the constants that weigh them, and are compared by the norms of their gradients on
the parameters that they share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from gpt_guard.callbacks.call_issue import CallIssue
from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.autograd_graph.nodes import name_of, nodes
from gpt_guard.hooks.functions.call_record import CallPlace
from gpt_guard.records import Severity, SourceLine
from gpt_guard.records.render import number

_PASSING = ("View", "UnsafeView", "Squeeze", "Unsqueeze", "Clone", "ToCopy", "Select")
_REDUCING = (*_PASSING, "Mean", "Sum", "Div", "Mul", "Neg", "Add", "Sub")
_MOST_TERMS = 12
_WORDS_OF = 3
_MOST_ELEMENTS = 2**24
"""Parameters that are looked at, the last ones first, as GradNorm looks at the last shared layer (Chen et al. 2018)."""


class NamedLoss(NamedTuple):
    """A call of one of torch's losses: its name, its line, and whether it compares with data."""

    name: str
    line: SourceLine | None
    data: bool


class LossTerm(NamedTuple):
    """One addend: its node, its constant weight, what to call it, and whether it compares with data.

    `norm` is that of its gradient on the shared parameters, as applied; where it is known the node has been let go.
    """

    node: Any
    weight: float
    name: str
    data: bool
    line: SourceLine | None = None
    norm: float = math.nan


def terms_of(loss: Tensor, known: Mapping[int, NamedLoss]) -> list[LossTerm]:
    """The addends of a scalar loss, by its graph; one alone for a loss that is no sum. `known` is by operation number.

    Reads constants that terms are multiplied by. A factor that has a gradient of its own belongs to its term.
    """
    found: list[LossTerm] = []
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


def _named(node: Any, weight: float, known: Mapping[int, NamedLoss]) -> LossTerm:
    below: Any = node
    names: list[str] = []
    while below is not None and not hasattr(below, "variable") and len(names) < 2 * _WORDS_OF:
        if (call := known.get(int(below._sequence_nr()))) is not None:
            return LossTerm(node, weight, call.name + str(CallPlace(call.line, None, None)), call.data, call.line)
        names.append(name_of(below).lower())
        parents = [parent for parent, _ in below.next_functions if parent is not None]
        below = parents[0] if parents and (len(parents) == 1 or names[-1].capitalize() in _REDUCING) else None
    return LossTerm(node, weight, " of ".join(names[:_WORDS_OF]), data=False)


def _apart(terms: list[LossTerm]) -> list[LossTerm]:
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


def weigh(loss: Tensor, terms: Sequence[LossTerm], parameters: Sequence[Tensor]) -> tuple[dict[str, LossTerm], int]:
    """The gradient norm of each term on the parameters that two or more reach, and how many those are.

    Costs one backward for each term down to the first of the parameters; the graph is kept, no `.grad` is touched.
    """
    chosen: list[Tensor] = []
    elements = 0
    for parameter in reversed(parameters):
        elements += parameter.numel()
        if elements > _MOST_ELEMENTS and chosen:
            break
        chosen.append(parameter)
    edges = [GradientEdge(term.node, 0) for term in terms]
    arriving = torch.autograd.grad(loss, edges, retain_graph=True)
    gradients = {
        term.name: torch.autograd.grad([edge], chosen, grad_outputs=[arrived], retain_graph=True, allow_unused=True)
        for term, edge, arrived in zip(terms, edges, arriving, strict=True)
    }
    found = balanced(gradients)
    weighed = [term._replace(node=None, norm=found.norms[term.name]) for term in terms]
    return {term.name: term for term in weighed if term.name not in found.unshared}, found.shared


def drowned(steps: Sequence[dict[str, LossTerm]], shared: int, above: float) -> Iterator[CallIssue]:
    """GG678 for each loss on data whose gradient is `above` times smaller than another's in most inspected steps.

    A term without any gradient is none that is drowned. What a constant weight of the user's makes small is meant.
    """
    if not steps:
        return
    names = [name for name in steps[0] if all(name in step for step in steps)]
    for name in names:
        small = [step[name] for step in steps]
        others = [other for other in names if other != name]
        if not small[0].data or not others or min(each.norm for each in small) == 0:
            continue
        largest = max(others, key=lambda other: steps[-1][other].norm)
        large = [step[largest] for step in steps]
        ratio = median(big.norm / little.norm for big, little in zip(large, small, strict=True))
        if not ratio >= above or ratio == float("inf"):
            continue
        bare = median(_bare(big) / _bare(little) for big, little in zip(large, small, strict=True))
        yield _drowned(small[0], large[0], ratio, shared, len(steps), meant=bare < above)


def _bare(term: LossTerm) -> float:
    return term.norm / abs(term.weight)


def _drowned(small: LossTerm, large: LossTerm, ratio: float, shared: int, steps: int, *, meant: bool) -> CallIssue:
    text = (
        f"Gradient norms on {shared} shared parameters: {number(large.norm)} of {large.name}{_weight(large)}, "
        f"{number(small.norm)} of {small.name}{_weight(small)}: {large.norm / small.norm:,.0f} times in the first "
        f"step, {ratio:,.0f} in the median of {steps}."
    )
    if meant:
        text += " Without the weights they would be closer: the weights seem to be meant."
    return CallIssue(
        "GG678",
        text,
        ("weight",) if meant else ("units",),
        Severity.INFO if meant else None,
        {
            "large": large.name,
            "large_norm": large.norm,
            "small": small.name,
            "small_norm": small.norm,
            "ratio": ratio,
        },
        made_at=CallPlace(small.line, None, None),
    )


def _weight(term: LossTerm) -> str:
    return "" if term.weight in (1.0, -1.0) else f" (weight {term.weight:.4g})"


Gradients = Sequence[Tensor | None]


@dataclass(frozen=True)
class LossBalance:
    """What each loss asks of the shared parameters: gradient norms by name, cosines by pair, how many are shared.

    All norms are L2 norms over the same parameters, of the losses as they were given, weights included. A cosine of -1
    means that two losses pull in opposite directions, 0 that they do not touch each other; NaN without a gradient.
    `unshared` are the names of losses that reach none of the shared parameters.
    """

    norms: dict[str, float]
    cosines: dict[tuple[str, str], float]
    shared: int
    unshared: tuple[str, ...] = ()

    @property
    def ratio(self) -> float:
        """The largest norm over the smallest that is not zero; 1 for a single one."""
        positive = [norm for norm in self.norms.values() if norm > 0]
        return max(positive) / min(positive) if positive else 1.0

    def __str__(self) -> str:
        width = max((len(name) for name in self.norms), default=0)
        lines = [f"gradient norms on {self.shared} shared parameters"]
        lines += [f"  {name:<{width}}  {number(norm)}" for name, norm in self.norms.items()]
        lines += [f"  cosine of {one} and {other}: {value:.3f}" for (one, other), value in self.cosines.items()]
        return "\n".join(lines)


def loss_balance(losses: Mapping[str, Tensor], parameters: nn.Module | Iterable[Tensor]) -> LossBalance:
    """Compare what several losses of one batch ask of the parameters that they share; for a notebook or a test.

    Each loss is a scalar with a graph, which is kept, so that `backward()` can follow; gradients in `.grad` are not
    touched, but hooks of your own in the graph run. Costs one backward for each loss, and reads the device. Equal
    norms are no goal in themselves (GradNorm, Chen et al. 2018, makes them one); factors of a thousand are a mistake.
    Raises GuardUsageError for a loss that is no scalar or has no graph, and where no parameter is shared.
    """
    wanted = _checked(losses, parameters)
    gradients = {
        name: torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True) for name, loss in losses.items()
    }
    balance = balanced(gradients)
    if not balance.shared:
        raise GuardUsageError(f"no parameter gets a gradient from two of these losses: {', '.join(losses)}")
    return balance


def _checked(losses: Mapping[str, Tensor], parameters: nn.Module | Iterable[Tensor]) -> list[Tensor]:
    if not isinstance(losses, Mapping) or len(losses) < 2:
        raise GuardUsageError('loss_balance takes two losses or more by name: loss_balance({"a": a, "b": b}, model)')
    for name, loss in losses.items():
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            kind = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise GuardUsageError(
                f"loss_balance: {name!r} is no scalar with a graph ({kind}); give it before backward()"
            )
    given: Any = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    wanted = [each for each in given if isinstance(each, Tensor) and each.requires_grad]
    if not wanted:
        raise GuardUsageError("loss_balance: none of these parameters requires a gradient")
    return wanted


def balanced(gradients: Mapping[str, Gradients]) -> LossBalance:
    """Norms and cosines over the parameters that at least two losses reach; reads the device."""
    count = len(next(iter(gradients.values()), ()))
    shared = [k for k in range(count) if sum(each[k] is not None for each in gradients.values()) > 1]
    # In float64, a square neither overflows nor vanishes.
    norms = {name: math.sqrt(_dot(each, each, shared)) for name, each in gradients.items()}
    cosines = {}
    for one, other in combinations(gradients, 2):
        product = norms[one] * norms[other]
        dot = _dot(gradients[one], gradients[other], shared)
        cosines[one, other] = max(-1.0, min(1.0, dot / product)) if product > 0 else math.nan
    unshared = tuple(name for name, each in gradients.items() if all(each[k] is None for k in shared))
    return LossBalance(norms, cosines, len(shared), unshared)


def _dot(one: Gradients, other: Gradients, shared: Iterable[int]) -> float:
    parts = []
    for k in shared:
        left, right = one[k], other[k]
        if left is not None and right is not None:
            dense = [each.to_dense() if each.layout is not torch.strided else each for each in (left, right)]
            parts.append((dense[0].detach().double() * dense[1].detach().double()).sum())
    return float(torch.stack([part.cpu() for part in parts]).sum()) if parts else 0.0
