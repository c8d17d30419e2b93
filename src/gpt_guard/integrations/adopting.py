"""Put a Guardian round the first model and optimizer that train together in a program that knows nothing of it.

Until there is one, the making of an optimizer and the call of a module are noticed; both are put back when it is found.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gpt_guard.guardian import Guardian
from gpt_guard.hooks.patches import Patch


def _makes(original: Any, listeners: tuple[Adoption, ...], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(optimizer, *args, **kwargs)
    for listener in listeners:
        listener.optimizer_made(optimizer)
    return result


def _calls(original: Any, listeners: tuple[Adoption, ...], module: Any, *args: Any, **kwargs: Any) -> Any:
    for listener in listeners:
        listener.module_called(module)
    return original(module, *args, **kwargs)


def _starts(original: Any, listeners: tuple[Adoption, ...], guardian: Any, *args: Any, **kwargs: Any) -> Any:
    for listener in listeners:
        listener.guardian_started(guardian)
    return original(guardian, *args, **kwargs)


_OPTIMIZERS = Patch(Optimizer, "__init__", _makes)
_MODULES = Patch(nn.Module, "__call__", _calls)
_GUARDIANS = Patch(Guardian, "start", _starts)


class Adoption:
    """Waits for a model that is called with gradients on while an optimizer holds parameters of it, and guards the two.

    `make` builds the Guardian, `tell` is given a sentence once it watches. The model is the smallest module that has
    all parameters of that optimizer, where there is one, as a LightningModule of which only parts are ever called.
    `guardian` is the one that was made; `own` tells that the program has one itself, which then has the loop to itself.
    `optimizers` counts those that were made.
    """

    def __init__(self, make: Callable[[nn.Module, Sequence[Optimizer]], Guardian], tell: Callable[[str], None]) -> None:
        self.guardian: Guardian | None = None
        self.own = False
        self.optimizers = 0
        self._make, self._tell = make, tell
        self._made: list[weakref.ref[Optimizer]] = []
        self._kept: tuple[nn.Module, list[Optimizer]] | None = None
        self._lock = threading.Lock()

    def open(self) -> None:
        """Begin to wait."""
        _GUARDIANS.add(self)
        _OPTIMIZERS.add(self)
        _MODULES.add(self)

    def close(self, error: BaseException | None = None) -> None:
        """Stop waiting, and watching; may run twice. Raises a finding that halts at the end."""
        self._wait_no_more()
        _GUARDIANS.remove(self)
        guardian, self._kept = self.guardian, None
        if guardian is not None:
            guardian.__exit__(type(error) if error is not None else None, error, None)

    def _wait_no_more(self) -> None:
        _MODULES.remove(self)
        _OPTIMIZERS.remove(self)

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """Remember one."""
        self.optimizers += 1
        self._made.append(weakref.ref(optimizer))

    def module_called(self, module: nn.Module) -> None:
        """Guard it, if it is about to be trained."""
        if not self._made or not torch.is_grad_enabled() or self.guardian is not None or self.own:
            return
        with self._lock:
            mine = _identities(module.parameters())
            found = [each for each in self._alive() if mine & _held(each)]
            if mine and found and self.guardian is None:
                self._adopt(module, found)

    def _adopt(self, module: nn.Module, found: list[Optimizer]) -> None:
        self._wait_no_more()
        model = _owner(module, set().union(*(_held(each) for each in found)))
        all_of_it = _identities(model.parameters())
        optimizers = [each for each in self._alive() if all_of_it & _held(each)]
        # A Guardian holds neither, and a program may drop its optimizer in an early epoch without a word.
        self._kept = model, optimizers
        self.guardian = guardian = self._make(model, optimizers)
        guardian.start()
        count = sum(parameter.numel() for parameter in model.parameters())
        names = " and ".join(type(each).__name__ for each in optimizers)
        self._tell(f"watching {type(model).__name__} ({count:,} parameters) and {names}")

    def _alive(self) -> list[Optimizer]:
        """Those that still exist, without the ones that only wrap another and hold its groups."""
        alive: list[Optimizer] = []
        for ref in self._made:
            each = ref()
            if each is not None and all(each.param_groups is not other.param_groups for other in alive):
                alive.append(each)
        return alive

    def guardian_started(self, guardian: Guardian) -> None:
        """The program has one of its own: that one watches, and no other."""
        if guardian is self.guardian:
            return
        self.own = True
        self._wait_no_more()
        if self.guardian is not None:
            self.guardian.stop()
            self.guardian = self._kept = None
        self._tell("this program has a Guardian of its own, which watches; it is run as it is")


def _identities(parameters: Iterator[nn.Parameter]) -> set[int]:
    return {id(parameter) for parameter in parameters}


def _held(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _owner(module: nn.Module, held: set[int]) -> nn.Module:
    """The smallest module around this one that has all that the optimizers hold, or as much as any has."""
    around: list[nn.Module] = [
        each for each in gc.get_objects() if issubclass(type(each), nn.Module) and _contains(each, module)
    ]
    sizes = {id(each): _identities(each.parameters()) for each in around}
    return max(around, key=lambda each: (len(sizes[id(each)] & held), -len(sizes[id(each)]), -_depth(each)))


def _contains(thing: Any, part: nn.Module) -> bool:
    # By its type: proxies answer isinstance with code of their own.
    return issubclass(type(thing), nn.Module) and any(each is part for each in thing.modules())


def _depth(module: nn.Module) -> int:
    return sum(1 for _ in module.modules())
