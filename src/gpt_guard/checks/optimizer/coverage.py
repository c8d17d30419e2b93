"""What an optimizer holds against what a model has: names of both differences, duplicates, learning rates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_guard.catalogue import finding
from gpt_guard.checks.gradients.backward import trainable
from gpt_guard.checks.gradients.gradient_causes import common_path, listed
from gpt_guard.records import Finding, Severity
from gpt_guard.records.render import learning_rate

_LISTED = 50


@dataclass
class Coverage:
    """The trainable parameters by name, and what the optimizer makes of them.

    `strange` holds the places and tensors that are none of the model's parameters and that this loss does not reach.
    """

    names: dict[int, str]
    held: Counter[int]
    uncovered: list[str]
    strange: dict[str, Tensor]
    twice: list[str]
    ties: list[list[str]]
    trainable: set[int]

    @property
    def trained(self) -> bool:
        """Whether the optimizer holds anything of the model that is trainable."""
        return any(key in self.held for key in self.trainable)

    @property
    def shared(self) -> int:
        """How many of the model's parameters the optimizer holds."""
        return sum(key in self.names for key in self.held)


def cover(model: nn.Module, optimizer: Optimizer, reached: Iterable[Tensor] = ()) -> Coverage:
    """Compare the two by identity. `reached` are the leaves of the loss: a prompt trained beside the model is well."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    beside = {id(tensor) for tensor in reached}
    places = {
        f"param_groups[{index}][{place}]": tensor
        for index, group in enumerate(optimizer.param_groups)
        for place, tensor in enumerate(group["params"])
    }
    held = Counter(id(tensor) for tensor in places.values())
    strange = {place: t for place, t in places.items() if id(t) not in names and id(t) not in beside}
    return Coverage(
        names=names,
        held=held,
        uncovered=[name for name, parameter in trainable(model).items() if id(parameter) not in held],
        strange=strange,
        twice=[names[key] for key, count in held.items() if count > 1 and key in names],
        ties=_ties(model),
        trainable={id(parameter) for parameter in trainable(model).values()},
    )


def coverage_findings(model: nn.Module, optimizer: Optimizer, covered: Coverage) -> Iterator[Finding]:
    """GG310, GG307, GG302 and GG320, the one that explains the others first."""
    parameters = dict(model.named_parameters())
    held = {name: parameter for name, parameter in parameters.items() if id(parameter) in covered.held}
    if held and not covered.strange and not any(parameter.requires_grad for parameter in held.values()):
        likely = ["head_not_held"] if covered.uncovered else ["all_frozen"]
        seen = f"The optimizer holds {len(held)} parameters, every one of them with requires_grad=False."
        yield finding("GG310", seen, likely=likely)
    if covered.strange:
        yield _strange(model, covered)
    if covered.uncovered and covered.shared:
        yield _uncovered(model, covered)
    if covered.twice:
        tied = [name for names in covered.ties for name in names]
        likely = ["tied"] if any(name in tied for name in covered.twice) else ["groups_overlap"]
        seen = f"{len(covered.twice)} parameters stand more than once in the parameter groups: {listed(covered.twice)}."
        yield finding("GG320", seen, likely=likely, parameter=covered.twice[0], evidence={"parameters": covered.twice})


def rates(optimizer: Optimizer) -> list[float] | None:
    """The lr of each group that holds something trainable; None where the optimizer chooses its steps by itself."""
    groups = [group for group in optimizer.param_groups if any(p.requires_grad for p in group["params"])]
    found = [as_rate(group.get("lr")) for group in groups]
    return None if not found or any(rate is None for rate in found) else [rate for rate in found if rate is not None]


def as_rate(value: Any) -> float | None:
    """A learning rate as a float, also from a tensor; None for none."""
    return None if value is None or isinstance(value, str) else float(value)


def base_rate(group: dict[str, Any]) -> float | None:
    """The lr that a scheduler works with (`initial_lr`), else the current one: a warm-up starts at or near 0."""
    current, base = as_rate(group.get("lr")), as_rate(group.get("initial_lr"))
    return base if current is not None and base and 0 <= current < base else current


def rate_findings(optimizer: Optimizer) -> Iterator[Finding]:
    """GG402 for a negative or non-finite lr, GG401 for one of 0 that no schedule explains."""
    for index, group in enumerate(optimizer.param_groups):
        rate = as_rate(group.get("lr"))
        if rate is None or not any(parameter.requires_grad for parameter in group["params"]):
            continue
        evidence = {"group": index, "lr": rate}
        if rate < 0 or not math.isfinite(rate):
            seen = f"lr of parameter group {index} is {learning_rate(rate)}."
            yield finding("GG402", seen, likely=["written_by_hand"], evidence=evidence, cause_id=f"group {index}")
        elif not base_rate(group):
            count = len(group["params"])
            seen = f"lr of parameter group {index} ({count} parameters) is 0, and no scheduler would raise it."
            words = {"evidence": evidence, "cause_id": f"group {index}", "severity": Severity.ERROR}
            yield finding("GG401", seen, likely=["factor_zero", "schedule_ended"], **words)


def _strange(model: nn.Module, covered: Coverage) -> Finding:
    shapes = {parameter.shape for parameter in model.parameters()}
    alike = sum(tensor.shape in shapes for tensor in covered.strange.values())
    likely = ["rebuilt", "wrapped"] if alike == len(covered.strange) else ["own_parameters", "rebuilt"]
    total, shared = sum(covered.held.values()), covered.shared
    seen = (
        f"{len(covered.strange)} of {total} tensors in the optimizer are no parameters of this model, and its loss "
        f"does not reach them: {listed(list(covered.strange))}. {alike} of them have the shape of one of its "
        f"parameters; {shared} parameters are held."
    )
    return finding(
        "GG307", seen, likely=likely, severity=Severity.ERROR, evidence={"tensors": list(covered.strange)[:_LISTED]}
    )


def _uncovered(model: nn.Module, covered: Coverage) -> Finding:
    names = covered.uncovered
    path = common_path(names)
    kept = [name for key, name in covered.names.items() if key in covered.held]
    likely = ["part_only", "replaced"] if common_path(kept) else ["replaced"] if path else ["filtered", "replaced"]
    seen = (
        f"{len(names)} trainable parameters are not in the optimizer: {listed(names)}. It holds {len(kept)} parameters "
        f"of this model."
    )
    return finding(
        "GG302",
        seen,
        likely=likely,
        severity=Severity.ERROR,
        module=path,
        module_class=type(model.get_submodule(path)).__name__,
        parameter=names[0] if len(names) == 1 else None,
        evidence={"parameters": names[:_LISTED], "count": len(names)},
    )


def _ties(model: nn.Module) -> list[list[str]]:
    """Names of the same tensor, in groups of two or more."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(name)
    return [names for names in by_id.values() if len(names) > 1]


def tie_text(ties: Sequence[Sequence[str]]) -> str:
    """The tied names, such as `head.weight = token_embedding.weight`."""
    return "; ".join(" = ".join(names) for names in ties[:3]) + ("; ..." if len(ties) > 3 else "")
