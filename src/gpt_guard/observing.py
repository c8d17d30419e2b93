"""Turn what the host has read into observations."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gpt_guard.hooks.gradients import total_norm
from gpt_guard.hooks.tensors import walk
from gpt_guard.ledger import Ledger, Readings
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


def observe(
    readings: Readings, after: list[str], applied: list[str] | None, names: set[str] | None, **facts: Any
) -> Observation:
    """The observation of a step from its readings.

    `after` and `applied` name the parameters whose norms stand in `grad_norms` (taken after backward) and
    `grad_norms.applied` (just before the step; None if nothing has touched the gradients since). `names` restricts
    both to the parameters this optimizer steps. `clip` among the readings is the factor that the gradients were
    multiplied by in between, where that is known without norms. `facts` are the fields known without the device.
    """
    norms = _named(after, readings.pop("grad_norms", []), names)
    grad_norm = total_norm(norms.values()) if norms else None
    clipped_norm = grad_norm
    if "clip" in readings and grad_norm is not None:
        clipped_norm = grad_norm * readings.pop("clip")
    if applied is not None:
        values = readings.pop("grad_norms.applied", [])
        # Only their total is wanted, unless there are no others.
        if grad_norm is None or names is not None:
            now = _named(applied, values, names)
            values = now.values()
        clipped_norm = total_norm(values) if values else None
        if grad_norm is None:
            norms, grad_norm = now, clipped_norm
    losses: list[float] = []
    lr: list[float] = []
    for name in [*readings]:
        if name.startswith("loss."):
            losses.append(readings.pop(name))
        elif name.startswith("lr."):
            lr.append(readings.pop(name))
    fields = _BLANK.__dict__ | facts
    fields["loss"] = float(sum(losses)) if losses else None
    fields["lr"] = tuple(lr)
    fields["grad_norm"] = grad_norm
    fields["grad_norm_clipped"] = clipped_norm
    fields["clipped"] = _clipped(grad_norm, clipped_norm)
    fields["grad_norms"] = norms
    fields["readings"] = readings
    fields["metrics"] = {}
    return _made_of(fields)


_BLANK = Observation(step=0, moment=Moment.BEFORE_STEP)
_ALL_FIELDS = set(Observation.model_fields)


def _made_of(fields: dict[str, Any]) -> Observation:
    """What `model_copy(update=...)` makes, in a third of its time: it runs twice a step, and checks nothing either."""
    made = Observation.__new__(Observation)
    fill = object.__setattr__
    fill(made, "__dict__", fields)
    fill(made, "__pydantic_fields_set__", _ALL_FIELDS)
    fill(made, "__pydantic_extra__", None)
    fill(made, "__pydantic_private__", None)
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
    if "later" in late:
        late |= late.pop("later")()
    fields = seen.__dict__.copy()
    fields["moment"] = Moment.AFTER_STEP
    fields["update_ratio"] = late.pop("update_ratio", None)
    fields["max_update"] = late.pop("max_update", None)
    fields["step_time"] = step_time
    fields["readings"] = late
    return _made_of(fields)
