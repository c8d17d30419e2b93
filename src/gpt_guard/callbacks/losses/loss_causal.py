"""Whether a model is causal, asked of the model itself: only where a shift of the targets is in doubt."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpt_guard.callbacks.data.inputs import InputNames
from gpt_guard.hooks.isolation.compare import difference, rounding
from gpt_guard.hooks.tensors import walk
from gpt_guard.hooks.watch import Watch


def is_causal(watch: Watch, ids: Tensor) -> bool | None:
    """True if no earlier score changes with later tokens, False if one does, None if the model cannot be asked.

    Runs the model twice on the inputs of its last call, in eval mode and without gradient, the second time with other
    tokens in the second half of the rows; everything is put back. Reads the device.
    """
    inputs = watch.tap.inputs
    if inputs is None or ids.size(1) < 4:
        return None
    try:
        with watch.inspection.probing("causality of the targets"), torch.no_grad():
            # Not `.eval()`, which would be noted as the user's.
            for module in watch.model.modules():
                module.training = False
            return _ask(watch.model, inputs, ids)
    except Exception:  # a model that refuses other ids, or a second call; then nothing is known
        return None


def _ask(model: Any, inputs: tuple[tuple[Any, ...], dict[str, Any]], ids: Tensor) -> bool | None:
    # Labels may hold the very same ids.
    data = InputNames(model).split(*inputs).data
    given = next((tensor for tensor in data.values() if _same(tensor, ids)), None)
    if given is None:
        return None
    turned = given.shape != ids.shape or not torch.equal(given.cpu(), ids)
    half = ids.size(1) // 2
    changed = ids.clone()
    # The same ids in another order are certainly in the vocabulary.
    changed[:, half:] = changed.roll(1, 0)[:, half:] if ids.size(0) > 1 else changed[:, half:].flip(1)
    if torch.equal(changed, ids):
        return None
    other = (changed.t() if turned else changed).to(given.device, given.dtype)
    before, after = _scores(model, inputs, ids), _scores(model, _with(inputs, given, other), ids)
    if before is None or after is None or before.shape != after.shape:
        return None
    if _time_first(before, ids):
        before, after = before.transpose(0, 1), after.transpose(0, 1)
    apart = difference(before, after) > rounding(before)
    # Where not even the scores of the changed tokens change, the ids have not reached the model.
    return not bool(apart[:, :half].any()) if bool(apart[:, half:].any()) else None


def _same(tensor: Tensor, ids: Tensor) -> bool:
    if tensor.is_floating_point() or tensor.dim() != 2:
        return False
    values = tensor.cpu()
    return any(each.shape == ids.shape and bool((each == ids).all()) for each in (values, values.t()))


def _with(inputs: Any, old: Tensor, new: Tensor) -> Any:
    args, kwargs = inputs
    return (
        tuple(new if each is old else each for each in args),
        {name: new if each is old else each for name, each in kwargs.items()},
    )


def _time_first(scores: Tensor, ids: Tensor) -> bool:
    return tuple(scores.shape[:2]) != tuple(ids.shape)


def _scores(model: Any, inputs: tuple[tuple[Any, ...], dict[str, Any]], ids: Tensor) -> Tensor | None:
    """The first tensor of an output that has a score for each position."""
    output = model(*inputs[0], **inputs[1])
    sizes = (tuple(ids.shape), tuple(ids.shape)[::-1])
    tensors = [tensor for _, tensor in walk(output) if tensor.is_floating_point()]
    shaped = next((each for each in tensors if each.dim() >= 3 and tuple(each.shape[:2]) in sizes), None)
    if shaped is not None:
        return shaped
    flat = next((each for each in tensors if each.dim() == 2 and each.size(0) == ids.numel()), None)
    return None if flat is None else flat.view(*ids.shape, flat.size(1))
