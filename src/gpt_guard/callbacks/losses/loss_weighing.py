"""Whether one of the added losses decides alone, over the inspected steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gpt_guard.callbacks.losses.loss_balance import balanced
from gpt_guard.callbacks.losses.loss_calls import Told
from gpt_guard.callbacks.losses.loss_terms import Term
from gpt_guard.records import Severity, SourceLine
from gpt_guard.records.render import number

_MOST_ELEMENTS = 2**24
"""Parameters that are looked at, the last ones first, as GradNorm looks at the last shared layer (Chen et al. 2018)."""


class Weighed(NamedTuple):
    """One term in one step: its gradient norm on the shared parameters, as applied, and its constant weight."""

    norm: float
    weight: float
    data: bool
    line: SourceLine | None = None


def weigh(loss: Tensor, terms: Sequence[Term], parameters: Sequence[Tensor]) -> tuple[dict[str, Weighed], int]:
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
    weighed = {term.name: Weighed(found.norms[term.name], term.weight, term.data, term.line) for term in terms}
    return {name: each for name, each in weighed.items() if name not in found.unshared}, found.shared


def drowned(steps: Sequence[dict[str, Weighed]], shared: int, above: float) -> Iterator[Told]:
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
        yield _told(name, largest, small[0], large[0], ratio, shared, len(steps), meant=bare < above)


def _bare(each: Weighed) -> float:
    return each.norm / abs(each.weight)


def _told(
    name: str, largest: str, small: Weighed, large: Weighed, ratio: float, shared: int, steps: int, *, meant: bool
) -> Told:
    seen = (
        f"Gradient norms on {shared} shared parameters: {number(large.norm)} of {largest}{_weight(large)}, "
        f"{number(small.norm)} of {name}{_weight(small)}: {large.norm / small.norm:,.0f} times in the first step, "
        f"{ratio:,.0f} in the median of {steps}."
    )
    if meant:
        seen += " Without the weights they would be closer: the weights seem to be meant."
    evidence = {"large": largest, "large_norm": large.norm, "small": name, "small_norm": small.norm, "ratio": ratio}
    return Told(
        "GG678", seen, ("weight",) if meant else ("units",), Severity.INFO if meant else None, evidence, small.line
    )


def _weight(each: Weighed) -> str:
    return "" if each.weight in (1.0, -1.0) else f" (weight {each.weight:.4g})"
