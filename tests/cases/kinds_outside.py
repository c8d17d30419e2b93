"""What is outside of the training step: preprocessing, caches, returns; and what cannot be seen at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard import Guardian, cached, check_returns, stages
from gpt_guard.catalogue import entry
from gpt_guard.errors import GuardError
from gpt_guard.records import Finding

from ..checks.returns.functions import WRITTEN, Written
from .kinds import INSTANCES, Instance, batch, both, net, sgd, step, trained, watched
from .kinds_moves import SOME

CONSTANT, STALE, RETURNS, UNHOOKED, UNCALLED, UNSTEPPED = (
    "constant feature normalised to NaN",
    "stale cache",
    "returns across a terminal or a time limit",
    "hooks that never fire",
    "model that was never called",
    "optimizer never stepped",
)


def features(constant: bool) -> Tensor:
    x = torch.randn(40, 5) * 3 + 1
    if constant:
        x[:, 3] = 7.5
    return x


def standardised(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / x.std(0)


def to_unit(x: Tensor) -> Tensor:
    low, high = x.amin(0), x.amax(0)
    return (x - low) / (high - low)


def pipeline(normalise: Callable[[Tensor], Tensor], broken: bool) -> list[Finding]:
    found: list[Finding] = []
    run = stages(("clip", lambda x: x.clamp(-50, 50)), ("normalise", normalise), on_finding=found.append)
    run(features(constant=broken))
    return found


@both(CONSTANT, "GG150", "normalise", within=None)
def a_standard_deviation_of_zero(broken: bool) -> list[Finding]:
    return pipeline(standardised, broken)


@both(CONSTANT, "GG150", "normalise", within=None)
def a_range_of_zero(broken: bool) -> list[Finding]:
    return pipeline(to_unit, broken)


def made_twice(**then: Any) -> list[Finding]:
    """A cache that was made with one template and source, and is asked for with others."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ids.pt"
        first: dict[str, Any] = {"template": "<user>{text}", "tokenizer": ["a", "b"]}
        cached(path, lambda: torch.arange(8), **first)
        try:
            cached(path, lambda: torch.arange(8), **(first | then))
        except GuardError as refused:
            return [refused.finding]
    return []


@both(STALE, "GG709", "template", within=None)
def tokens_of_another_template(broken: bool) -> list[Finding]:
    return made_twice(**({"template": "<system><user>{text}"} if broken else {}))


@both(STALE, "GG709", "tokenizer", within=None)
def tokens_of_another_tokenizer(broken: bool) -> list[Finding]:
    return made_twice(**({"tokenizer": ["b", "a"]} if broken else {}))


def asked(written: Written) -> list[Finding]:
    return list(check_returns(written.function, **written.options).findings)


for _written in WRITTEN:
    INSTANCES.append(
        Instance(
            RETURNS,
            _written.function.__name__.replace("_", " "),
            partial(asked, _written),
            "GG617" if _written.mistake is not None else None,
            within=None,
            cause=next((each.text for each in entry("GG617").causes if each.key == _written.mistake), ""),
        )
    )


# Coverage: nothing is wrong with the model, but nobody sees it.


def part_loss(model: nn.Module) -> Tensor:
    """The loss of a copy in words: the model's parameters, without a call of the model."""
    x, y = batch()
    first, second = model.get_submodule("0"), model.get_submodule("2")
    hidden = F.linear(x, first.weight, first.bias).tanh()  # type: ignore[arg-type]  # they are Linear
    return F.cross_entropy(F.linear(hidden, second.weight, second.bias), y)  # type: ignore[arg-type]  # as above


@both(UNCALLED, "GG902", "3 steps", within=3)
def only_its_parameters_are_used(broken: bool) -> list[Finding]:
    model = net()
    return trained(model, loss=part_loss) if broken else trained(model)


@both(UNCALLED, "GG902", "3 steps", within=3)
def forward_is_called_by_its_name(broken: bool) -> list[Finding]:
    def loss(model: Any) -> Tensor:
        x, y = batch()
        return F.cross_entropy((model.forward if broken else model)(x), y)

    return trained(Named(), loss=loss)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 6) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


@both(UNSTEPPED, "GG903", "does not step", within=25)
def another_optimizer_steps(broken: bool) -> list[Finding]:
    model = net()
    given, stepped = sgd(model.parameters()), sgd(model.parameters())

    def loop(_: Guardian) -> None:
        for _turn in range(30):
            step(model, stepped if broken else given)

    return watched(model, given, loop)


@both(UNSTEPPED, "GG903", "12 backward calls", within=None)
def a_count_that_is_never_reached(broken: bool) -> list[Finding]:
    model = net()
    optimizer = sgd(model.parameters())
    each = 100 if broken else 4

    def loop(_: Guardian) -> None:
        for turn in range(12):
            x, y = batch()
            (F.cross_entropy(model(x), y) / 4).backward()
            if turn % each == each - 1:
                optimizer.step()
                optimizer.zero_grad()

    return watched(model, optimizer, loop)


def compiled(of: str) -> Callable[[bool], list[Finding]]:
    def run(broken: bool) -> list[Finding]:
        model: Any = net()
        if broken and of == "all":
            model = torch.compile(model, backend="eager")
        elif broken:
            model[0] = torch.compile(nn.Sequential(nn.Linear(6, 16), nn.Tanh()), backend="eager")
        return trained(model)

    run.__name__ = "the_whole_model_is_compiled" if of == "all" else "a_part_is_compiled"
    return run


both(UNHOOKED, "GG901", "(the model itself)", within=None)(compiled("all"))
both(UNHOOKED, "GG901", "0", within=None)(compiled("part"))


# Two processes.

SCENARIOS = ("branch_on_one_rank", "healthy")
_WORKER = Path(__file__).parents[1] / "callbacks" / "distributed" / "replica_worker.py"


@cache
def on_two_ranks() -> dict[str, list[Finding]]:
    """Findings of rank 0 by scenario."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(_WORKER)]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), "2", str(Path(folder) / "meeting"), *SCENARIOS],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(2)
        ]
        (output, errors), _ = [each.communicate(timeout=110) for each in ranks]
    assert output, errors
    found: dict[str, list[Any]] = json.loads(output)
    return {name: [Finding.model_validate(each) for each in one] for name, one in found.items()}


def scenario(name: str) -> Callable[[], list[Finding]]:
    return lambda: on_two_ranks()[name]


INSTANCES.append(Instance(SOME, "a branch that one rank takes", scenario(SCENARIOS[0]), "GG812", "extra.weight"))
INSTANCES.append(Instance(SOME, "two ranks in step", scenario(SCENARIOS[1])))
