"""What a step did not change although it should have, or changed although it should not, with the likely cause."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_guard.catalogue import finding
from gpt_guard.checks.gradients.backward import trainable
from gpt_guard.checks.gradients.gradient_causes import common_path, listed
from gpt_guard.checks.optimizer.coverage import as_rate
from gpt_guard.checks.optimizer.stepping_probe import HALF_BYTES, Steps
from gpt_guard.records import Finding, Severity
from gpt_guard.records.render import learning_rate, number

LOST_SHARE = 0.8
"""Share of a half-precision parameter's elements that rounding must swallow, as in the guard for parameter changes."""
WORTH_SAYING = 0.05
"""Share of all trainable elements; the gains of normalisation layers, which start at 1, are well below it."""
LARGEST_RATIO = 0.5
"""Change of the matrices over their norm in one step: about 1e-3 is healthy (CS231n), 0.1 happens at the start."""
SMALLEST_RATIO = 1.2e-7
"""The spacing of float32 beside the weights: a run of steps this small gets nowhere."""
_LISTED = 50


@dataclass
class StepFindings:
    """Judges the steps of one optimizer on one model; `held` are the ids of the tensors in it."""

    model: nn.Module
    optimizer: Optimizer
    steps: Steps
    held: set[int]

    def __post_init__(self) -> None:
        self.parameters: dict[str, Tensor] = {
            name: parameter for name, parameter in trainable(self.model).items() if id(parameter) in self.held
        }
        self.lr = {
            id(parameter): as_rate(group.get("lr"))
            for group in self.optimizer.param_groups
            for parameter in group["params"]
        }

    @property
    def still(self) -> list[str]:
        """Parameters in the optimizer with lr above 0 that had a gradient and never moved."""
        names = (name for name in self.parameters if name in self.steps.with_gradient and name not in self.steps.moved)
        return [name for name in names if self.lr[id(self.parameters[name])] != 0]

    @property
    def idle(self) -> list[str]:
        """Parameters in the optimizer that did not move and never had a gradient other than zero."""
        return [n for n in self.parameters if n not in self.steps.with_gradient and n not in self.steps.moved]

    @property
    def swallowed(self) -> list[str]:
        """Parameters whose updates rounding swallows, nearly all or all of them."""
        half = {name for name, share in self.steps.kept.items() if share >= LOST_SHARE and name in self.parameters}
        return [name for name in self.parameters if name in half or (name in self.still and self._rounds_away(name))]

    def judge(self) -> Iterator[Finding]:
        """All findings about what did not move, what moved by mistake, and by how much."""
        if self.steps.broken is not None:
            yield self._broken(self.steps.broken)
            return
        working = [name for name in self.parameters if name in self.steps.with_gradient]
        still, swallowed = self.still, self.swallowed
        if still and set(still) >= set(working):
            yield self._nothing(still, swallowed)
        elif self._share(half := self._half(swallowed)) >= WORTH_SAYING:
            yield self._swallowed(half)
        rest = [name for name in still if name not in swallowed]
        if rest and len(still) < len(working):
            yield self._build("GG304", self._never(rest), rest, ["undone", "group_lr"])
        if self.steps.frozen_moved:
            names = self.steps.frozen_moved
            seen = f"A step changed {len(names)} parameters with requires_grad=False: {listed(names)}."
            yield self._build("GG306", seen, names, ["own_update"])

    def size(self) -> Finding | None:
        """GG321 where a first step changes the matrices by too much, GG309 where they get lost in float32's noise."""
        ratio = self.steps.matrix_ratio
        if ratio <= LARGEST_RATIO:
            return self._undersized()
        rate = max((each for each in self.lr.values() if each is not None), default=None)
        decay = max((float(group.get("weight_decay") or 0) for group in self.optimizer.param_groups), default=0.0)
        name = type(self.optimizer).__name__
        # A step of SGD is lr times the gradient; of nearly all others about lr for each element.
        plain = name == "SGD"
        likely = ["decay"] if rate and rate * decay > LARGEST_RATIO else ["sgd_scale", "lr_too_high"] if plain else []
        seen = (
            f"A step of {name} at lr {learning_rate(rate)} from a fresh state changes the weight matrices by "
            f"{number(ratio)} of their norm, single elements by up to {number(self.steps.largest)}."
        )
        return finding("GG321", seen, likely=likely, evidence={"ratio": ratio, "lr": rate})

    def _undersized(self) -> Finding | None:
        """Not for SGD, whose steps follow the gradient down to nothing on a batch that is known by heart."""
        small = 0.0 < self.steps.ratio <= SMALLEST_RATIO
        if not small or type(self.optimizer).__name__ == "SGD":
            return None
        rate = max((each for each in self.lr.values() if each is not None), default=None)
        seen = (
            f"The first step of {type(self.optimizer).__name__} at lr {learning_rate(rate)} changes the weights by "
            f"{number(self.steps.ratio)} of their norm."
        )
        return finding("GG309", seen, likely=["lr_too_small"], severity=Severity.ERROR, evidence={"lr": rate})

    def _nothing(self, names: list[str], swallowed: list[str]) -> Finding:
        replaced = "step" in vars(self.optimizer) and not hasattr(self.optimizer.step, "_wrapped_by_lr_sched")
        rounds = set(names) <= set(swallowed)
        half = bool(self._half(names))
        likely = ["rounding_half" if half else "lr_too_small"] if rounds else ["step_replaced", "restored"]
        likely = ["step_replaced", *likely] if replaced else likely
        seen = (
            f"step() of {type(self.optimizer).__name__}, from a fresh state, changed none of {len(names)} parameters "
            f"that have a gradient: {listed(names)}; lr {learning_rate(self.lr[id(self.parameters[names[0]])])}."
        )
        return self._build("GG301", seen, names, likely)

    def _never(self, names: list[str]) -> str:
        rate = learning_rate(self.lr[id(self.parameters[names[0]])])
        return f"{len(names)} parameters with a gradient did not move while others did, at lr {rate}: {listed(names)}."

    def _swallowed(self, names: list[str]) -> Finding:
        names = sorted(names, key=lambda name: -self.parameters[name].numel())
        first = self.parameters[names[0]]
        dtype = str(first.dtype).removeprefix("torch.")
        share = self.steps.kept.get(names[0], 1.0)
        rate = self.lr[id(first)]
        seen = (
            f"Rounding swallows the update of {len(names)} parameters, {self._share(names):.0%} of what is "
            f"trainable: {listed(names)}. In `{names[0]}` ({dtype}) {share:.1%} of the elements with a gradient "
            f"keep their value: at a size of {number(_size(first))} a change must exceed {number(_spacing(first))}, "
            f"lr is {learning_rate(rate)}."
        )
        return self._build("GG305", seen, names, ["lr_below_spacing"])

    def _broken(self, name: str) -> Finding:
        seen = f"After a step of {type(self.optimizer).__name__} from a fresh state `{name}` holds NaN or infinity."
        return self._build("GG106", seen, [name], [])

    def _half(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if self.parameters[name].dtype.itemsize <= HALF_BYTES]

    def _share(self, names: Sequence[str]) -> float:
        total = sum(parameter.numel() for parameter in trainable(self.model).values())
        return sum(self.parameters[name].numel() for name in names) / max(1, total)

    def _rounds_away(self, name: str) -> bool:
        """Whether an update is below what the dtype can hold at this size: about lr, for SGD lr times the gradient."""
        tensor = self.parameters[name]
        rate = self.lr[id(tensor)]
        if rate is None or not tensor.is_floating_point():
            return False
        if not self.optimizer.state.get(tensor) or type(self.optimizer).__name__ == "SGD":
            rate *= _size(tensor.grad.to_dense()) if tensor.grad is not None else 0.0
        return rate < _spacing(tensor)

    def _build(self, code: str, seen: str, names: Sequence[str], likely: Iterable[str]) -> Finding:
        path = common_path(names)
        return finding(
            code,
            seen,
            likely=likely,
            severity=Severity.ERROR,
            module=path,
            module_class=type(self.model.get_submodule(path)).__name__,
            parameter=names[0] if len(names) == 1 else None,
            evidence={"parameters": list(names[:_LISTED]), "count": len(names)},
        )


def _size(tensor: Tensor) -> float:
    return float(tensor.detach().float().abs().mean()) if tensor.numel() else 0.0


def _spacing(tensor: Tensor) -> float:
    """Half the distance to the next value at the tensor's mean size: |w| * eps / 2."""
    return _size(tensor) * torch.finfo(tensor.dtype).eps / 2
