"""Turn what the host has read into observations."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor
from torch.optim import Optimizer

from gpt_guard.hooks.gradients import total_norm
from gpt_guard.hooks.ledger import Ledger, Readings
from gpt_guard.hooks.tensors import walk
from gpt_guard.records import Moment, Observation

# Norms taken twice of the same gradients differ by rounding only; clipping that matters changes them by more.
_CLIP_TOLERANCE = 1e-4


def put_lr(ledger: Ledger, optimizer: Optimizer) -> None:
    """Put the learning rate of each group into the ledger; a tensor lr stays on its device until the read."""
    for place, group in enumerate(optimizer.param_groups):
        lr = group["lr"] if "lr" in group else float("nan")
        ledger.put(f"lr.{place}", lr if isinstance(lr, Tensor) else float(lr))


def amount(inputs: Any) -> tuple[int, int]:
    """Samples and tokens in what a model was called with: the first tensor's rows, and its elements if they are ids.

    Ids are integers of shape `[B, T]`; images and other data have no tokens.
    """
    # The usual call, model(x, ...), without the general walk.
    first = inputs[0][0] if type(inputs) is tuple and inputs and type(inputs[0]) is tuple and inputs[0] else None
    for _, tensor in (("", first),) if type(first) is Tensor and first.dim() else walk(inputs):
        if tensor.dim():
            ids = tensor.dim() == 2 and not (tensor.is_floating_point() or tensor.is_complex())
            return tensor.shape[0], tensor.numel() if ids else 0
    return 0, 0


class BatchForm:
    """What the model's main input is like, so that one like it is counted without a closer look: dims and dtype."""

    def __init__(self) -> None:
        self._dims = -1
        self._dtype: torch.dtype | None = None
        self._ids = False

    def learn(self, inputs: Any) -> tuple[int, int]:
        """Samples and tokens in what the model was called with, and what it is like from now on."""
        first = _main(inputs)
        if type(first) is Tensor and first.dim():
            self._dims, self._dtype = first.dim(), first.dtype
            self._ids = first.dim() == 2 and not (first.is_floating_point() or first.is_complex())
        else:
            self._dims = -1
        return amount(inputs)

    def amount(self, inputs: Any) -> tuple[int, int] | None:
        """The same for one like the last that was learnt; None if it is not, or is a single row."""
        args = inputs[0]
        first = args[0] if args else _main(inputs)
        if type(first) is not Tensor or first.dtype is not self._dtype:
            return None
        shape = first.shape
        if len(shape) != self._dims or shape[0] < 2:
            return None
        return shape[0], shape.numel() if self._ids else 0


def _main(inputs: Any) -> Any:
    """The first argument, or the first of those by name where no other is given."""
    args, kwargs = inputs
    return args[0] if args else next(iter(kwargs.values()), None)


def observe(
    readings: Readings, after: list[str], applied: list[str] | None, names: set[str] | None, **facts: Any
) -> Observation:
    """The observation of a step from its readings.

    `after` and `applied` name the parameters whose norms stand in `grad_norms` (taken after backward) and
    `grad_norms.applied` (just before the step; None if nothing has touched the gradients since). `names` restricts
    both to the parameters this optimizer steps. `clip` among the readings is the factor that the gradients were
    multiplied by in between, where that is known without norms. `facts` are the fields known without the device.
    """
    values = readings.pop("grad_norms", ())
    norms = _named(after, values, names)
    # A list is unpacked in a sixth of the time that the values of a dict take.
    grad_norm = total_norm(values if names is None else norms.values()) if norms else None
    clipped_norm = grad_norm
    if grad_norm is not None and "clip" in readings:
        clipped_norm = grad_norm * readings.pop("clip")
    if applied is not None:
        values = readings.pop("grad_norms.applied", ())
        # Only their total is wanted, unless there are no others.
        if grad_norm is None or names is not None:
            now = _named(applied, values, names)
            values = now.values()
        clipped_norm = total_norm(values) if values else None
        if grad_norm is None:
            norms, grad_norm = now, clipped_norm
    losses: list[float] = []
    lr: list[float] = []
    rest: Readings = {}
    for name, value in readings.items():
        if name.startswith("loss."):
            losses.append(value)
        elif name.startswith("lr."):
            lr.append(value)
        else:
            rest[name] = value
    fields = _BLANK.__dict__ | facts
    fields["loss"] = float(sum(losses)) if losses else None
    fields["lr"] = tuple(lr)
    fields["grad_norm"] = grad_norm
    fields["grad_norm_clipped"] = clipped_norm
    fields["clipped"] = _clipped(grad_norm, clipped_norm)
    fields["grad_norms"] = norms
    fields["readings"] = rest
    fields["metrics"] = {}
    return _made_of(fields)


_BLANK = Observation(step=0, moment=Moment.BEFORE_STEP)
_ALL_FIELDS = set(Observation.model_fields)


# The slots of a pydantic model; to look them up each time takes as long as to fill them.
_new = Observation.__new__
_put_fields = BaseModel.__dict__["__dict__"].__set__
_put_names = BaseModel.__dict__["__pydantic_fields_set__"].__set__
_put_extra = BaseModel.__dict__["__pydantic_extra__"].__set__
_put_private = BaseModel.__dict__["__pydantic_private__"].__set__


def _made_of(fields: dict[str, Any]) -> Observation:
    """What `model_copy(update=...)` makes, in a fifth of its time: it runs twice a step, and checks nothing either."""
    made = _new(Observation)
    _put_fields(made, fields)
    _put_names(made, _ALL_FIELDS)
    _put_extra(made, None)
    _put_private(made, None)
    return made


def _named(names: list[str], norms: list[float], keep: set[str] | None) -> dict[str, float]:
    if keep is None:
        return dict(zip(names, norms, strict=True))
    return {name: norm for name, norm in zip(names, norms, strict=True) if name in keep}


def _clipped(before: float | None, after: float | None) -> bool | None:
    if before is None or after is None:
        return None
    return after < before * (1.0 - _CLIP_TOLERANCE)


def complete(seen: Observation, late: Readings, step_time: float | None) -> Observation:
    """The same observation with what was measured after the step."""
    # Figures that are worked out when somebody wants to know, for several steps at once.
    later = late.pop("later", None)
    if later is not None:
        late |= later()
    fields = seen.__dict__.copy()
    fields["moment"] = Moment.AFTER_STEP
    fields["update_ratio"] = late.pop("update_ratio", None)
    fields["max_update"] = late.pop("max_update", None)
    fields["step_time"] = step_time
    fields["readings"] = late
    return _made_of(fields)
