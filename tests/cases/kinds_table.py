"""Runs all instances of all kinds, and makes the table of them: caught, named, in time, twins silent."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch

from gpt_guard.records import Finding

from . import (
    kinds_behind,
    kinds_known,
    kinds_model,
    kinds_modes,
    kinds_moves,
    kinds_order,
    kinds_outside,
    kinds_restoring,
    kinds_schedule,
    kinds_settings,
    kinds_wiring,
)
from .kinds import INSTANCES, Instance, complaints

FILES = (
    kinds_behind,
    kinds_known,
    kinds_model,
    kinds_modes,
    kinds_moves,
    kinds_order,
    kinds_outside,
    kinds_restoring,
    kinds_schedule,
    kinds_settings,
    kinds_wiring,
)
HEAD = ("| kind | caught | named | in time | twins silent | found as |", "|---|---|---|---|---|---|")

GROUPS: dict[str, tuple[str, ...]] = {
    "Wiring": (
        kinds_wiring.BEFORE,
        kinds_wiring.NONE,
        kinds_wiring.LIST,
        kinds_wiring.CUT,
        kinds_wiring.REENTRANT,
        kinds_moves.FROZEN,
        kinds_moves.MOVES,
        kinds_moves.LOST,
        kinds_moves.RESIZED,
        kinds_moves.TIES,
        kinds_moves.SOME,
        kinds_moves.STUCK,
    ),
    "Order": (*kinds_order.NAMES.values(), kinds_order.TAIL),
    "Loss inputs": tuple(
        f"loss inputs: {kind}"
        for kind in (
            "softmax twice",
            "sigmoid twice",
            "labels that count",
            "padding as labels",
            "shifted labels",
            "targets out of range",
            "order of flattening",
            "reduction",
            "first loss",
            "one loss decides alone",
            "wrong kind of scores",
            "wrong kind of targets",
            "wrong dimension",
            "all pairs",
        )
    ),
    "Model": tuple(f"model: {kind}" for kind in dict.fromkeys([*kinds_known.MODEL.values(), kinds_known.OTHER])),
    "Mode": (kinds_modes.VALIDATION, kinds_modes.NEVER, kinds_modes.AFTER, kinds_modes.BLANKET),
    "Data": (
        *(
            f"data: {kind}"
            for kind in (
                "same batch",
                "one side",
                "equal rows",
                "workers",
                "batch dimension",
                "form",
                "contamination",
            )
        ),
        kinds_outside.CONSTANT,
        kinds_outside.STALE,
    ),
    "Schedule": (
        kinds_schedule.ZERO,
        kinds_schedule.SAME,
        kinds_schedule.NEGATIVE,
        kinds_schedule.RESTART,
        kinds_schedule.JUMP,
    ),
    "Mixed precision": (kinds_schedule.SKIPS, kinds_schedule.FILTERED),
    "Settings": (kinds_settings.OPTIMIZER, kinds_settings.MODULE),
    "Behind the loop": (
        kinds_behind.REDRAWN,
        kinds_behind.ORDER,
        kinds_behind.VANISHED,
        kinds_behind.UNUSED,
        kinds_behind.CONSTANT_LOSS,
    ),
    "Restoring": (
        kinds_restoring.LIVE,
        kinds_restoring.NOTHING_FITS,
        kinds_restoring.BY_POSITION,
        kinds_restoring.RATE_KEPT,
        kinds_restoring.UNREAD,
    ),
    "Returns": (kinds_outside.RETURNS,),
    "Coverage": (kinds_outside.UNHOOKED, kinds_outside.UNCALLED, kinds_outside.UNSTEPPED),
}


class Seen(NamedTuple):
    """An instance and what was found in it."""

    instance: Instance
    found: list[Finding]

    @property
    def finding(self) -> Finding | None:
        """The finding that was to be made, if it has the right cause first."""
        code, cause = self.instance.code, self.instance.cause
        return next((each for each in self.found if each.code == code and cause in (*each.causes, "")[0]), None)

    @property
    def named(self) -> bool:
        """Whether that finding names the module, the parameter, the line or the figure that it should."""
        one, meant = self.finding, self.instance
        if one is None or (meant.line and one.where is None):
            return False
        line = one.where.text if one.where is not None else ""
        told = any(meant.place in text for text in (one.module or "", one.parameter or "", line, one.seen))
        return told and meant.module in (None, one.module)

    @property
    def in_time(self) -> bool:
        """Whether it comes within so many steps of its beginning."""
        one, within = self.finding, self.instance.within
        if one is None or within is None:
            return one is not None
        return one.step is not None and 0 <= one.step - self.instance.begins <= within

    @property
    def silent(self) -> bool:
        """Whether nothing of warning or above was said."""
        return not complaints(self.found)


@cache
def seen(instance: Instance) -> Seen:
    """Run one instance."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        # torch itself warns of some of these, once each and easily missed.
        warnings.simplefilter("ignore")
        return Seen(instance, list(instance.run()))


def of_kind(kind: str) -> tuple[list[Instance], list[Instance]]:
    """The instances with a bug, and the twins."""
    all_ = [each for each in INSTANCES if each.kind == kind]
    return [each for each in all_ if each.code is not None], [each for each in all_ if each.code is None]


def row(kind: str) -> str:
    """One line of the table."""
    bugs, twins = ([seen(each) for each in some] for some in of_kind(kind))
    placed = [each for each in bugs if each.instance.placed]
    steps = [each for each in bugs if each.instance.within is not None]
    codes = ", ".join(sorted({each.finding.code for each in bugs if each.finding is not None}))
    shares = (
        _share(len(bugs), sum(each.finding is not None for each in bugs)),
        _share(len(placed), sum(each.named for each in placed)),
        _share(len(steps), sum(each.in_time for each in steps)),
        _share(len(twins), sum(each.silent for each in twins)),
    )
    return f"| {kind} | {' | '.join(shares)} | {codes} |"


def _share(of: int, count: int) -> str:
    return f"{count} of {of}" if of else "-"


def lines() -> Iterator[str]:
    """The table, a part for each group, and a line that counts all."""
    for group, kinds in GROUPS.items():
        yield ""
        yield f"### {group}"
        yield ""
        yield from HEAD
        yield from (row(kind) for kind in kinds)
    yield ""
    yield total()


def total() -> str:
    """How many kinds, instances and twins there are, and what came of them."""
    bugs = [seen(each) for each in INSTANCES if each.code is not None]
    twins = [seen(each) for each in INSTANCES if each.code is None]
    placed = [each for each in bugs if each.instance.placed]
    return (
        f"{len({each.kind for each in INSTANCES})} kinds, {len(bugs)} instances: "
        f"{sum(each.finding is not None for each in bugs)} caught, "
        f"{sum(each.named for each in placed)} of {len(placed)} with a place named, "
        f"{sum(each.silent for each in twins)} of {len(twins)} healthy twins silent."
    )
