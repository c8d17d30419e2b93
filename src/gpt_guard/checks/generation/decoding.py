"""Our own decoding: several settings side by side in one batch, the context cropped, only the last position sampled."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gpt_guard.checks.runner.forward import UnknownOutput, call, unpack

_UNLIMITED = 128
"""Positions of context for a model that tells no limit: what repeats or is chaotic shows within it."""


@dataclass(frozen=True)
class Setting:
    """How the next token is chosen; a temperature of 0 takes the likeliest."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __str__(self) -> str:
        if self.temperature == 0:
            return "greedy"
        parts = [f"temperature {self.temperature:g}"]
        parts += [f"top_k {self.top_k}"] if self.top_k is not None else []
        parts += [f"top_p {self.top_p:g}"] if self.top_p is not None else []
        return ", ".join(parts)


GREEDY = Setting(temperature=0.0)
SETTINGS = (
    GREEDY,
    Setting(temperature=0.8, top_k=40),
    Setting(top_p=0.95),
    Setting(),
    Setting(temperature=1.2),
)
"""From none to much randomness: greedy; top-k 40 (Radford et al. 2019); nucleus 0.95 (Holtzman et al. 2020); the
model's own distribution; and a flattened one."""
MODERATE = SETTINGS[1]


def decode(
    model: nn.Module,
    prompts: Tensor,
    count: int,
    settings: Sequence[Setting] = (GREEDY,),
    *,
    limit: int | None = None,
    generator: torch.Generator | None = None,
    seconds: float = float("inf"),
) -> Tensor:
    """Return the new ids `[S, B, count]` that follow prompts `[B, T]` under each of S settings.

    The model must be in eval mode; it is called on the last `limit` ids, once per token for all settings. Stops early
    after that many seconds, with at least 32 ids. Draws on the CPU from `generator`, so that all devices agree.
    """
    rows = prompts.repeat(len(settings), 1)
    length, begin = prompts.size(1), time.perf_counter()
    limit = limit or max(_UNLIMITED, length)
    with torch.no_grad():
        for done in range(count):
            if done >= 32 and time.perf_counter() - begin > seconds:
                break
            logits = last_logits(model, rows[:, -limit:])
            parts = logits.view(len(settings), prompts.size(0), -1)
            chosen = torch.cat([choose(part, one, generator) for part, one in zip(parts, settings, strict=True)])
            rows = torch.cat([rows, chosen.to(rows)[:, None]], dim=1)
    return rows[:, length:].reshape(len(settings), prompts.size(0), -1)


def cropped(ids: Tensor, limit: int | None) -> Tensor:
    """The last `limit` of ids `[B, T]`; all of them without a limit."""
    return ids if limit is None else ids[:, -limit:]


def last_logits(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits `[B, V]` of the last position, in float32, from whatever the model returns for ids `[B, T]`."""
    try:
        logits = unpack(model(ids)).logits
    except (TypeError, UnknownOutput):  # a forward that must have targets
        logits = call(model, ids, ids).logits
    if logits.dim() == 3:
        return logits[:, -1].float()
    return logits.reshape(ids.size(0), -1, logits.size(-1))[:, -1].float()


def choose(logits: Tensor, setting: Setting, generator: torch.Generator | None = None) -> Tensor:
    """Ids `[B]` chosen from logits `[B, V]`: temperature, top-k, top-p, in this order."""
    if setting.temperature == 0:
        return logits.argmax(dim=-1)
    probabilities = distribution(logits, setting)
    # A model without finite logits has been told of before; sampling from them would end the run.
    probabilities = probabilities.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp_min(0.0).cpu()
    empty = probabilities.sum(dim=-1, keepdim=True) <= 0
    return torch.multinomial(probabilities + empty, 1, generator=generator)[:, 0].to(logits.device)


def distribution(logits: Tensor, setting: Setting) -> Tensor:
    """Probabilities `[B, V]` under a setting whose temperature is above 0."""
    logits = logits / setting.temperature
    if setting.top_k is not None and setting.top_k < logits.size(-1):
        kept = logits.topk(setting.top_k, dim=-1).indices
        logits = torch.full_like(logits, -torch.inf).scatter(-1, kept, logits.gather(-1, kept))
    probabilities = logits.softmax(dim=-1)
    if setting.top_p is not None:
        ordered, ids = probabilities.sort(dim=-1, descending=True)
        before = ordered.cumsum(dim=-1) - ordered
        probabilities = probabilities.scatter(-1, ids, ordered.masked_fill(before >= setting.top_p, 0.0))
    return probabilities / probabilities.sum(dim=-1, keepdim=True)
