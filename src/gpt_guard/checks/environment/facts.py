"""Where a model runs: versions, platform, device and dtype, as a report and the head of a run log carry them."""

from __future__ import annotations

import platform

import torch
from torch import nn


def surroundings(model: nn.Module | None) -> dict[str, str]:
    """Versions and platform, and the model's devices and dtypes; reads nothing from the device."""
    facts = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "platform": platform.platform(),
        "threads": str(torch.get_num_threads()),
    }
    if model is not None:
        tensors = [*model.parameters(), *model.buffers()]
        facts["device"] = ", ".join(sorted({str(device) for device in {tensor.device for tensor in tensors}})) or "none"
        facts["dtype"] = (
            ", ".join(sorted({str(dtype).removeprefix("torch.") for dtype in {tensor.dtype for tensor in tensors}}))
            or "none"
        )
    return facts
