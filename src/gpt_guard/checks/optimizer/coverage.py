"""What an optimizer holds against what a model has: names of both differences, duplicates, learning rates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_guard.callbacks.gradients.missing import shown
from gpt_guard.callbacks.updates.findings import unheld_causes
from gpt_guard.callbacks.updates.ownership import held_twice, tied_names, twice_cause
from gpt_guard.catalogue import finding
from gpt_guard.checks.gradients.backward import trainable
from gpt_guard.checks.gradients.diagnosis import about
from gpt_guard.records import Finding, Severity
from gpt_guard.records.render import learning_rate

_LISTED = 50


@dataclass
class Coverage:
    """The model's parameters that an optimizer holds, the trainable ones that it does not, and what else is in it.

    `strange` are the places and tensors that are none of the model's parameters and that this loss does not reach,
    `tensors` counts all places in the groups, `ties` has the names of what the model holds under several.
    """

    held: dict[str, nn.Parameter]
    uncovered: list[str]
    strange: dict[str, Tensor]
    tensors: int
    twice: list[str]
    ties: dict[int, list[str]]

    @property
    def trains(self) -> bool:
        """Whether the optimizer holds anything of the model that is trainable."""
        return any(parameter.requires_grad and parameter.numel() for parameter in self.held.values())


def cover(model: nn.Module, optimizer: Optimizer, reached: Iterable[Tensor] = ()) -> Coverage:
    """Compare the two by identity. `reached` are the leaves of the loss: a prompt trained beside the model is well."""
    places = {
        f"param_groups[{index}][{place}]": tensor
        for index, group in enumerate(optimizer.param_groups)
        for place, tensor in enumerate(group["params"])
    }
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    stepped = {id(tensor) for tensor in places.values()}
    beside = {id(tensor) for tensor in reached}
    return Coverage(
        held={name: parameter for name, parameter in model.named_parameters() if id(parameter) in stepped},
        uncovered=[name for name, parameter in trainable(model).items() if id(parameter) not in stepped],
        strange={place: t for place, t in places.items() if id(t) not in names and id(t) not in beside},
        tensors=len(places),
        twice=[names[id(tensor)] for tensor in held_twice(optimizer) if id(tensor) in names],
        ties=tied_names(model),
    )


def coverage_findings(model: nn.Module, covered: Coverage) -> Iterator[Finding]:
    """GG310, GG307, GG302 and GG320, the one that explains the others first."""
    held = covered.held
    if held and not covered.strange and not any(parameter.requires_grad for parameter in held.values()):
        likely = ["head_not_held"] if covered.uncovered else ["all_frozen"]
        seen = f"The optimizer holds {len(held)} parameters, every one of them with requires_grad=False."
        yield finding("GG310", seen, likely=likely)
    if covered.strange:
        yield _strange(model, covered)
    if covered.uncovered and held:
        names, likely = covered.uncovered, unheld_causes(held, covered.uncovered)
        seen = (
            f"{len(names)} trainable parameters are not in the optimizer: {shown(names)}. It holds {len(held)} "
            f"parameters of this model."
        )
        yield about(model, "GG302", seen, names, likely)
    if twice := covered.twice:
        likely = [twice_cause([held[name] for name in twice], covered.ties)]
        seen = f"{len(twice)} parameters stand more than once in the parameter groups: {shown(twice)}."
        yield finding("GG320", seen, likely=likely, parameter=twice[0], evidence={"parameters": twice})


def _strange(model: nn.Module, covered: Coverage) -> Finding:
    shapes = {parameter.shape for parameter in model.parameters()}
    alike = sum(tensor.shape in shapes for tensor in covered.strange.values())
    likely = ["rebuilt", "wrapped"] if alike == len(covered.strange) else ["own_parameters", "rebuilt"]
    places = list(covered.strange)
    seen = (
        f"{len(places)} of {covered.tensors} tensors in the optimizer are no parameters of this model, and its loss "
        f"does not reach them: {shown(places)}. {alike} of them have the shape of one of its parameters; "
        f"{len(covered.held)} parameters are held."
    )
    return finding("GG307", seen, likely=likely, severity=Severity.ERROR, evidence={"tensors": places[:_LISTED]})


def rates(optimizer: Optimizer) -> list[float] | None:
    """The lr of each group that holds something trainable; None where the optimizer chooses its steps by itself."""
    found = [as_rate(group.get("lr")) for _, group in _training_groups(optimizer)]
    known = [rate for rate in found if rate is not None]
    return known if known and len(known) == len(found) else None


def as_rate(value: Any) -> float | None:
    """A learning rate as a float, also from a tensor; None for none."""
    return None if value is None or isinstance(value, str) else float(value)


def base_rate(group: dict[str, Any]) -> float | None:
    """The lr that a scheduler works with (`initial_lr`), else the current one: a warm-up starts at or near 0."""
    current, base = as_rate(group.get("lr")), as_rate(group.get("initial_lr"))
    return base if current is not None and base and 0 <= current < base else current


def rate_findings(optimizer: Optimizer) -> Iterator[Finding]:
    """GG402 for a negative or non-finite lr, GG401 for one of 0 that no schedule explains."""
    for index, group in _training_groups(optimizer):
        rate = as_rate(group.get("lr"))
        if rate is None:
            continue
        words: dict[str, Any] = {"evidence": {"group": index, "lr": rate}, "cause_id": f"group {index}"}
        if rate < 0 or not math.isfinite(rate):
            seen = f"lr of parameter group {index} is {learning_rate(rate)}."
            yield finding("GG402", seen, likely=["written_by_hand"], **words)
        elif not base_rate(group):
            count = len(group["params"])
            seen = f"lr of parameter group {index} ({count} parameters) is 0, and no scheduler would raise it."
            yield finding("GG401", seen, likely=["factor_zero", "schedule_ended"], severity=Severity.ERROR, **words)


def _training_groups(optimizer: Optimizer) -> Iterator[tuple[int, dict[str, Any]]]:
    """The groups that hold something trainable, each with its index."""
    for index, group in enumerate(optimizer.param_groups):
        if any(parameter.requires_grad for parameter in group["params"]):
            yield index, group
