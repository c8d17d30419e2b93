"""Notice what is loaded into a model and its optimizers, by torch's own hooks on `state_dict` and `load_state_dict`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from gpt_guard.hooks.compiled import is_scripted
from gpt_guard.hooks.copies import HookSet, Uncopied

# A model's parts may be loaded one by one; those further in seldom are.
_MOST_PARTS = 50


class RestoreListener(Protocol):
    """Who is told of what is loaded. `given` holds what the caller gave; nothing of it may be kept or changed."""

    def state_asked_for(self) -> None:
        """`state_dict()` of the model is about to be given out."""

    def model_loads(self, path: str, given: Mapping[str, Any]) -> None:
        """`load_state_dict` of the model, or of a part of it directly, begins: nothing has been copied yet."""

    def model_loaded(self, path: str, missing: list[str], unexpected: list[str]) -> None:
        """It has copied what fits; with `strict`, an error may follow."""

    def optimizer_loads(self, optimizer: Optimizer, given: Mapping[str, Any]) -> None:
        """`load_state_dict` of an optimizer begins."""

    def optimizer_loaded(self, optimizer: Optimizer) -> None:
        """It is over."""


class RestoreHooks:
    """The hooks of one listener, on one model with its direct parts and on its optimizers.

    `unhooked` names the optimizers whose class has no such hooks.
    """

    def __init__(self, listener: RestoreListener) -> None:
        self._listener = listener
        self._hooks = HookSet()
        self.unhooked: list[str] = []

    def open(self, model: nn.Module, optimizers: tuple[Optimizer, ...]) -> None:
        """Begin to notice."""
        if not is_scripted(model):
            self._hooks.before_state_dict(model, _SnapshotAsked(model, self._listener))
        for path, module in [("", model), *list(model.named_children())[:_MOST_PARTS]]:
            if is_scripted(module):
                # It takes no hooks.
                continue
            self._hooks.before_load(module, _ModelLoads(module, path, self._listener))
            self._hooks.after_load(module, _ModelLoaded(module, path, self._listener))
        for optimizer in optimizers:
            try:
                self._hooks.before_optimizer_load(optimizer, _OptimizerLoads(self._listener))
                self._hooks.after_optimizer_load(optimizer, _OptimizerLoaded(self._listener))
            except (AttributeError, TypeError):
                self.unhooked.append(type(optimizer).__name__)

    def close(self) -> None:
        """Stop noticing; may run twice."""
        self._hooks.close()


class _OnModule(Uncopied):
    """A hook that answers for one module; where a parent loads, the hooks of its parts are called too."""

    __slots__ = ("_listener", "_module", "_path")

    def __init__(self, module: nn.Module, path: str, listener: RestoreListener) -> None:
        self._module, self._path, self._listener = module, path, listener


class _SnapshotAsked(Uncopied):
    __slots__ = ("_listener", "_module")

    def __init__(self, module: nn.Module, listener: RestoreListener) -> None:
        self._module, self._listener = module, listener

    def __call__(self, module: nn.Module, prefix: str, _keep_vars: Any) -> None:
        if module is self._module and not prefix:
            self._listener.state_asked_for()


class _ModelLoads(_OnModule):
    __slots__ = ()

    def __call__(self, module: nn.Module, given: Any, prefix: str, *_: Any) -> None:
        if module is self._module and not prefix:
            self._listener.model_loads(self._path, given)


class _ModelLoaded(_OnModule):
    __slots__ = ()

    def __call__(self, module: nn.Module, incompatible: Any) -> None:
        if module is self._module:
            self._listener.model_loaded(self._path, list(incompatible.missing_keys), list(incompatible.unexpected_keys))


class _OptimizerLoads(Uncopied):
    __slots__ = ("_listener",)

    def __init__(self, listener: RestoreListener) -> None:
        self._listener = listener

    def __call__(self, optimizer: Optimizer, given: Any) -> None:
        self._listener.optimizer_loads(optimizer, given)


class _OptimizerLoaded(Uncopied):
    __slots__ = ("_listener",)

    def __init__(self, listener: RestoreListener) -> None:
        self._listener = listener

    def __call__(self, optimizer: Optimizer) -> None:
        self._listener.optimizer_loaded(optimizer)
