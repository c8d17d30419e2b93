"""The kinds of silent bugs: instances of each, with the finding that is expected, and their healthy twins."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard import Guardian
from gpt_guard.callbacks.defaults import default_guards
from gpt_guard.records import Finding, Severity

Found = Callable[[], Iterable[Finding]]
ROWS, WIDTH, CLASSES = 16, 6, 3


class Instance(NamedTuple):
    """A loop to run; `code` is what has to be found in it, None for a healthy twin.

    `cause` is a piece of the cause that has to come first. `place` is a piece of the module, the parameter, the line or
    the evidence that has to be named, `module` the exact path, and with `line` any line of the user's must be. `begins`
    is the step in which the bug begins, `within` the steps after that in which it has to be told; None where steps do
    not matter.
    """

    kind: str
    name: str
    run: Found
    code: str | None = None
    place: str = ""
    begins: int = 0
    within: int | None = 2
    cause: str = ""
    module: str | None = None
    line: bool = False

    @property
    def placed(self) -> bool:
        """Whether there is a place that has to be named."""
        return bool(self.place) or self.module is not None or self.line


INSTANCES: list[Instance] = []


def both(kind: str, code: str, place: str = "", **fields: Any) -> Callable[[Callable[[bool], Any]], Any]:
    """Note a function of `broken` as an instance with a bug, and as its healthy twin."""

    def note(run: Callable[[bool], Iterable[Finding]]) -> Callable[[bool], Iterable[Finding]]:
        name = run.__name__.replace("_", " ")
        INSTANCES.append(Instance(kind, name, lambda: run(True), code, place, **fields))
        INSTANCES.append(Instance(kind, name, lambda: run(False)))
        return run

    return note


def batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Inputs and labels that can be learned from them."""
    x = torch.randn(rows, WIDTH)
    return x, x[:, :CLASSES].argmax(1)


def net(*last: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, CLASSES), *last)


def sgd(parameters: Any, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr)


def loss_of(model: nn.Module) -> Tensor:
    x, y = batch()
    return F.cross_entropy(model(x), y)


def step(model: nn.Module, optimizer: Any, loss: Callable[[nn.Module], Tensor] = loss_of) -> None:
    optimizer.zero_grad()
    loss(model).backward()
    optimizer.step()


def watched(model: nn.Module, optimizer: Any, loop: Callable[[Guardian], None], **options: Any) -> list[Finding]:
    """What all default guards find in a loop; one that ends in an exception of torch's own is no other."""
    guardian = Guardian(model, optimizer, guards=options.pop("guards", None) or default_guards(), sinks=[], **options)
    with guardian:
        loop(guardian)
    return list(guardian.findings)


def trained(
    model: nn.Module,
    optimizer: Any = None,
    loss: Callable[[nn.Module], Tensor] = loss_of,
    steps: int = 6,
    **options: Any,
) -> list[Finding]:
    """The same for the usual loop."""
    optimizer = sgd(model.parameters()) if optimizer is None else optimizer

    def loop(_: Guardian) -> None:
        for _turn in range(steps):
            step(model, optimizer, loss)

    return watched(model, optimizer, loop, **options)


def complaints(found: Iterable[Finding]) -> list[Finding]:
    """Findings of warning or above."""
    return [each for each in found if each.severity is not Severity.INFO]
