"""An optimizer whose own state is inf or NaN: what it holds of the past makes every later update zero."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from gpt_guard.callbacks.updates.sampling import SampledParameters, StepFigures, local
from gpt_guard.catalogue import finding
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Observation
from gpt_guard.records.render import number

_MOST_LOOKS = 16
# A step that weight decay alone explains is as long as lr * weight_decay times the weights, to rounding.
_DECAY_ALONE = 1.01


class OptimizerStates:
    """Looks at an optimizer's state before the step that follows a suspicion, and reads the device only then.

    Suspicious is a gradient norm so large that the square of an element may leave the range of its dtype, if it is at
    least twice as large as at the last look; and the first of some steps that move nothing, or by no more than weight
    decay does, although there are gradients. A parameter that is not finite itself belongs to FiniteGuard. `reported`
    holds what was told already, and is added to.
    """

    def __init__(self, reported: set[str]) -> None:
        self._reported = reported
        self._suspected: dict[int, Observation] = {}
        self._largest: dict[int, float] = {}
        self._stopped: set[int] = set()
        self._looks = 0

    def judge(self, watch: Watch, seen: Observation, sampled: SampledParameters, figures: StepFigures) -> None:
        """Take in one step; floats only."""
        index, norm = seen.optimizer, seen.grad_norm
        if not norm or not max(seen.lr, default=0.0) > 0.0:
            return
        large = norm >= sampled.square_limit and norm >= 2.0 * self._largest.get(index, 0.0)
        if large:
            self._largest[index] = norm
        groups = zip(seen.lr, watch.optimizers[index].param_groups, strict=False)
        decay = max([lr * float(group.get("weight_decay") or 0.0) for lr, group in groups], default=0.0)
        stopped = figures.largest == 0.0 or figures.ratio <= _DECAY_ALONE * decay
        if large or (stopped and index not in self._stopped):
            self._suspected.setdefault(index, seen)
        (self._stopped.add if stopped else self._stopped.discard)(index)

    def look(self, watch: Watch, optimizer: Optimizer) -> Iterator[Finding]:
        """GG315, where the optimizer is suspected; one read of the device."""
        seen = self._suspected.pop(watch.index_of(optimizer), None) if self._suspected else None
        if seen is None or "GG315" in self._reported or self._looks >= _MOST_LOOKS:
            return
        self._looks += 1
        bad = _not_finite(watch, optimizer)
        if not bad:
            return
        self._reported.add("GG315")
        (name, key), values = next(iter(bad.items()))
        count = int((~torch.isfinite(values)).sum())
        path, kind = watch.owner_of(name)
        parameters = list(dict.fromkeys(name for name, _ in bad))
        more = f", and that of {len(parameters) - 1} more parameters" if len(parameters) > 1 else ""
        large = seen.step if (seen.grad_norm or 0.0) >= self._largest.get(seen.optimizer, math.inf) else None
        yield finding(
            "GG315",
            f"The state of {type(optimizer).__name__} is not finite any more: {count:,} of {values.numel():,} elements "
            f"of `{key}` of `{name}` are inf or NaN{more}, while the parameters themselves are finite."
            + (f" The gradient norm was {number(seen.grad_norm)} in step {large}." if large is not None else ""),
            likely=["spike"] if large is not None else [],
            step=watch.step,
            moment=Moment.BEFORE_STEP,
            module=path,
            module_class=kind,
            parameter=name,
            cause_id=f"optimizer {seen.optimizer}",
            evidence={
                "key": key,
                "elements": count,
                "parameters": parameters[:50],
                "count": len(parameters),
                "grad_norm": seen.grad_norm,
                "update_ratio": seen.update_ratio,
            },
        )

    def close(self) -> None:
        """Forget what is suspected."""
        self._suspected.clear()


def _not_finite(watch: Watch, optimizer: Optimizer) -> dict[tuple[str, str], Tensor]:
    """What the optimizer keeps of its parameters and is inf or NaN, by parameter and key, beside finite values."""
    kept: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = watch.name_of(parameter) or "a tensor added later"
            for key, value in optimizer.state.get(parameter, {}).items():
                # Scalars are counts and best values, which may start at infinity.
                values = local(value) if isinstance(value, Tensor) and value.dim() else None
                own = local(parameter)
                if values is not None and own is not None:
                    kept[name, str(key)] = values, own
    if not kept:
        return {}
    pairs = list(kept.values())
    worst = [values.abs().max() for values, _ in pairs]
    flags = torch.stack([flag.to(worst[0].device, torch.float32) for flag in worst]).tolist()
    suspects = [key for key, flag in zip(kept, flags, strict=True) if not math.isfinite(flag)]
    return {key: kept[key][0] for key in suspects if bool(torch.isfinite(kept[key][1]).all())}
