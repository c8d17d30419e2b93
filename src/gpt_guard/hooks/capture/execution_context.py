"""What a forward depends on beside its inputs and weights: random generators, modes, autocast, grad mode, saving."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

SavedHooks = tuple[Callable[..., Any], Callable[..., Any]]
"""What packs and unpacks the tensors that autograd saves for a backward: checkpointing and offloading work by them."""

# Older versions of torch cannot be asked for the newest pair.
_TOP: Callable[[bool], SavedHooks | None] | None = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
_GRAD, _INFERENCE = torch.is_grad_enabled, torch.is_inference_mode_enabled
_AUTOCAST, _AUTOCAST_DTYPE = torch.is_autocast_enabled, torch.get_autocast_dtype
_NEW = tuple.__new__


def _unknown() -> None:
    return None


# Without a function of ours in between: it is asked in every forward.
newest_saved_hooks: Callable[[], SavedHooks | None] = _unknown if _TOP is None else partial(_TOP, False)
"""Gives the hooks that act now, or None: of several on top of each other only the newest do. 100 ns."""


class ExecutionContext(NamedTuple):
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
    saved: SavedHooks | None = None


class ContextReader:
    """Takes the context of a forward of one model; no device is read.

    The modules are those that the model had when this was made.
    """

    __slots__ = ("_modules", "_random", "_types")

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        tensors = (*model.parameters(), *model.buffers())
        devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
        self._random = [("cpu", torch.default_generator.get_state), *_generators(devices)]
        self._types = ("cpu", *sorted({device.type for device in devices}))

    def take(self) -> ExecutionContext:
        """The context as it is now."""
        training = tuple([module.training for module in self._modules])
        autocast = {kind: (_AUTOCAST(kind), _AUTOCAST_DTYPE(kind)) for kind in self._types}
        # A named tuple's own constructor is a function in Python, which calls this.
        return _NEW(ExecutionContext, (self._states(), training, autocast, _GRAD(), _INFERENCE(), newest_saved_hooks()))

    def _states(self) -> dict[str, Tensor]:
        try:
            return {name: state() for name, state in self._random}
        except RuntimeError:
            # A CUDA graph is being recorded: its generator cannot be read.
            return {}


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


@contextmanager
def put_into(model: nn.Module, context: ExecutionContext) -> Iterator[None]:
    """Inside, everything is as it was for a captured forward; afterwards as it was before, on every way out.

    Generators included. Autocast's cache of cast weights is neither read nor written inside: a weight that overflows
    in the cast must be seen to do so again, and a cache that the loop is still using must not change. Saved-tensor
    hooks are left alone, see `saved_hooks_only`.
    """
    before = ContextReader(model).take()
    caching = torch.is_autocast_cache_enabled()
    try:
        torch.set_autocast_cache_enabled(False)
        _set(model, context)
        with torch.inference_mode(context.inference), torch.set_grad_enabled(context.grad):
            yield
    finally:
        _set(model, before)
        torch.set_autocast_cache_enabled(caching)


def _set(model: nn.Module, context: ExecutionContext) -> None:
    for module, training in _modes(model, context.training):
        # Not `train()`: a model may do more there, and a listener would note it.
        module.training = training
    for kind, (enabled, dtype) in context.autocast.items():
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    for name, state in context.random.items():
        device = torch.device(name)
        if device.type == "cpu":
            torch.set_rng_state(state)
        elif device.type == "mps":
            torch.mps.set_rng_state(state)
        elif (namespace := getattr(torch, device.type, None)) is not None and namespace.is_available():
            namespace.set_rng_state(state, device)


def _modes(model: nn.Module, training: Sequence[bool]) -> list[tuple[nn.Module, bool]]:
    """Each module with the mode it had; empty if the model has other modules by now."""
    modules = list(model.modules())
    return list(zip(modules, training, strict=True)) if len(modules) == len(training) else []


@contextmanager
def saved_hooks_only(pair: SavedHooks | None) -> Iterator[None]:
    """Inside, no saved-tensor hooks act but this pair; afterwards all that did before, on every way out."""
    own = torch._C._autograd
    if _TOP is None:
        with saved_tensors_hooks(_same, _same):
            yield
        return
    others: list[SavedHooks] = []
    while (newest := newest_saved_hooks()) is not None:
        others.append(newest)
        own._pop_saved_tensors_default_hooks()
    try:
        if pair is None:
            yield
        else:
            with saved_tensors_hooks(*pair):
                yield
    finally:
        for pack, unpack in reversed(others):
            own._push_saved_tensors_default_hooks(pack, unpack)


def _same(value: Any) -> Any:
    return value
