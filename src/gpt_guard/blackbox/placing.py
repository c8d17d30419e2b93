"""Put the tensors of a bundle where they belong: beside the model, or where they lay when it was written."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gpt_guard.blackbox.plain import joined


class Placing:
    """Where each tensor of a bundle goes; all of them have been read to the CPU.

    `devices` says by path where a tensor lay that was not on the CPU, `recorded` where the model was. What lay on the
    model's device goes to the model's device of today; another one is used where this machine has it.
    """

    def __init__(self, model: nn.Module, recorded: str, devices: Mapping[str, str]) -> None:
        self._here = device_of(model)
        self._recorded = recorded
        self._devices = devices

    def put(self, value: Any, path: str) -> Any:
        """The same nested value with its tensors in place; nothing is copied where all is on the CPU."""
        if isinstance(value, Tensor):
            return self._put_tensor(value, path)
        if isinstance(value, Mapping):
            items = {key: self.put(item, joined(path, key)) for key, item in value.items()}
            return OrderedDict(items) if isinstance(value, OrderedDict) else items
        if isinstance(value, (list, tuple, set)):
            return type(value)(self.put(item, joined(path, place)) for place, item in enumerate(value))
        return value

    def _put_tensor(self, tensor: Tensor, path: str) -> Tensor:
        device = self._device(self._devices.get(path, "cpu"))
        if device.type == "cpu":
            return tensor
        with torch.no_grad():
            return tensor.to(device).requires_grad_(tensor.requires_grad)

    def _device(self, name: str) -> torch.device:
        if self._here is None:
            return torch.device(name) if usable(name) else torch.device("cpu")
        return torch.device(name) if name != self._recorded and usable(name) else self._here


def device_of(model: nn.Module) -> torch.device | None:
    """The one device that all parameters and buffers are on; the CPU where there is none, None for several."""
    found = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    return found.pop() if len(found) == 1 else None if found else torch.device("cpu")


def usable(name: str) -> bool:
    """Whether this machine has a device of this name, such as "cuda:1"."""
    try:
        device = torch.device(name)
        if device.type == "cpu":
            return True
        module = torch.get_device_module(device)
        return bool(module.is_available()) and (device.index or 0) < int(module.device_count())
    except (RuntimeError, AttributeError, ValueError):
        return False
