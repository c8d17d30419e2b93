"""A few steps of an optimizer from a fresh state: what each of them changed, and what it should have changed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_guard.callbacks.gradients.missing import shown
from gpt_guard.callbacks.updates.findings import HALF_BYTES, WORTH_SAYING, half_spacing
from gpt_guard.catalogue import finding
from gpt_guard.checks.gradients.backward import Task, gradient_norms, trainable
from gpt_guard.checks.gradients.diagnosis import about, bad_parameter
from gpt_guard.checks.optimizer.coverage import as_rate, base_rate
from gpt_guard.records import Finding, Severity
from gpt_guard.records.render import learning_rate, number

STEPS = 6
"""As many as it takes to free a row of zero-initialised factors, one for each step."""
LR = 1e-3
"""What nearly every small GPT trains with; large ones take a third to a tenth of it."""
LOST_SHARE = 0.8
"""Share of a half-precision parameter's elements that rounding must swallow, as in the guard for parameter changes."""
LARGEST_RATIO = 0.5
"""Change of the matrices over their norm in one step: about 1e-3 is healthy (CS231n), 0.1 happens at the start."""
SMALLEST_RATIO = 1.2e-7
"""The spacing of float32 beside the weights: a run of steps this small gets nowhere."""


@dataclass
class Steps:
    """What the steps did. `ratio` and `largest` are of the first step: the change over the weights, and its maximum.

    `matrix_ratio` is the same ratio over the matrices alone. It is that of the second step for RMSprop, whose average
    starts at 0, so that its first step is ten times too long; and 0 for a step that searches along a line.
    `kept` is, for half-precision parameters, the smallest share of the elements with a gradient that kept their value.
    """

    ratio: float = 0.0
    matrix_ratio: float = 0.0
    largest: float = 0.0
    moved: set[str] = field(default_factory=set)
    with_gradient: set[str] = field(default_factory=set)
    kept: dict[str, float] = field(default_factory=dict)
    frozen_moved: list[str] = field(default_factory=list)
    bad_gradient: bool = False
    broken: str | None = None


def default_optimizer(model: nn.Module, lr: float = LR) -> Optimizer:
    """AdamW over what is trainable. Embeddings give dense gradients from now on, for AdamW takes no sparse ones.

    Changes the attribute `sparse` of modules that have it set: keep the model's state. Raises ValueError for a model
    without trainable parameters, as torch does.
    """
    for module in model.modules():
        if getattr(module, "sparse", False) is True:
            setattr(module, "sparse", False)  # noqa: B010 - the attribute is torch's, and typed as a tensor here
    return torch.optim.AdamW(trainable(model).values(), lr=lr)


def take_steps(model: nn.Module, optimizer: Optimizer, task: Task) -> Steps:
    """Step a few times, until everything with a gradient has moved. Changes the model: keep its state.

    The optimizer's state is emptied first, so that no old momentum moves what has no gradient; a learning rate that a
    scheduler holds down is put to its base. Stops at a gradient that is not finite.
    """
    _refresh(optimizer)
    if not model.training:
        model.train()
    steps = Steps()
    everything = trainable(model)
    long_start = type(optimizer).__name__ == "RMSprop"
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for index in range(STEPS):
        norms = _step(model, optimizer, task)
        if norms is None:
            steps.bad_gradient = True
            return steps
        _note_moves(model, before, norms, steps)
        if index == 0:
            steps.ratio, steps.matrix_ratio, steps.largest = _sizes(model, before)
        elif index == 1 and long_start:
            _, steps.matrix_ratio, _ = _sizes(model, before)
        if (bad := bad_parameter(model)) is not None:
            steps.broken = bad
            return steps
        if steps.moved >= everything.keys() and (index > 0 or not long_start):
            break
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                before[name].copy_(parameter)
    if _needs_closure(optimizer):
        steps.matrix_ratio = 0.0
    return steps


def _refresh(optimizer: Optimizer) -> None:
    """Empty the optimizer's state and put each group's lr to its base."""
    for group in optimizer.param_groups:
        rate = base_rate(group)
        if rate is not None and rate != group["lr"]:
            group["lr"] = torch.full_like(group["lr"], rate) if isinstance(group["lr"], Tensor) else rate
    optimizer.state.clear()


def _step(model: nn.Module, optimizer: Optimizer, task: Task) -> dict[str, float | None] | None:
    """One step, and the gradient norms it began with; None, and no step, where one of them is not finite."""
    parameters: dict[str, Tensor] = dict(trainable(model))

    def closure() -> Tensor:
        optimizer.zero_grad()
        for parameter in parameters.values():
            parameter.grad = None  # those that the optimizer does not hold
        with torch.enable_grad():
            loss = task.loss(model)
            if loss.requires_grad:
                loss.backward()
        return loss

    closure()
    norms = gradient_norms(parameters)
    if any(norm is not None and not norm < float("inf") for norm in norms.values()):
        return None
    args = (closure,) if _needs_closure(optimizer) else ()
    step: Callable[..., Any] = optimizer.step
    try:
        step(*args)
    except KeyError:
        if any(optimizer.state.values()):
            raise
        # Some (Adagrad, Rprop) make their state when they are built, and miss it now.
        _rebuild_state(optimizer)
        step(*args)
    return norms


def _needs_closure(optimizer: Optimizer) -> bool:
    needs = inspect.signature(optimizer.step).parameters.get("closure")
    return needs is not None and needs.default is inspect.Parameter.empty


def _rebuild_state(optimizer: Optimizer) -> None:
    """Give an optimizer the state that its class makes when it is built with these groups."""
    groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
    known = inspect.signature(type(optimizer).__init__).parameters
    defaults = {name: value for name, value in optimizer.defaults.items() if name in known}
    optimizer.state.update(type(optimizer)(groups, **defaults).state)


def _note_moves(model: nn.Module, before: dict[str, Tensor], norms: dict[str, float | None], steps: Steps) -> None:
    for name, parameter in model.named_parameters():
        changed = parameter.detach() != before[name]
        if bool(changed.any()):
            if parameter.requires_grad:
                steps.moved.add(name)
            elif name not in steps.frozen_moved:
                steps.frozen_moved.append(name)
        if norms.get(name):
            steps.with_gradient.add(name)
            if parameter.dtype.itemsize <= HALF_BYTES and parameter.grad is not None:
                wanted = parameter.grad.to_dense() != 0
                share = float((wanted & ~changed).sum() / wanted.sum()) if bool(wanted.any()) else 0.0
                steps.kept[name] = min(share, steps.kept.get(name, 1.0))


@torch.no_grad()
def _sizes(model: nn.Module, before: dict[str, Tensor]) -> tuple[float, float, float]:
    """The change over the weights, the same of the matrices alone, and the largest change of one element."""
    squares = {"all": [0.0, 0.0], "matrices": [0.0, 0.0]}
    largest = 0.0
    for name, parameter in trainable(model).items():
        if parameter.is_floating_point():
            weight = before[name].double()
            delta = parameter.double() - weight
            largest = max(largest, float(delta.abs().max()))
            for kind in ("all", "matrices") if parameter.dim() >= 2 else ("all",):
                squares[kind][0] += float(delta.square().sum())
                squares[kind][1] += float(weight.square().sum())
    every, matrices = ((change / weights) ** 0.5 if weights else 0.0 for change, weights in squares.values())
    return every, matrices, largest


class StepFindings:
    """Judges the steps of one optimizer on one model: what did not move, what moved by mistake, and by how much."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, steps: Steps) -> None:
        self._model = model
        self._optimizer = optimizer
        self._steps = steps
        self._kind = type(optimizer).__name__
        self._lr = {
            id(tensor): as_rate(group.get("lr")) for group in optimizer.param_groups for tensor in group["params"]
        }
        self.parameters: dict[str, Tensor] = {
            name: parameter for name, parameter in trainable(model).items() if id(parameter) in self._lr
        }
        graded, moved = steps.with_gradient, steps.moved
        # In the optimizer, and had no gradient other than zero to move by.
        self.idle = [name for name in self.parameters if name not in graded and name not in moved]
        # Had a gradient and an lr above 0, and never moved.
        still = [name for name in self.parameters if name in graded and name not in moved]
        self._still = [name for name in still if self._rate(name) != 0]
        # Rounding swallows their updates, nearly all or all of them.
        self.swallowed = [name for name in self.parameters if self._is_swallowed(name)]

    def judge(self) -> Iterator[Finding]:
        """All findings but that about the size."""
        if (broken := self._steps.broken) is not None:
            seen = f"After a step of {self._kind} from a fresh state `{broken}` holds NaN or infinity."
            yield self._about("GG106", seen, [broken], [])
            return
        working = [name for name in self.parameters if name in self._steps.with_gradient]
        still, swallowed = self._still, self.swallowed
        if still and set(still) >= set(working):
            yield self._nothing(still)
        elif self._share(half := self._half(swallowed)) >= WORTH_SAYING:
            yield self._rounded(half)
        rest = [name for name in still if name not in swallowed]
        if rest and len(still) < len(working):
            rate = learning_rate(self._rate(rest[0]))
            seen = f"{len(rest)} parameters with a gradient did not move while others did, at lr {rate}: {shown(rest)}."
            yield self._about("GG304", seen, rest, ["undone", "group_lr"])
        if names := self._steps.frozen_moved:
            seen = f"A step changed {len(names)} parameters with requires_grad=False: {shown(names)}."
            yield self._about("GG306", seen, names, ["own_update"])

    def size(self) -> Finding | None:
        """GG321 where a first step changes the matrices by too much, GG309 where they get lost in float32's noise.

        GG309 not for SGD, whose steps follow the gradient down to nothing on a batch that is known by heart.
        """
        steps = self._steps
        # A step of SGD is lr times the gradient; of nearly all others about lr for each element.
        plain = self._kind == "SGD"
        rate = max((each for each in self._lr.values() if each is not None), default=None)
        if not steps.matrix_ratio <= LARGEST_RATIO:
            decay = max((float(group.get("weight_decay") or 0) for group in self._optimizer.param_groups), default=0.0)
            decays = rate and rate * decay > LARGEST_RATIO
            likely = ["decay"] if decays else ["sgd_scale", "lr_too_high"] if plain else []
            seen = (
                f"A step of {self._kind} at lr {learning_rate(rate)} from a fresh state changes the weight matrices by "
                f"{number(steps.matrix_ratio)} of their norm, single elements by up to {number(steps.largest)}."
            )
            return finding("GG321", seen, likely=likely, evidence={"ratio": steps.matrix_ratio, "lr": rate})
        if plain or not 0.0 < steps.ratio <= SMALLEST_RATIO:
            return None
        seen = (
            f"The first step of {self._kind} at lr {learning_rate(rate)} changes the weights by "
            f"{number(steps.ratio)} of their norm."
        )
        return finding("GG309", seen, likely=["lr_too_small"], severity=Severity.ERROR, evidence={"lr": rate})

    def _nothing(self, names: list[str]) -> Finding:
        replaced = "step" in vars(self._optimizer) and not hasattr(self._optimizer.step, "_wrapped_by_lr_sched")
        likely = ["step_replaced", "restored"]
        if set(names) <= set(self.swallowed):
            likely = ["rounding_half" if self._half(names) else "lr_too_small"]
        seen = (
            f"step() of {self._kind}, from a fresh state, changed none of {len(names)} parameters that have a "
            f"gradient: {shown(names)}; lr {learning_rate(self._rate(names[0]))}."
        )
        return self._about("GG301", seen, names, ["step_replaced", *likely] if replaced else likely)

    def _rounded(self, names: list[str]) -> Finding:
        names = sorted(names, key=lambda name: -self.parameters[name].numel())
        first = self.parameters[names[0]]
        dtype = str(first.dtype).removeprefix("torch.")
        share = self._steps.kept.get(names[0], 1.0)
        size = _mean_size(first)
        seen = (
            f"Rounding swallows the update of {len(names)} parameters, {self._share(names):.0%} of what is "
            f"trainable: {shown(names)}. In `{names[0]}` ({dtype}) {share:.1%} of the elements with a gradient "
            f"keep their value: at a size of {number(size)} a change must exceed "
            f"{number(half_spacing(first.dtype, size))}, lr is {learning_rate(self._rate(names[0]))}."
        )
        return self._about("GG305", seen, names, ["lr_below_spacing"])

    def _rate(self, name: str) -> float | None:
        return self._lr[id(self.parameters[name])]

    def _half(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if self.parameters[name].dtype.itemsize <= HALF_BYTES]

    def _share(self, names: Sequence[str]) -> float:
        total = sum(parameter.numel() for parameter in trainable(self._model).values())
        return sum(self.parameters[name].numel() for name in names) / max(1, total)

    def _is_swallowed(self, name: str) -> bool:
        """Most elements of a half kept their value; or none moved, and an update is below what the dtype can hold."""
        if self._steps.kept.get(name, 0.0) >= LOST_SHARE:
            return True
        tensor, rate = self.parameters[name], self._rate(name)
        if name not in self._still or rate is None or not tensor.is_floating_point():
            return False
        # An element moves by about lr, for SGD by lr times its gradient.
        if not self._optimizer.state.get(tensor) or self._kind == "SGD":
            rate *= _mean_size(tensor.grad.to_dense()) if tensor.grad is not None else 0.0
        return rate < half_spacing(tensor.dtype, _mean_size(tensor))

    def _about(self, code: str, seen: str, names: Sequence[str], likely: Sequence[str]) -> Finding:
        return about(self._model, code, seen, names, likely)


def _mean_size(tensor: Tensor) -> float:
    return float(tensor.detach().float().abs().mean()) if tensor.numel() else 0.0
