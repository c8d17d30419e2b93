"""Findings about parameters that do not move as they should, put into words with the figures of this run."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from gpt_guard.callbacks.gradients.missing import common_path
from gpt_guard.callbacks.updates.measured_step import ExactComparison
from gpt_guard.catalogue import finding
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Observation, Severity
from gpt_guard.records.render import learning_rate, learning_rates, number

# State that Adam-like optimizers keep: with it, an element moves by about lr whatever the size of its gradient.
_ADAPTIVE = frozenset({"exp_avg", "exp_avg_sq", "exp_inf", "square_avg", "sum"})
HALF_BYTES = 2
# Share of the trainable elements; in a GPT the gains of all normalisation layers are well below it.
WORTH_SAYING = 0.05
_NAMED = 5


def listed(names: Iterable[str], most: int = _NAMED) -> str:
    """Names in backquotes, the first few of them and how many more there are."""
    known = list(names)
    shown = ", ".join(f"`{name}`" for name in known[:most])
    return shown if len(known) <= most else f"{shown} and {len(known) - most} more"


def unheld_causes(held: Iterable[str], missing: Iterable[str]) -> list[str]:
    """GG302's causes by where the parameters lie that an optimizer holds, and those that none does.

    Where a module has both, something chose among them; a module of which all is missing was added later.
    """
    held, missing = list(held), list(missing)
    if common_path(held):
        return ["part_only", "replaced"]
    around = common_path(missing)
    chosen = not around or any(name.startswith(f"{around}.") for name in held if name not in missing)
    return ["filtered", "replaced"] if chosen else ["replaced"]


def half_spacing(dtype: torch.dtype, magnitude: float) -> float:
    """The largest change of a value of this size that rounding to the nearest undoes: |w| * eps / 2."""
    return magnitude * torch.finfo(dtype).eps / 2


@dataclass(frozen=True)
class Facts:
    """What is known about one step when a finding is written.

    `lr` is that of each parameter, `ratio_low` the update-to-weight ratio below which a whole model stands still.
    """

    watch: Watch
    optimizer: Optimizer
    seen: Observation
    lr: Mapping[str, float]
    tensors: Mapping[str, Tensor]
    ratio_low: float

    def update_size(self, name: str) -> float:
        """About how far the optimizer wants to move one element of a parameter."""
        tensor = self.tensors[name]
        if _ADAPTIVE & set(self.optimizer.state.get(tensor, ())):
            return self.lr[name]
        norm = self.seen.grad_norms.get(name) or 0.0
        return self.lr[name] * norm / math.sqrt(tensor.numel())

    def half_spacing(self, name: str, magnitude: float) -> float:
        """`half_spacing` in the dtype of this parameter."""
        return half_spacing(self.tensors[name].dtype, magnitude)

    def rounds_away(self, name: str, each: ExactComparison) -> bool:
        """Whether the wanted update is smaller than what rounding undoes."""
        return self.update_size(name) < self.half_spacing(name, each.magnitude)

    def only_gains(self, names: Sequence[str], exact: Mapping[str, ExactComparison]) -> bool:
        """Whether rounding undoes the updates of a few elements only: so it does with the gains of most norms."""
        few = self.elements(names) < WORTH_SAYING * self.elements(self.tensors)
        return few and all(self.rounds_away(name, exact[name]) for name in names)

    def elements(self, names: Iterable[str]) -> int:
        """How many trainable elements these parameters have."""
        return sum(self.tensors[name].numel() for name in names if self.tensors[name].requires_grad)

    def is_half(self, name: str) -> bool:
        """Whether the parameter has 16 bits or fewer."""
        return self.tensors[name].dtype.itemsize <= HALF_BYTES

    def lone_biases(self, names: Iterable[str]) -> bool:
        """Whether these are all biases whose weight is not among them: usually the loss does not depend on them.

        So it is before a normalisation, for keys before softmax, and at the end of a critic that sees differences only.
        """
        known = set(names)
        return all(
            name.rpartition(".")[2].startswith(("bias", "in_proj_bias"))
            and self.tensors[name].dim() == 1
            and name.replace("bias", "weight") not in known
            for name in known
        )

    def build(self, code: str, seen: str, names: Sequence[str], likely: Sequence[str], **fields: Severity) -> Finding:
        """A finding about these parameters in this step."""
        path, kind = self.watch.owner_of(names[0])
        return finding(
            code,
            seen,
            likely=likely,
            step=self.seen.step,
            moment=self.seen.moment,
            module=path,
            module_class=kind,
            parameter=names[0],
            evidence={
                "parameters": list(names[:50]),
                "count": len(names),
                "lr": list(self.seen.lr),
                "grad_norm": self.seen.grad_norm,
            },
            **fields,
        )


def judge_exact(
    facts: Facts, exact: Mapping[str, ExactComparison], moved: Container[str], *, idle: bool, lost: float, scaling: bool
) -> Iterator[tuple[Finding, list[str]]]:
    """What an exact comparison of the suspects proves, each with the parameters it is about.

    What has `moved` in earlier steps and now wants to move by less than rounding undoes has converged.
    """
    converged = {name for name, each in exact.items() if name in moved and facts.rounds_away(name, each)}
    if idle and not any(each.changed for each in exact.values()):
        # Without a gradient at the step there is nothing to move by: GradNormMonitor's GG208 says so.
        applied = any(each.with_grad for each in exact.values())
        if applied and len(converged) < len(exact):
            yield _nothing_moved(facts, exact, scaling=scaling), list(exact)
        return
    moving = {name: v for name, v in exact.items() if v.with_grad and name not in converged}
    rounded = [
        name
        for name, each in moving.items()
        if facts.is_half(name) and each.kept >= lost and facts.rounds_away(name, each)
    ]
    if rounded and facts.only_gains(rounded, moving):
        # The gains of norms are few elements near 1, where bfloat16 is coarse: told are those that never move.
        rounded = [name for name in rounded if not moving[name].changed]
    if rounded:
        yield _lost_to_rounding(facts, rounded, moving), rounded
    still = [name for name, each in moving.items() if not each.changed and name not in rounded]
    if still and not facts.only_gains(still, moving):
        yield _never_moves(facts, still, moving), still


def _nothing_moved(facts: Facts, exact: Mapping[str, ExactComparison], *, scaling: bool) -> Finding:
    names, seen = list(exact), facts.seen
    compared = sum(each.compared for each in exact.values())
    rounded = all(facts.rounds_away(name, each) for name, each in exact.items())
    half = rounded and any(facts.is_half(name) for name in names)
    # Adam divides by the root of an average of squares, which is inf above this norm.
    overflow = not (seen.grad_norm or 0.0) < math.sqrt(torch.finfo(torch.float32).max)
    likely = [
        key
        for key, holds in (
            ("overflow", overflow),
            ("rounding_half", half),
            ("lr_too_small", rounded and not half),
            ("found_inf", scaling),
            ("step_replaced", not rounded and not overflow),
        )
        if holds
    ]
    return facts.build(
        "GG301",
        f"step() of {type(facts.optimizer).__name__} changed none of {compared:,} compared elements in "
        f"{len(names)} parameters ({listed(names, 3)}), nor did the steps before it, at lr {learning_rates(seen.lr)} "
        f"and a grad norm of {number(seen.grad_norm)} after backward().",
        names,
        likely,
    )


def _lost_to_rounding(facts: Facts, names: list[str], exact: Mapping[str, ExactComparison]) -> Finding:
    names = sorted(names, key=lambda name: -facts.tensors[name].numel())
    first = names[0]
    each = exact[first]
    kept = sum(exact[name].with_grad - exact[name].moved_with_grad for name in names)
    total = sum(exact[name].with_grad for name in names)
    dtype = str(facts.tensors[first].dtype).removeprefix("torch.")
    return facts.build(
        "GG305",
        f"{kept / total:.1%} of the {total:,} elements with a non-zero gradient kept their value in {len(names)} "
        f"{dtype} parameters: {listed(names)}. In `{first}` a value of {each.magnitude:.2g} needs an update above "
        f"{facts.half_spacing(first, each.magnitude):.2g} to change; the optimizer's is about "
        f"{facts.update_size(first):.2g} (lr {learning_rate(facts.lr[first])}).",
        names,
        ["lr_below_spacing"],
    )


def _never_moves(facts: Facts, names: list[str], exact: Mapping[str, ExactComparison]) -> Finding:
    first = names[0]
    rounded = [name for name in names if facts.rounds_away(name, exact[name])]
    ratio = facts.seen.update_ratio
    if rounded and (ratio is None or not ratio >= facts.ratio_low):
        return _too_small(facts, rounded, exact)
    lone = facts.lone_biases(names)
    return facts.build(
        "GG304",
        f"{len(names)} parameter{'s' if len(names) > 1 else ''} with a non-zero gradient never moved in the last steps "
        f"although other parameters did: {listed(names)}. Grad norm of `{first}` "
        f"{number(facts.seen.grad_norms.get(first))}, lr {learning_rate(facts.lr[first])}.",
        names,
        ["cancelled" if lone else "rounding" if first in rounded else "undone"],
        severity=Severity.INFO if lone else Severity.WARNING,
    )


def _too_small(facts: Facts, names: list[str], exact: Mapping[str, ExactComparison]) -> Finding:
    first = max(names, key=lambda name: facts.tensors[name].numel())
    return facts.build(
        "GG309",
        f"Hardly anything moves: {len(names)} parameters ({listed(names)}) never moved in the last steps "
        f"although they have a gradient. In `{first}` a value of {exact[first].magnitude:.2g} needs an update above "
        f"{facts.half_spacing(first, exact[first].magnitude):.2g} to change; the optimizer's is about "
        f"{facts.update_size(first):.2g} (lr {learning_rate(facts.lr[first])}).",
        names,
        ["lr_too_small"],
    )


def zero_gradient(facts: Facts, names: list[str], patience: int) -> Finding:
    """Parameters whose gradient was exactly zero in every step."""
    many, lone = len(names) > 1, facts.lone_biases(names)
    return facts.build(
        "GG304",
        f"The gradient of {len(names)} trainable parameter{'s' if many else ''} has been exactly zero in every step so "
        f"far, at least {patience} in a row, while others have one: {listed(names)}.",
        names,
        ["underflow" if facts.watch.underflow else "cancelled" if lone else "multiplied_by_zero"],
        severity=Severity.INFO if lone else Severity.WARNING,
    )


def frozen_moved(facts: Facts, names: list[str]) -> Finding:
    """Frozen parameters that a step changed."""
    many = len(names) > 1
    stale = [name for name in names if facts.tensors[name].grad is not None]
    decays = any(group.get("weight_decay") for group in facts.optimizer.param_groups)
    return facts.build(
        "GG306",
        f"step() changed {len(names)} parameter{'s' if many else ''} with requires_grad=False: {listed(names)}. "
        f"{len(stale)} of them still {'have' if len(stale) != 1 else 'has'} an old gradient in .grad"
        + (", and the optimizer applies weight decay." if decays else "."),
        names,
        ["stale_grad"] if stale else [],
    )
