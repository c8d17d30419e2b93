"""Whether float16 can have a part in what went bad, or whether nothing of it is in play."""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor

from gpt_guard.hooks.autograd_graph.reach import nodes
from gpt_guard.hooks.watch import Watch

_MOST_NODES = 5000


def no_half(watch: Watch, tensor: Tensor | None) -> bool:
    """True if neither the model, the operations behind `tensor`, autocast as it is now nor a scaler speak of float16.

    Where readings come late and there is no graph to ask, an autocast that was on cannot be excluded: False.
    """
    if tensor is None or watch.scaling or not (watch.immediate or tensor.grad_fn):
        return False
    kind = tensor.device.type
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.float16:
        return False
    held = (tensor, *watch.model.parameters(), *watch.model.buffers())
    made = (each for node in islice(nodes(tensor), _MOST_NODES) for each in getattr(node, "_input_metadata", ()))
    return not any(each.dtype is torch.float16 for each in (*held, *made))
