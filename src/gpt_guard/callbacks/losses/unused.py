"""Differentiable numbers that the model computes and that no loss contains: an auxiliary loss that is never added.

Keeps paths and the numbers that autograd gives its operations; no tensor, no graph.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from gpt_guard.catalogue import finding
from gpt_guard.hooks.autograd_graph.nodes import nodes, sequence_of
from gpt_guard.hooks.tensors import walk
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Severity

_LOSS = re.compile(r"loss|penalt|regulari[sz]", re.IGNORECASE)
_LEAST = 2
_MOST = 2000
# Attributes that hold a tensor, or a few of them.
_CONTAINERS = (list, tuple, dict)


class UnusedLosses:
    """Of each step that is inspected: the scalars that the forwards left behind, and those that its losses contain."""

    def __init__(self) -> None:
        self._made: dict[str, set[int]] = {}
        self._used: set[str] = set()
        self._unused: dict[str, int] = {}
        self._steps = 0
        self._backwards = 0

    def forward_ended(self, watch: Watch, output: Any) -> None:
        """Note what the modules and the model's output hold, after a training forward."""
        for name, tensor in _scalars(watch, output):
            number = sequence_of(tensor)
            if number is not None and (name in self._made or len(self._made) < _MOST):
                self._made.setdefault(name, set()).add(number)

    def before_backward(self, loss: Tensor) -> None:
        """Take those off that this loss is computed from."""
        self._backwards += 1
        open_ = {name: numbers for name, numbers in self._made.items() if name not in self._used}
        if open_:
            inside = {int(node._sequence_nr()) for node in nodes(loss)}
            self._used |= {name for name, numbers in open_.items() if numbers & inside}

    def step_ends(self) -> None:
        """All backwards of this step have been seen."""
        if self._backwards:
            self._steps += 1
            for name in self._made.keys() - self._used:
                self._unused[name] = self._unused.get(name, 0) + 1
        self._made, self._used, self._backwards = {}, set(), 0

    def judge(self, watch: Watch, step: int) -> Iterator[Finding]:
        """GG647 for what was there in each step, and in no loss of any."""
        steps, self._steps = self._steps, 0
        always = sorted(name for name, count in self._unused.items() if count == steps >= _LEAST)
        self._unused = {}
        losses = [name for name in always if _is_meant(name.rpartition("::")[2])]
        others = [name for name in always if name not in losses]
        for names, severity in ((losses, Severity.WARNING), (others, Severity.INFO)):
            if names:
                yield _found(watch, names, step, steps, severity)


def _is_meant(name: str) -> bool:
    """Whether a name says that it is to be added; the loss that a model returns is often replaced by one's own."""
    return _LOSS.search(name) is not None and name not in ("output['loss']", "output.loss")


def _found(watch: Watch, names: list[str], step: int, steps: int, severity: Severity) -> Finding:
    order = {path: place for place, path in enumerate(watch.tap.names)}
    names = sorted(names, key=lambda name: (order.get(name.rpartition("::")[0], -1), name))
    shown = [_readable(name) for name in names]
    path = names[0].rpartition("::")[0]
    module = watch.tap.modules[order[path]] if path in order else watch.model
    more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
    what = "is a number" if len(shown) == 1 else "are numbers"
    return finding(
        "GG647",
        f"{', '.join(shown[:3])}{more} {what} with a graph, computed in the forward, that no backward() reached in "
        f"{steps} of {steps} steps: the loss does not contain {'it' if len(shown) == 1 else 'them'}.",
        shown=["never_added"] if severity is Severity.WARNING else ["metric"],
        severity=severity,
        step=step,
        moment=Moment.FORWARD,
        module=path,
        module_class=type(module).__name__,
        evidence={"names": shown[:50], "steps": steps},
        cause_id=f"unused {severity.value}",
    )


def _readable(name: str) -> str:
    path, _, attribute = name.rpartition("::")
    if attribute.startswith("output"):
        return f"`{attribute}` of the model"
    return f"`{path}.{attribute}`" if path else f"`{attribute}`"


def _scalars(watch: Watch, output: Any) -> Iterator[tuple[str, Tensor]]:
    for path, module in zip(watch.tap.names, watch.tap.modules, strict=True):
        for key, value in vars(module).items():
            if key.startswith("_") or not (isinstance(value, (Tensor, *_CONTAINERS))):
                continue
            for position, tensor in walk(value):
                if _is_scalar(tensor):
                    # A list that grows from step to step is one thing.
                    place = re.sub(r"\[\d+\]", "", position)
                    yield f"{path}::{key}{place}", tensor
    if not isinstance(output, Tensor):
        for position, tensor in walk(output):
            if _is_scalar(tensor):
                yield f"::output{position}", tensor


def _is_scalar(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.numel() == 1 and tensor.grad_fn is not None
