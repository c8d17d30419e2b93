"""The findings of LRTracker."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from gpt_guard.callbacks.gradients.level import Standing
from gpt_guard.callbacks.schedule.rates import LRTrack
from gpt_guard.callbacks.schedule.schedulers import SchedulerView, last_lr
from gpt_guard.catalogue import finding
from gpt_guard.records import Finding, Moment, Observation, Severity
from gpt_guard.records.render import learning_rate, learning_rates, number


def zero(seen: Observation, track: LRTrack, schedulers: Sequence[str]) -> Finding:
    """GG401: all groups at 0 for longer than a warm-up or the end of a schedule explains."""
    if track.was_positive:
        since = f"; it had been positive before, up to {learning_rate(track.highest)}"
    else:
        since = " from the first step seen"
    by = f" Scheduler: {', '.join(schedulers)}." if schedulers else ""
    return _about(
        "GG401",
        seen,
        f"The learning rate is 0 in all groups ({len(seen.lr)}), for {track.zeros} steps in a row{since}.{by}",
        likely=["schedule_ended" if track.was_positive else "warm_up_stuck"],
        evidence={"in_a_row": track.zeros, "highest": track.highest, "schedulers": list(schedulers)},
    )


def vanished(seen: Observation, track: LRTrack, schedulers: Sequence[SchedulerView]) -> Finding:
    """GG409: so far below its peak that nothing moves any more, and the run goes on."""
    waits = any(view.waits_for_metric for view in schedulers)
    fast = any(view.per_step for view in schedulers)
    where = "".join(f" {view.name} stands at position {view.last}." for view in schedulers)
    lr = max(seen.lr)
    return _about(
        "GG409",
        seen,
        f"The learning rate is {learning_rate(lr)}, {number(lr / track.highest)} times its peak of "
        f"{learning_rate(track.highest)}, and has been as small for {track.vanished} steps in a row.{where}",
        likely=["plateau"] if waits else ["per_batch"] if fast else ["decay_too_strong"],
        # It is lowered because the loss has stopped falling: that is what it is for.
        severity=Severity.INFO if waits else Severity.WARNING,
        evidence={
            "in_a_row": track.vanished,
            "highest": track.highest,
            "schedulers": [view.name for view in schedulers],
        },
    )


def past_the_end(seen: Observation, view: SchedulerView) -> Finding:
    """GG410: a schedule with an end goes on past it."""
    bounces = "Cosine" in view.name or view.name == "SequentialLR"
    then = "; past it, a cosine rises again" if bounces else ""
    return _about(
        "GG410",
        seen,
        f"{view.name} stands at position {view.last}; it was made for {view.length}{then}. The learning rate is "
        f"{learning_rates(seen.lr)}.{' It moves with each optimizer step.' if view.per_step else ''}",
        likely=["per_batch"] if view.per_step else ["run_longer"],
        severity=Severity.WARNING if view.per_step else Severity.INFO,
        cause_id=f"optimizer {seen.optimizer}, {view.name}",
        evidence={"scheduler": view.name, "position": view.last, "length": view.length, "lr": list(seen.lr)},
    )


def impossible(seen: Observation, group: int, before: tuple[float, ...]) -> Finding:
    """GG402: negative, NaN or infinite."""
    lr = seen.lr[group]
    was = f"; it was {learning_rate(before[group])} one step before" if group < len(before) else ""
    return _about(
        "GG402",
        seen,
        f"The learning rate of group {group} is {learning_rate(lr)}{was}.",
        likely=["past_the_end"] if lr < 0.0 else ["division_by_zero"],
        cause_id=f"optimizer {seen.optimizer}, group {group}",
        evidence={"group": group, "lr": list(seen.lr)},
    )


def never_stepped(view: SchedulerView, track: LRTrack) -> Finding:
    """GG403: the scheduler has not moved in the whole run."""
    return _at_end(
        view,
        track,
        f"{view.name} still stands at position {view.last} after {track.steps} optimizer steps: scheduler.step() was "
        f"never called. The learning rate stayed at {learning_rates(track.last)}.",
        "never_stepped",
    )


def overwritten(view: SchedulerView, track: LRTrack, own: tuple[float, ...] | None) -> Finding:
    """GG403: the scheduler moves, the groups keep their lr."""
    return _at_end(
        view,
        track,
        f"{view.name} has moved from position {view.start} to {view.last} and gives {learning_rates(own or ())}; the "
        f"last {track.unchanged} optimizer steps were made with {learning_rates(track.last)}.",
        "overwritten",
    )


def foreign_scheduler(view: SchedulerView, optimizers: Sequence[Optimizer], seen: Observation | None = None) -> Finding:
    """GG404: it sets the lr of an optimizer that is not among the watched ones; `seen` where that was followed."""
    kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
    groups = len(view.driven.param_groups) if isinstance(view.driven, Optimizer) else "unknown"
    return finding(
        "GG404",
        f"{view.name} drives another {type(view.driven).__name__} ({groups} parameter groups) than the one that "
        f"this loop steps ({kinds})." + ("" if seen is None else f" {_followed(view, seen)}"),
        step=None if seen is None else seen.step,
        moment=Moment.BEFORE_STEP,
        cause_id=view.name,
        evidence={"scheduler": view.name, "drives": type(view.driven).__name__, "watched": kinds},
    )


def _followed(view: SchedulerView, seen: Observation) -> str:
    now = last_lr(view.get()) or ()
    return (
        f"It has come to {learning_rates(now)}; that optimizer was not stepped meanwhile, and the one that is, over "
        f"the same parameters, still has {learning_rates(seen.lr)}."
    )


def too_fast(seen: Observation, view: SchedulerView, moved: int) -> Finding:
    """GG405: it moves several positions between two optimizer steps."""
    per_batch = moved == seen.micro_batches and moved > 1
    why = ", as many as there are backward calls in a step" if per_batch else ""
    return _about(
        "GG405",
        seen,
        f"{view.name} moved by {moved} positions (now {view.last}) between two optimizer steps{why}; three times in a "
        f"row by two or more.",
        likely=["per_micro_batch"] if per_batch else ["called_twice"],
        cause_id=f"optimizer {seen.optimizer}, {view.name}",
        evidence={"scheduler": view.name, "moved": moved, "position": view.last, "micro_batches": seen.micro_batches},
    )


def off_schedule(seen: Observation, expected: tuple[float, ...], shift: int | None) -> Finding:
    """GG406: the first step whose lr is not the expected one."""
    pairs = list(zip(seen.lr, expected, strict=True))
    group = max(range(len(pairs)), key=lambda place: _gap(*pairs[place]))
    own, want = pairs[group]
    why = f" That is what the schedule gives for step {seen.step + shift}." if shift is not None else ""
    return _about(
        "GG406",
        seen,
        f"At step {seen.step} the learning rate of group {group} is {learning_rate(own)}, expected was "
        f"{learning_rate(want)} ({number(own / want) if want else 'not 0'}{' times that' if want else ''}).{why}",
        likely=["off_by_one"] if shift is not None else [],
        evidence={"group": group, "lr": list(seen.lr), "expected": list(expected), "shift": shift},
    )


def jumped(seen: Observation, track: LRTrack, group: int, factor: float) -> Finding:
    """GG407: another lr after the resume than before it."""
    restarted = len(track.first) == len(seen.lr) and _gap(seen.lr[group], track.first[group]) < 1e-3
    return _about(
        "GG407",
        seen,
        f"The learning rate of group {group} was {learning_rate(track.last[group])} at step {track.step}, the last one "
        f"before the run was resumed. At step {seen.step} it is {learning_rate(seen.lr[group])}, {number(factor)} "
        f"times that.{' It is the one that the run began with.' if restarted else ''}",
        likely=["scheduler_restarted"] if restarted else ["optimizer_state_overwrote"],
        evidence={"group": group, "before": list(track.last), "after": list(seen.lr), "factor": factor},
    )


def restarted(seen: Observation, track: LRTrack, view: SchedulerView) -> Finding:
    """GG412: a new scheduler stands at its start in the middle of a run, and the lr with it."""
    again = "" if track.restarts == 1 else f", for time {track.restarts}"
    return _about(
        "GG412",
        seen,
        f"The learning rate went from {learning_rate(track.last[0])} to {learning_rate(seen.lr[0])} in one "
        f"step{again}: back to that of the first step. The scheduler that drives this optimizer ({view.name}) stands "
        f"at position {view.last}, after {track.steps + 1} steps.",
        likely=["made_again"],
        # One may be a second phase; another from the same start is none.
        severity=Severity.INFO if track.restarts == 1 else Severity.WARNING,
        cause_id=f"optimizer {seen.optimizer}, {'first' if track.restarts == 1 else 'again'}",
        evidence={"scheduler": view.name, "position": view.last, "before": list(track.last), "lr": list(seen.lr)},
    )


def doubled(view: SchedulerView, free: int) -> Finding:
    """GG404: two equal schedulers drive one optimizer, and another one has none."""
    return finding(
        "GG404",
        f"Two {view.name} with the same settings drive optimizer {view.index}, and none drives optimizer {free}: the "
        f"first one's lr changes twice as fast, that of optimizer {free} not at all.",
        likely=["mixed_up"],
        cause_id=f"optimizer {free}",
        evidence={"scheduler": view.name, "optimizer": view.index, "without": free},
    )


def spike_at_peak(seen: Observation, standing: Standing, track: LRTrack, spike_factor: float) -> Finding:
    """GG408: the gradient norm leaves its usual level just where the lr is highest."""
    applied = seen.grad_norm_clipped
    contained = bool(seen.clipped) and applied is not None and applied < spike_factor * standing.median
    return _about(
        "GG408",
        seen,
        f"The gradient norm is {number(seen.grad_norm)}, {number(standing.factor)} times the usual "
        f"{number(standing.median)}, at lr {learning_rate(max(seen.lr))}: the highest of the run so far is "
        f"{learning_rate(track.highest)}, the lowest was {learning_rate(track.lowest)}."
        f"{f' Clipping left {number(applied)} of it.' if seen.clipped else ''}",
        severity=Severity.INFO if contained else Severity.WARNING,
        cause_id=f"optimizer {seen.optimizer}{', contained' if contained else ''}",
        evidence={"grad_norm": seen.grad_norm, "usual": standing.median, "lr": list(seen.lr), "peak": track.highest},
    )


def _about(code: str, seen: Observation, text: str, **fields: Any) -> Finding:
    fields.setdefault("cause_id", f"optimizer {seen.optimizer}")
    return finding(code, text, step=seen.step, moment=Moment.BEFORE_STEP, **fields)


def _at_end(view: SchedulerView, track: LRTrack, text: str, likely: str) -> Finding:
    found = " It was not given to Guardian, but found to drive this optimizer." if view.found else ""
    return finding(
        "GG403",
        text + found,
        likely=[likely],
        step=track.step,
        moment=Moment.EXIT,
        cause_id=f"optimizer {view.index}, {view.name}",
        evidence={"scheduler": view.name, "position": view.last, "steps": track.steps, "lr": list(track.last)},
    )


def _gap(own: float, want: float) -> float:
    """Relative difference; infinite for what is not a number."""
    gap = abs(own - want) / max(abs(own), abs(want), 1e-300)
    return math.inf if math.isnan(gap) else gap
