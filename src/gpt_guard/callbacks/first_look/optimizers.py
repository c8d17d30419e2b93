"""Settings of an optimizer that a careful reader would query, with the reason for each; reads no tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gpt_guard.callbacks.first_look.oddity import Oddity
from gpt_guard.records import Severity
from gpt_guard.records.render import number

_ADAMS = frozenset({"Adam", "AdamW", "NAdam", "RAdam", "AdamW8bit", "Adam8bit"})
# Grokking (A. Power et al. 2022) is shown with AdamW's weight decay of 1.
_DECAY_DECOUPLED = 10.0
# Through Adam's normalised gradient a decay of 1 outweighs any gradient below the size of the weights.
_DECAY_COUPLED = 1.0
# From here on GG312 tells it, with the rate of the step.
_DECAY_TOLD = 0.1
# TensorFlow's documentation of Adam recommends 1.0 or 0.1 for Inception.
_EPS = 1.0
# Adam moves each element by about lr: ten times what float32 resolves in weights of 0.02 is 2e-8.
_RATE_LOW = 1e-8
_RATE_HIGH = 1.0


def is_adam(optimizer: Optimizer) -> bool:
    """Whether it is Adam or one of its kin, whose elements move by about lr whatever the gradient."""
    return not _ADAMS.isdisjoint(kind.__name__ for kind in type(optimizer).__mro__)


def odd_settings(optimizer: Optimizer, index: int) -> Iterator[Oddity]:
    """GG330 for each setting of each parameter group; a setting that several groups share is told once."""
    told: set[str] = set()
    for place, group in enumerate(optimizer.param_groups):
        for key, text, severity in _of_group(optimizer, group):
            # The same value in the next group is the same argument of one constructor.
            if text not in told:
                told.add(text)
                yield setting(optimizer, index, place, key, text, severity)


def setting(optimizer: Optimizer, index: int, group: int, key: str, text: str, severity: Severity) -> Oddity:
    """GG330 for one setting of a group."""
    of = f", parameter group {group}" if len(optimizer.param_groups) > 1 else ""
    return Oddity(
        "GG330",
        key,
        f"{type(optimizer).__name__}{of}: {text}.",
        severity,
        f"optimizer {index} group {group}",
        evidence={"optimizer": index, "group": group},
    )


def _of_group(optimizer: Optimizer, group: Mapping[str, Any]) -> Iterator[tuple[str, str, Severity]]:
    if not group["params"]:
        # As a trainer leaves it that sorts by weight decay, where nothing is to be decayed.
        return
    kinds = {kind.__name__ for kind in type(optimizer).__mro__}
    value = _numbers(group)
    if is_adam(optimizer):
        yield from _betas(group)
    if is_adam(optimizer) or "RMSprop" in kinds:
        yield from _epsilon(group, value("eps"))
    if "SGD" in kinds or "RMSprop" in kinds:
        yield from _momentum(value("momentum"), value("dampening"))
    if "RMSprop" in kinds:
        yield from _alpha(value("alpha"))
    yield from _decay(optimizer, kinds, group, value("lr"), value("weight_decay"))


def _numbers(group: Mapping[str, Any]) -> Callable[[str], float | None]:
    """Plain numbers of a group; a setting that is a tensor would have to be read from its device."""

    def value(name: str) -> float | None:
        found = group.get(name)
        return float(found) if isinstance(found, (int, float)) else None

    return value


def _betas(group: Mapping[str, Any]) -> Iterator[tuple[str, str, Severity]]:
    betas = group.get("betas")
    if (
        not isinstance(betas, (tuple, list))
        or len(betas) != 2
        or not all(isinstance(each, (int, float)) for each in betas)
    ):
        return
    first, second = betas
    # Adam needs beta1 below sqrt(beta2) to converge (Y. Zhang et al., "Adam can converge without any modification on
    # update rules", 2022).
    if first > math.sqrt(second):
        yield "betas", f"betas are ({first:g}, {second:g}); beta1 is above the square root of beta2", Severity.WARNING


def _epsilon(group: Mapping[str, Any], eps: float | None) -> Iterator[tuple[str, str, Severity]]:
    if eps is None:
        return
    if eps > _EPS:
        yield "eps_large", f"eps is {number(eps)}, which most gradients do not come near", Severity.WARNING
    elif eps == 0:
        yield "eps_zero", "eps is 0: an element without a gradient is updated by 0 / 0", Severity.WARNING
    else:
        dtypes = {each.dtype for each in group["params"] if isinstance(each, Tensor) and each.is_floating_point()}
        rounded = [dtype for dtype in dtypes if float(torch.tensor(eps, dtype=dtype)) == 0]
        # Fused kernels compute in float32.
        if rounded and not group.get("fused"):
            name = str(rounded[0]).removeprefix("torch.")
            yield "eps_zero", f"eps is {number(eps)}, which is 0 in the {name} of its parameters", Severity.WARNING


def _momentum(momentum: float | None, dampening: float | None) -> Iterator[tuple[str, str, Severity]]:
    if momentum is not None and momentum >= 1:
        yield "momentum", f"momentum is {momentum:g}: what was added once never fades", Severity.WARNING
    elif momentum and dampening is not None and dampening >= 1:
        text = f"dampening is {dampening:g}: after the first step no gradient enters the momentum with its own sign"
        yield (
            "dampening",
            text if dampening > 1 else "dampening is 1: no gradient after the first enters",
            Severity.WARNING,
        )


def _alpha(alpha: float | None) -> Iterator[tuple[str, str, Severity]]:
    if alpha is not None and alpha >= 1:
        yield (
            "alpha",
            f"alpha is {alpha:g}: the average of squares stays at 0, and updates are divided by eps",
            Severity.WARNING,
        )
    elif alpha is not None and alpha < 0.5:
        yield "alpha", f"alpha is {alpha:g}: the average of squares forgets more than half in each step", Severity.INFO


def _decay(
    optimizer: Optimizer, kinds: set[str], group: Mapping[str, Any], lr: float | None, decay: float | None
) -> Iterator[tuple[str, str, Severity]]:
    decoupled = bool(group.get("decoupled_weight_decay")) or any(name.startswith("AdamW") for name in kinds)
    multiplies = decoupled or "SGD" in kinds
    if not decay or lr is None or (multiplies and lr * decay >= _DECAY_TOLD):
        return
    text = f"weight_decay is {number(decay)}"
    if is_adam(optimizer) and not decoupled:
        if decay >= _DECAY_COUPLED:
            yield "decay", f"{text}, added to a gradient that Adam then normalises", Severity.WARNING
        elif decay >= 0.1:
            yield "decay_coupled", f"{text}, added to a gradient that Adam then normalises", Severity.INFO
    elif (decoupled and decay >= _DECAY_DECOUPLED) or ("SGD" in kinds and decay >= 1):
        yield "decay", f"{text} at lr {number(lr)}", Severity.WARNING


def odd_rates(optimizer: Optimizer, index: int, rates: list[list[float]]) -> Iterator[Oddity]:
    """GG330 for a learning rate that Adam cannot train with, by the rates of the inspected steps.

    A tiny one counts only where neither a scheduler nor the loop moves it.
    """
    if not is_adam(optimizer) or not rates:
        return
    for place, (group, lr) in enumerate(zip(optimizer.param_groups, rates[-1], strict=False)):
        if lr >= _RATE_HIGH:
            text = f"lr is {number(lr)}: Adam moves each element by about that, whatever the gradient"
            yield setting(optimizer, index, place, "lr_high", text, Severity.WARNING)
        still = len(rates) > 1 and all(len(each) > place and each[place] == lr for each in rates)
        if still and 0 < lr <= _RATE_LOW and "initial_lr" not in group:
            text = f"lr is {number(lr)} in each of the first {len(rates)} steps, and nothing moves it"
            yield setting(optimizer, index, place, "lr_low", text, Severity.WARNING)
