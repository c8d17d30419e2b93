"""Order: when gradients are cleared, added up, clipped and applied, and when the schedule moves."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR, StepLR

from gpt_guard.callbacks.defaults import default_guards
from gpt_guard.records import Finding

from ..callbacks.loop_order import order_fault_sums, order_faults
from ..callbacks.loop_order.order_loops import Body, cross_entropy, run
from .kinds import INSTANCES, Instance, both

BETWEEN = "zero_grad between backward and step"
NAMES = {
    "GG209": "zero_grad missing",
    "GG208": BETWEEN,
    "GG230": "zero_grad in every micro-batch",
    "GG238": "loss not divided for accumulation",
    "GG239": "mean of unequal means",
    "GG231": "clip after step",
    "GG210": "clip before unscale",
    "GG232": "clip of no gradient",
    "GG233": "clip to zero or less",
    "GG234": "clip before all micro-batches are in",
    "GG235": "backward twice",
    "GG236": "step without a new backward",
    "GG411": "scheduler before optimizer",
    "GG405": "scheduler per micro-batch",
    "GG404": "scheduler of another optimizer",
}
TAIL = "accumulated tail dropped"


def guarded(body: Body, **options: Any) -> list[Finding]:
    return run(body, guards=default_guards(), **options)


def plain(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    optimizer.zero_grad()
    cross_entropy(model).backward()
    optimizer.step()


def accumulated(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    optimizer.zero_grad()
    for _micro in range(4):
        (cross_entropy(model) / 4).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def scaled(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    scaler = kept.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=4.0))
    optimizer.zero_grad()
    scaler.scale(cross_entropy(model)).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def scheduled(_: int, model: Any, optimizer: Any, kept: Any) -> None:
    scheduler = kept["scheduler"] if kept else kept.setdefault("scheduler", ExponentialLR(optimizer, 0.9))
    for _micro in range(2):
        (cross_entropy(model) / 2).backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


_OF_SCHEDULES = ("GG411", "GG405", "GG404")
_TWINS: dict[str, tuple[Body, ...]] = {
    code: (plain, scheduled) if code in _OF_SCHEDULES else (plain, accumulated, scaled) for code in NAMES
}


def _note(body: Body, code: str, cause: str, line: str) -> None:
    name = body.__name__.replace("_", " ")
    INSTANCES.append(Instance(NAMES[code], name, partial(guarded, body), code, line, cause=cause))


for _body, _code, _cause, _line, _saw in (*order_faults.CASES, *order_fault_sums.CASES):
    _note(_body, _code, _cause, _line)
for _code, _twins in _TWINS.items():
    for _twin in _twins:
        INSTANCES.append(Instance(NAMES[_code], _twin.__name__, partial(guarded, _twin)))


@both(NAMES["GG405"], "GG405", "scheduler.step()")
def for_each_of_four(broken: bool) -> list[Finding]:
    def body(_: int, model: Any, optimizer: Any, kept: Any) -> None:
        scheduler = kept["scheduler"] if kept else kept.setdefault("scheduler", StepLR(optimizer, 2))
        optimizer.zero_grad()
        for _micro in range(4):
            (cross_entropy(model) / 4).backward()
            if broken:
                scheduler.step()
        optimizer.step()
        if not broken:
            scheduler.step()

    return guarded(body, steps=3)


@both(NAMES["GG404"], "GG404", "scheduler.step()")
def that_of_a_warm_up_optimizer(broken: bool) -> list[Finding]:
    def body(_: int, model: Any, optimizer: Any, kept: Any) -> None:
        if not kept:
            kept["first"] = SGD(model.parameters(), lr=1e-3)
            kept["scheduler"] = StepLR(kept["first"] if broken else optimizer, 1, gamma=0.5)
        scheduler = kept["scheduler"]
        optimizer.zero_grad()
        cross_entropy(model).backward()
        optimizer.step()
        scheduler.step()

    return guarded(body)


def _epochs(broken: bool, batches: int, each: int) -> list[Finding]:
    def body(_: int, model: Any, optimizer: Any, kept: Any) -> None:
        model.train()
        optimizer.zero_grad()
        for at in range(batches):
            (cross_entropy(model) / each).backward()
            if at % each == each - 1 or (at == batches - 1 and not broken):
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            cross_entropy(model)

    return guarded(body, steps=3)


@both(TAIL, "GG237", "2 micro-batches", begins=2)
def two_of_ten_micro_batches(broken: bool) -> list[Finding]:
    return _epochs(broken, 10, 4)


@both(TAIL, "GG237", "1 micro-batches", begins=2)
def one_of_five_micro_batches(broken: bool) -> list[Finding]:
    return _epochs(broken, 5, 2)
