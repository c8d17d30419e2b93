"""Models in one form: dtypes and devices of a model that was built afresh, logits of one that may need targets."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpt_guard.checks.runner.forward import call, takes_targets


def in_form_of(fresh: nn.Module, model: nn.Module) -> nn.Module:
    """Cast and move parameters and buffers of `fresh`, each to what the one of the same name is in `model`.

    In place; a tensor whose name the other model does not have follows its first parameter.
    """
    like: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    first = next((p for p in model.parameters() if p.is_floating_point()), None)
    with torch.no_grad():
        for name, tensor in (*fresh.named_parameters(), *fresh.named_buffers()):
            other = like.get(name, first)
            if other is None or tensor.is_meta or other.is_meta:
                continue
            dtype = other.dtype if tensor.is_floating_point() and other.is_floating_point() else tensor.dtype
            tensor.data = tensor.data.to(device=other.device, dtype=dtype)
    return fresh


def logits_of(model: nn.Module, x: Tensor) -> Tensor:
    """The logits `[B, T, V]` on ids `[B, T]`; a model that takes targets gets the ids for them, since some need any."""
    return call(model, x, x if takes_targets(model) else None).logits.detach()


def plain_device(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, without its graph; tensors of two devices can then be compared."""
    return tensor.detach().cpu()
