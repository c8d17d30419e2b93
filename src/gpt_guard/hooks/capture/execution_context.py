"""What a forward depends on beside its inputs and weights: random generators, modes, autocast, grad mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gpt_guard.hooks.capture.saved import Pair, newest_pair
from gpt_guard.hooks.modes import ModeLog
from gpt_guard.hooks.pace import Pace

# One question for all types of device. A torch that does not know it is asked for each type every time.
_ANY_AUTOCAST: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
_GRAD, _INFERENCE = torch.is_grad_enabled, torch.is_inference_mode_enabled
_CPU_STATE = torch.default_generator.get_state
_NEW = tuple.__new__


class Ambient(NamedTuple):
    """The surroundings of one forward, as plain values and CPU tensors.

    `random` holds generator states by device ("cpu", "cuda:0"), `training` the mode of each module in the order of
    `model.modules()`, `autocast` whether it is enabled and its dtype by device type. `saved` are the saved-tensor hooks
    that were on, pack and unpack; never in a file.
    """

    random: dict[str, Tensor]
    training: tuple[bool, ...]
    autocast: dict[str, tuple[bool, torch.dtype]]
    grad: bool
    inference: bool
    saved: Pair | None = None


class Surroundings:
    """Takes the surroundings of a forward of one model; no device is read.

    The modules are those that the model had when this was made. With a `log` of mode changes and a `pace`, a light
    step takes over the modes unless `.train()` or `.eval()` was called since they were read, and autocast's types while
    none is on. A full step reads both; once modes have been found changed without a call, every step does.
    """

    __slots__ = ("_assumed", "_changes", "_log", "_modules", "_off", "_pace", "_random", "_training", "_types")

    def __init__(self, model: nn.Module, log: ModeLog | None = None, pace: Pace | None = None) -> None:
        self._modules = list(model.modules())
        self._log = log
        self._pace = pace
        self._changes = -1
        self._assumed = False
        self._training: tuple[bool, ...] = ()
        self._off: dict[str, tuple[bool, torch.dtype]] = {}
        tensors = (*model.parameters(), *model.buffers())
        devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
        self._random = [("cpu", _CPU_STATE), *_generators(devices)]
        self._types = ("cpu", *sorted({device.type for device in devices}))

    def take(self, *, fresh: bool = False) -> Ambient:
        """The surroundings as they are now; with `fresh`, as in an evaluation, nothing is taken over, nor next time."""
        # The CPU's comes first, and most often alone.
        random = {"cpu": _CPU_STATE()} if len(self._random) == 1 else self._states()
        log, pace = self._log, self._pace
        if fresh or log is None or pace is None or pace.full or log.changes != self._changes:
            self._read(fresh=fresh)
        else:
            self._assumed = True
        if _ANY_AUTOCAST():
            autocast = self._autocast()
        else:
            autocast = self._off = self._off or self._autocast()
        # A named tuple's own constructor is a function in Python, which calls this.
        return _NEW(Ambient, (random, self._training, autocast, _GRAD(), _INFERENCE(), newest_pair()))

    def _states(self) -> dict[str, Tensor]:
        try:
            return {name: state() for name, state in self._random}
        except RuntimeError:
            # A CUDA graph is being recorded: its generator cannot be read.
            return {}

    def _read(self, *, fresh: bool) -> None:
        training, log = _modes(self._modules), self._log
        if training != self._training:
            if log is not None and log.changes == self._changes:
                # Somebody sets `training` itself: from now on it is read every time.
                log = self._log = None
            self._training = training
        self._changes = -1 if fresh or log is None else log.changes
        self._assumed = False
        self._off = {}

    def _autocast(self) -> dict[str, tuple[bool, torch.dtype]]:
        return {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in self._types}

    def revised(self, ambient: Ambient) -> Ambient:
        """With the modes of now, if those that the newest forward took over were changed without a call."""
        if self._assumed and ambient.training is self._training and self._log is not None:
            training = _modes(self._modules)
            if training != self._training and self._log.changes == self._changes:
                return ambient._replace(training=training)
        return ambient


def _modes(modules: list[nn.Module]) -> tuple[bool, ...]:
    return tuple([module.training for module in modules])


def _generators(devices: Iterable[torch.device]) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    for device in sorted(devices, key=str):
        module = torch.get_device_module(device)
        if device.type == "mps":
            yield str(device), module.get_rng_state
        elif hasattr(module, "default_generators"):
            # The generator's own method: `get_rng_state` looks up the device at each call.
            yield str(device), module.default_generators[device.index or 0].get_state
        elif hasattr(module, "get_rng_state"):
            yield str(device), partial(module.get_rng_state, device)


def modules_of(model: nn.Module, training: Sequence[bool]) -> list[tuple[nn.Module, bool]]:
    """Each module with the mode it had; empty if the model has other modules by now."""
    modules = list(model.modules())
    return list(zip(modules, training, strict=True)) if len(modules) == len(training) else []


@contextmanager
def surrounded_by(model: nn.Module, ambient: Ambient) -> Iterator[None]:
    """Inside, everything is as it was for a captured forward; afterwards as it was before, on every way out.

    Generators included. Autocast's cache of cast weights is neither read nor written inside: a weight that overflows
    in the cast must be seen to do so again, and a cache that the loop is still using must not change.
    """
    before = Surroundings(model).take()
    caching = torch.is_autocast_cache_enabled()
    try:
        torch.set_autocast_cache_enabled(False)
        _set(model, ambient)
        with torch.inference_mode(ambient.inference), torch.set_grad_enabled(ambient.grad):
            yield
    finally:
        _set(model, before)
        torch.set_autocast_cache_enabled(caching)


def _set(model: nn.Module, ambient: Ambient) -> None:
    for module, training in modules_of(model, ambient.training):
        # Not `train()`: a model may do more there, and a listener would note it.
        module.training = training
    for kind, (enabled, dtype) in ambient.autocast.items():
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    for name, state in ambient.random.items():
        device = torch.device(name)
        if device.type == "cpu":
            torch.set_rng_state(state)
        elif device.type == "mps":
            torch.mps.set_rng_state(state)
        elif (namespace := getattr(torch, device.type, None)) is not None and namespace.is_available():
            namespace.set_rng_state(state, device)
