"""The tensors of a bundle: taken from a model without hooks or collectives, and put back where they belong."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpt_guard.blackbox.stored import dtype_name
from gpt_guard.blackbox.write import joined
from gpt_guard.checkpoint.fingerprint import plain_name, unwrap
from gpt_guard.checkpoint.read import take_apart
from gpt_guard.checkpoint.reporter import Reporter
from gpt_guard.checkpoint.weights import copy_weights, fit_weights
from gpt_guard.errors import CheckpointError, GuardUsageError
from gpt_guard.records.render import some


def weights_of(model: nn.Module) -> dict[str, Any]:
    """Parameters and buffers by name, those that no checkpoint has in `transient`; nothing is copied here.

    Not `state_dict()`: hooks on it may gather shards from all processes, and only this one has stopped.
    """
    bare = unwrap(model)
    saved: dict[str, Tensor] = dict(bare.named_parameters(remove_duplicate=False))
    transient: dict[str, Tensor] = {}
    for name, buffer, persistent in _buffers(bare):
        (saved if persistent else transient)[name if persistent else plain_name(name)] = buffer
    frozen = [plain_name(name) for name, parameter in bare.named_parameters() if not parameter.requires_grad]
    return {"model_state_dict": saved, "transient": transient, "frozen": frozen}


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None:
                own = f"{path}.{name}" if path else name
                yield own, buffer, name not in module._non_persistent_buffers_set


def put_weights(model: nn.Module, path: Path, stored: Mapping[str, Any], *, buffers: bool) -> list[str]:
    """Copy a bundle's weights into the model, in place; returns what the reader should know.

    Every parameter and saved buffer must be there with its shape; buffers that no checkpoint has are copied where they
    fit. `buffers=False` keeps all buffers as the model made them. Frozen parameters are frozen again. Raises
    GuardUsageError, naming what does not fit.
    """
    bare = unwrap(model)
    notes = _cast(bare, stored["model_state_dict"])
    kept = {} if buffers else {name: buffer.detach().clone() for name, buffer, _ in _buffers(bare)}
    voice = Reporter(lambda finding: None)
    try:
        parts = take_apart(path, {"model_state_dict": stored["model_state_dict"]}, voice)
        copy_weights(bare, fit_weights(bare, parts, None, True, voice), parts, True, voice)
    except CheckpointError as error:
        raise GuardUsageError(
            f"the model does not fit the bundle: {error.finding.seen}. Build it as it was when the bundle was written: "
            f"same sizes, same names"
        ) from error
    if buffers:
        notes += _put_transient(bare, stored["transient"])
    with torch.no_grad():
        for name, buffer, _ in _buffers(bare):
            if name in kept:
                buffer.copy_(kept[name])
    frozen = frozenset(stored["frozen"])
    for name, parameter in bare.named_parameters():
        if parameter.is_floating_point() or parameter.is_complex():
            parameter.requires_grad_(plain_name(name) not in frozen)
    return notes


def _put_transient(model: nn.Module, stored: Mapping[str, Tensor]) -> list[str]:
    ours = {plain_name(name): buffer for name, buffer, persistent in _buffers(model) if not persistent}
    fit = {name for name, buffer in stored.items() if name in ours and ours[name].shape == buffer.shape}
    with torch.no_grad():
        for name in fit:
            ours[name].copy_(stored[name])
    other = sorted((stored.keys() | ours.keys()) - fit)
    return [f"buffers that the model makes anew and that differ from the recorded ones: {some(other)}"] if other else []


def _cast(model: nn.Module, stored: Mapping[str, Any]) -> list[str]:
    """A model that was cast as a whole after it was built is cast again; single layers are left as they are built."""
    theirs = _float_dtypes(stored)
    ours = _float_dtypes(dict(model.named_parameters()))
    if theirs == ours or not theirs or not ours:
        return []
    if len(theirs) == len(ours) == 1:
        (dtype,) = theirs
        model.to(dtype)
        return [f"the model was cast to {dtype_name(dtype)}, as recorded"]
    recorded, built = (", ".join(sorted(map(dtype_name, dtypes))) for dtypes in (theirs, ours))
    return [f"parameters were recorded as {recorded}, the model has {built}: it runs in its own"]


def _float_dtypes(tensors: Mapping[str, Any]) -> set[torch.dtype]:
    return {value.dtype for value in tensors.values() if isinstance(value, Tensor) and value.is_floating_point()}


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
