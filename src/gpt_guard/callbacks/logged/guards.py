"""What the loop logs against what has happened: a loss that hides NaN, and an update that is lr times gradient.

Only numbers that are given to `guardian.log()` are seen; what is printed or sent elsewhere is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.settings import check_types
from gpt_guard.catalogue import finding
from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.tensors import is_sharded
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Observation
from gpt_guard.records.render import number

# Two formulas for the same figure differ in float32 by rounding; two different figures agree so far by rare chance.
_CLOSE = 1e-4
# Beyond this many bytes of parameters, no copy is made to show the real update beside the logged one.
_MOST_BYTES = 256 * 2**20
_STATISTICS: dict[str, Any] = {
    "norm": lambda values: torch.linalg.vector_norm(values),
    "standard deviation": lambda values: values.std() if values.numel() > 1 else None,
    "mean size": lambda values: values.abs().mean(),
    "largest": lambda values: values.abs().max(),
}
_ALL = "all parameters"


class LoggedLoss(Guard):
    """Compares the losses given to `guardian.log()` after a step with the loss that backward() saw in it.

    Speaks where that one was NaN or infinite, and each number logged under a name with "loss" in it is finite: a filter
    or an average hides the step. What is printed or sent elsewhere is not seen. A validation loss that is logged beside
    the training loss is one of these numbers; where either is not finite, nothing is hidden.

    Judges the loss that was read for the step anyway, also of a step that a GradScaler leaves out; reads nothing.
    """

    def __init__(self) -> None:
        self._bad: tuple[int, float] | None = None
        self._known: dict[str, int] = {}

    def attach(self, watch: Watch) -> None:
        super().attach(watch)
        self._bad = None

    def judge(self, seen: Observation) -> Iterator[Finding]:
        yield from self._compare()
        if seen.loss is not None and not math.isfinite(seen.loss):
            self._bad = (seen.step, seen.loss)
            self._known = dict(self.watch.times_logged)

    def finish(self) -> Iterator[Finding]:
        yield from self._compare()

    def _compare(self) -> Iterator[Finding]:
        if self._bad is None:
            return
        (step, loss), self._bad = self._bad, None
        # What stands there from before was logged for another step.
        times, known = self.watch.times_logged, self._known
        losses = {name: value for name, value in self.watch.logged.items() if "loss" in name.lower()}
        new = {name: value for name, value in losses.items() if times.get(name) != known.get(name)}
        if not new or not all(math.isfinite(value) for value in new.values()):
            return
        logged = ", ".join(f"{name}={number(value)}" for name, value in new.items())
        evidence: dict[str, Any] = {"logged": dict(new), "loss": loss}
        yield finding(
            "GG111",
            f"After step {step}, {logged} was given to guardian.log(), which is finite; the loss that backward() saw "
            f"in it was {number(loss)}.",
            likely=["filtered"],
            step=step,
            moment=Moment.BEFORE_STEP,
            evidence=evidence,
        )


class Formula(NamedTuple):
    """How a number may have been computed: over what, by which statistic, relative to the weights or not."""

    of: str
    statistic: str
    relative: bool

    def __str__(self) -> str:
        text = f"the {self.statistic} of lr * grad over {self.of}"
        return f"{text}, divided by that of the weights" if self.relative else text


class LoggedUpdate(Guard):
    """Compares what `guardian.log()` is given with lr times gradient in the inspected steps, in a few usual forms.

    The forms are norm, standard deviation, mean size and largest element, of each parameter and (the norm) of all
    together, plain, relative to the weights, and as a decimal logarithm. A number that matches one and the same form in
    `least` steps is reported beside what the parameters have really changed by. Quiet for plain SGD, whose update that
    is. Numbers that are printed or sent elsewhere are not seen. Runs before and after the inspected steps, reads the
    device there, and does nothing afterwards.

    Raises GuardUsageError for `least` below 2.
    """

    inspects: ClassVar[bool] = True

    def __init__(self, *, least: int = 2) -> None:
        check_types(LoggedUpdate, locals())
        if least < 2:
            raise GuardUsageError(f"least is {least}; one step that agrees may be chance, so it must be at least 2")
        self._least = least
        self._reported: set[str] = set()
        self._clear()

    def _clear(self) -> None:
        self._before: dict[str, Tensor] = {}
        self._expected: dict[Formula, float] = {}
        self._real: dict[Formula, float] = {}
        self._known: dict[str, float] = {}
        self._matches: dict[tuple[str, Formula], list[tuple[int, float, float | None]]] = {}
        self._compared: dict[str, int] = {}
        self._waits: int | None = None

    def attach(self, watch: Watch) -> None:
        super().attach(watch)
        self._clear()
        self._known = dict(watch.logged)
        watch.inspection.on_end(self._forget)

    def detach(self) -> None:
        self._clear()
        super().detach()

    def _forget(self) -> None:
        # What the last inspected step logs comes after its end: only the copies go.
        self._before.clear()

    def before_step(self, optimizer: Optimizer) -> None:
        """What lr times gradient is now, in every form; and a copy of the parameters, where that is cheap."""
        self._compare()
        self._waits = None
        if not self.watch.inspection.active or is_plain_sgd(optimizer):
            return
        held = self.watch.held_by(self.watch.index_of(optimizer))
        rates = {id(each): float(group["lr"]) for group in optimizer.param_groups for each in group["params"]}
        # What was taken out of the groups is still held by name.
        there = {name: each for name, each in held.items() if id(each) in rates}
        trained = {name: each for name, each in there.items() if each.grad is not None and _ordinary(each, each.grad)}
        products = {name: rates[id(each)] * _grad(each) for name, each in trained.items()}
        self._expected = _figures(products, trained)
        self._waits = self.watch.step
        size = sum(each.numel() * each.element_size() for each in trained.values())
        self._before = {name: each.detach().clone() for name, each in trained.items()} if size <= _MOST_BYTES else {}

    def after_step(self, optimizer: Optimizer) -> None:
        """What the step has really changed, in the same forms."""
        if self._before:
            held = self.watch.held_by(self.watch.index_of(optimizer))
            deltas = {name: held[name].detach() - before for name, before in self._before.items()}
            self._real = _figures(deltas, self._before)
            self._before = {}

    def _compare(self) -> None:
        """Match what was logged since the last look with the step that was waited for."""
        if self._waits is None:
            return
        logged = {name: value for name, value in self.watch.logged.items() if value != self._known.get(name)}
        self._known.update(logged)
        for name, value in logged.items():
            self._compared[name] = self._compared.get(name, 0) + 1
            for formula in _matching(value, self._expected):
                found = self._matches.setdefault((name, formula), [])
                found.append((self._waits, value, self._real.get(formula)))

    def judge(self, seen: Observation) -> Iterable[Finding]:
        """Report a number once it has agreed in enough steps."""
        if not self._matches:
            return
        yield from self._judge()
        if not self.watch.inspection.active and self._waits is None:
            self._matches.clear()

    def finish(self) -> Iterable[Finding]:
        self._compare()
        yield from self._judge()

    def _judge(self) -> Iterator[Finding]:
        for (name, formula), found in self._matches.items():
            always = len(found) == self._compared[name]
            if always and len(found) >= self._least and name not in self._reported:
                self._reported.add(name)
                yield self._finding(name, formula, found)

    def _finding(self, name: str, formula: Formula, found: list[tuple[int, float, float | None]]) -> Finding:
        step, logged, real = found[-1]
        kinds = ", ".join(type(optimizer).__name__ for optimizer in self.watch.optimizers)
        truth = ""
        if real is not None and real > 0.0:
            plain = self._expected.get(formula, math.nan)
            truth = (
                f" What {kinds} really changed there is {number(real)}"
                f"{f', {number(real / plain)} times as much' if plain else ''}."
            )
        return finding(
            "GG313",
            f"The logged number {name!r} ({number(logged)} at step {step}) is {formula}: they agree in each of "
            f"{len(found)} steps.{truth}",
            likely=["sgd_formula"],
            step=step,
            moment=Moment.AFTER_STEP,
            parameter=None if formula.of == _ALL else formula.of.strip("`"),
            cause_id=name,
            evidence={
                "metric": name,
                "logged": logged,
                "lr_times_gradient": self._expected.get(formula),
                "real_update": real,
                "steps": [each[0] for each in found],
            },
            guard=self.name,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"said": sorted(self._reported)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._reported = set(state["said"])


def is_plain_sgd(optimizer: Optimizer) -> bool:
    """Whether lr times gradient is the update: SGD without momentum and without weight decay."""
    return type(optimizer) is SGD and all(
        group["momentum"] == 0 and group["weight_decay"] == 0 for group in optimizer.param_groups
    )


def _ordinary(*tensors: Tensor) -> bool:
    return all(each.layout is torch.strided and each.is_floating_point() and not is_sharded(each) for each in tensors)


def _grad(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad.detach()


def _figures(changes: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> dict[Formula, float]:
    """Every form of these changes; those whose divisor is 0 are left out."""
    found: dict[Formula, float] = {}
    squares = weight_squares = 0.0
    for name, change in changes.items():
        for statistic, measure in _STATISTICS.items():
            value, size = measure(change.float()), measure(weights[name].detach().float())
            if value is None:
                continue
            plain, weight = float(value), float(size)
            found[Formula(f"`{name}`", statistic, False)] = plain
            if weight > 0.0:
                found[Formula(f"`{name}`", statistic, True)] = plain / weight
            if statistic == "norm":
                squares, weight_squares = squares + plain**2, weight_squares + weight**2
    found[Formula(_ALL, "norm", False)] = math.sqrt(squares)
    if weight_squares > 0.0:
        found[Formula(_ALL, "norm", True)] = math.sqrt(squares / weight_squares)
    return found


def _matching(value: float, expected: Mapping[Formula, float]) -> Iterator[Formula]:
    if not math.isfinite(value) or value == 0.0:
        return
    for formula, figure in expected.items():
        if figure > 0.0 and (
            math.isclose(value, figure, rel_tol=_CLOSE) or math.isclose(value, math.log10(figure), rel_tol=_CLOSE)
        ):
            yield formula
