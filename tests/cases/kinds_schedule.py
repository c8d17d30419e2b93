"""Schedule and mixed precision: learning rates that are not what was meant, skipped steps, logs that hide them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, LRScheduler, OneCycleLR

from gpt_guard import Guardian, LRTracker
from gpt_guard.callbacks.logged.guards import LoggedLoss
from gpt_guard.records import Finding

from .kinds import batch, both, loss_of, net, sgd, step, watched

ZERO, SAME, NEGATIVE, RESTART, JUMP = (
    "lr 0 after warm-up",
    "lr never changing",
    "lr negative",
    "schedule restarting unplanned",
    "lr jumping on resume",
)
Make = Callable[[Any], LRScheduler]


def scheduled(make: Make, steps: int, *, move: bool = True, again: int = 0, give: bool = True) -> list[Finding]:
    model = net()
    optimizer = sgd(model.parameters())
    scheduler = make(optimizer)

    def loop(_: Guardian) -> None:
        current = scheduler
        for turn in range(steps):
            if again and turn and turn % again == 0:
                current = make(optimizer)
            step(model, optimizer)
            if move:
                current.step()

    return watched(model, optimizer, loop, **({"scheduler": scheduler} if give else {}))


def factor(function: Callable[[int], float]) -> Make:
    return lambda optimizer: LambdaLR(optimizer, function)


@both(ZERO, "GG401", "LambdaLR", begins=20)
def a_decay_that_ends_too_early(broken: bool) -> list[Finding]:
    return scheduled(factor(lambda turn: max(0.0, 1 - turn / (20 if broken else 30))), 26)


@both(ZERO, "GG401", "LambdaLR")
def a_warm_up_in_whole_numbers(broken: bool) -> list[Finding]:
    return scheduled(factor(lambda turn: turn // 10 if broken else turn / 10), 9)


@both(SAME, "GG403", "was never called", within=None)
def a_scheduler_that_nobody_steps(broken: bool) -> list[Finding]:
    return scheduled(lambda optimizer: LinearLR(optimizer, 0.1, total_iters=50), 30, move=not broken)


@both(SAME, "GG403", "was not given", within=None)
def one_that_was_not_given_either(broken: bool) -> list[Finding]:
    return scheduled(lambda optimizer: CosineAnnealingLR(optimizer, 40), 30, move=not broken, give=False)


@both(NEGATIVE, "GG402", "group 0", begins=21)
def a_line_that_goes_on_below_zero(broken: bool) -> list[Finding]:
    return scheduled(factor(lambda turn: 1 - turn / 20 if broken else max(0.1, 1 - turn / 20)), 24)


@both(NEGATIVE, "GG402", "group 0", begins=6)
def a_cosine_by_hand_that_goes_on(broken: bool) -> list[Finding]:
    model = net()
    optimizer = sgd(model.parameters())

    def loop(_: Guardian) -> None:
        for turn in range(9):
            share = turn / 10 if broken else turn / 20
            optimizer.param_groups[0]["lr"] = 0.05 * math.cos(math.pi * share)
            step(model, optimizer)

    return watched(model, optimizer, loop)


@both(RESTART, "GG412", "LambdaLR", begins=8, within=8)
def a_scheduler_made_in_each_epoch(broken: bool) -> list[Finding]:
    rises = factor(lambda turn: min(turn + 1, 10) / 10)
    return scheduled(rises, 20, again=8 if broken else 0)


@both(RESTART, "GG412", "OneCycleLR", begins=8, within=8)
def one_cycle_in_each_epoch(broken: bool) -> list[Finding]:
    return scheduled(lambda optimizer: OneCycleLR(optimizer, 0.05, total_steps=30), 20, again=8 if broken else 0)


def resumed(make: Make, broken: bool) -> list[Finding]:
    """Train, build everything again, load or forget the scheduler's state, and go on."""
    found: list[Finding] = []
    states: dict[str, Any] = {}
    for part in range(2):
        torch.manual_seed(part)
        model = net()
        optimizer = sgd(model.parameters())
        scheduler, guard = make(optimizer), LRTracker()
        if states:
            model.load_state_dict(states["model"])
            guard.load_state_dict(states["guard"])
            if not broken:
                optimizer.load_state_dict(states["optimizer"])
                scheduler.load_state_dict(states["scheduler"])

        def loop(_: Guardian, parts: Any = (model, optimizer, scheduler)) -> None:
            for _turn in range(30):
                step(*parts[:2])
                parts[2].step()

        found += watched(model, optimizer, loop, guards=[guard], scheduler=scheduler, start_step=30 * part)
        states = {
            "model": model.state_dict(),
            "guard": guard.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
        }
    return found


@both(JUMP, "GG407", "group 0", begins=30)
def a_warm_up_that_starts_again(broken: bool) -> list[Finding]:
    return resumed(factor(lambda turn: min(1.0, (turn + 1) / 50)), broken)


@both(JUMP, "GG407", "group 0", begins=30)
def a_decay_that_is_forgotten(broken: bool) -> list[Finding]:
    return resumed(factor(lambda turn: 0.95**turn), broken)


SKIPS, FILTERED = "the scaler skips every step", "the logged loss is filtered"


def scaled(
    loss: Callable[[nn.Module, int], Tensor], steps: int, log: Callable[[Guardian, Tensor], Any], **options: Any
) -> list[Finding]:
    model = net()
    optimizer, scaler = sgd(model.parameters()), torch.amp.GradScaler("cpu", init_scale=2.0**16)

    def loop(guardian: Guardian) -> None:
        for turn in range(steps):
            optimizer.zero_grad()
            value = loss(model, turn)
            scaler.scale(value).backward()
            scaler.step(optimizer)
            scaler.update()
            log(guardian, value.detach())

    return watched(model, optimizer, loop, **options)


def nothing(guardian: Guardian, loss: Tensor) -> None:
    """Logs nothing."""


def with_penalty(penalty: Callable[[Tensor], Tensor], broken: bool) -> list[Finding]:
    """A penalty that is finite and has no finite gradient."""

    def loss(model: nn.Module, turn: int) -> Tensor:
        x, y = batch()
        logits = model(x)
        return F.cross_entropy(logits, y) + (penalty(logits).sum() if broken else 0.0)

    return scaled(loss, 30, nothing)


@both(SKIPS, "GG110", "20 steps in a row", within=30)
def the_root_of_a_distance_of_zero(broken: bool) -> list[Finding]:
    return with_penalty(lambda logits: (logits - logits).square().sum(1).sqrt(), broken)


@both(SKIPS, "GG110", "20 steps in a row", within=30)
def the_angle_between_equal_directions(broken: bool) -> list[Finding]:
    return with_penalty(lambda logits: (logits - logits + 1).acos(), broken)


def bad_at_four(model: nn.Module, turn: int) -> Tensor:
    return loss_of(model) * (math.nan if turn == 4 else 1.0)


# With FiniteGuard beside it, the NaN itself ends the run before its log can be compared.


@both(FILTERED, "GG111", "loss=0", begins=4)
def replaced_before_it_is_logged(broken: bool) -> list[Finding]:
    def log(guardian: Guardian, loss: Tensor) -> None:
        guardian.log(loss=loss.nan_to_num() if broken else loss)

    return scaled(bad_at_four, 8, log, guards=[LoggedLoss()])


@both(FILTERED, "GG111", "train_loss=", begins=4)
def an_average_that_leaves_it_out(broken: bool) -> list[Finding]:
    last: deque[Tensor] = deque(maxlen=3)

    def log(guardian: Guardian, loss: Tensor) -> None:
        last.append(loss)
        several = torch.stack([*last])
        guardian.log(train_loss=several.nanmean() if broken else several.mean())

    return scaled(bad_at_four, 8, log, guards=[LoggedLoss()])
