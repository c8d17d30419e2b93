"""Loops of one's own: plain, accumulated, in lower precision, and with activations that are computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .parts import STEPS, Call, Model, Setup, Trial, directly, loss_of, texts


def plain(trial: Trial, call: Call = directly, precision: torch.dtype | None = None) -> nn.Module:
    model = Model(trial, call)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with trial.watch(model, optimizer):
        for step in range(STEPS):
            trial.begin_step(model)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=precision, enabled=precision is not None):
                loss = loss_of(model, texts(step))
            loss.backward()
            trial.norm_of(model)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    return model


def accumulated(trial: Trial) -> nn.Module:
    model = Model(trial)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with trial.watch(model, optimizer):
        for step in range(STEPS):
            trial.begin_step(model)
            for part in range(4):
                (loss_of(model, texts(4 * step + part)) / 4).backward()
            trial.norm_of(model)
            optimizer.step()
            optimizer.zero_grad()
    return model


def scaled(trial: Trial) -> nn.Module:
    model = Model(trial)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with trial.watch(model, optimizer):
        for step in range(STEPS):
            trial.begin_step(model)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loss_of(model, texts(step))
            scaler.scale(loss).backward()
            trial.norm_of(model, scaler.get_scale())
            scaler.step(optimizer)
            scaler.update()
    return model


def again(reentrant: bool) -> Call:
    def call(layer: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(layer, x, use_reentrant=reentrant)
        return out

    return call


def averaged(trial: Trial, average: Callable[..., Any]) -> nn.Module:
    """A copy that follows the weights, and takes part in evaluation only."""
    model = Model(trial)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    copy, schedule = average(model, optimizer)
    with trial.watch(model, optimizer):
        for step in range(STEPS):
            trial.begin_step(model)
            optimizer.zero_grad()
            loss_of(model, texts(step)).backward()
            trial.norm_of(model)
            optimizer.step()
            copy.update_parameters(model)
            if schedule is not None:
                schedule.step()
            if step == STEPS // 2:
                with torch.no_grad():
                    copy.eval()(texts(100)[:, :-1])
    return model


def ema(model: nn.Module, _optimizer: Any) -> tuple[Any, Any]:
    swa = torch.optim.swa_utils
    return swa.AveragedModel(model, multi_avg_fn=swa.get_ema_multi_avg_fn(0.9)), None


def swa(model: nn.Module, optimizer: Any) -> tuple[Any, Any]:
    return torch.optim.swa_utils.AveragedModel(model), torch.optim.swa_utils.SWALR(optimizer, 0.05, anneal_epochs=2)


SETUPS = (
    Setup("plain loop", plain),
    Setup("gradients of 4 batches accumulated", accumulated),
    Setup("autocast in bfloat16", lambda trial: plain(trial, precision=torch.bfloat16)),
    Setup("autocast in float16, GradScaler", scaled),
    Setup("activation checkpointing", lambda trial: plain(trial, again(reentrant=False))),
    Setup("activation checkpointing, reentrant", lambda trial: plain(trial, again(reentrant=True))),
    Setup("EMA of the weights", lambda trial: averaged(trial, ema)),
    Setup("SWA of the weights", lambda trial: averaged(trial, swa)),
)
