"""Hooks that no copy takes along: no deep copy, no pickle and no TorchScript module that is made inside a Guardian.

A copy is made of the dictionaries that hold the hooks. While a hook of ours is in one of them, `copyreg` is told how
to take these dictionaries apart without it; they themselves stay as they are, and so does every other dictionary.
"""

from __future__ import annotations

import copyreg
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gpt_guard.hooks.patches import Patch

_LOCK = threading.RLock()
_Held = OrderedDict[int, Any]
# Known to copyreg as functions that take a class's instances apart; a class may have one already.
_REDUCERS: dict[type, Callable[[Any], Any]] = copyreg.dispatch_table
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


class Uncopied:
    """Base class of hooks, for copies that are made of a hook itself: what comes out does nothing."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        # Of the standard library, so that a pickle can be read where gpt_guard is not installed.
        return (getattr, (nullcontext, "__exit__"))


class _Ours:
    """Which keys of which dictionaries are ours; weakly, and by identity."""

    def __init__(self) -> None:
        self._keys: dict[int, tuple[weakref.ref[_Held], set[int]]] = {}
        self._earlier: Callable[[Any], Any] | None = None

    def add(self, held: _Held, key: int) -> None:
        with _LOCK:
            if not self._keys:
                self._install()
            if self._find(held) is None:
                self._keys[id(held)] = (weakref.ref(held), set())
            self._keys[id(held)][1].add(key)

    def remove(self, held: int, key: int) -> None:
        with _LOCK:
            _, keys = self._keys.get(held, (None, set()))
            keys.discard(key)
            if not keys:
                self._keys.pop(held, None)
            # Also where an interrupt came between its beginning and the first hook.
            if not self._keys:
                self._uninstall()

    def _find(self, held: Any) -> set[int] | None:
        # A dictionary that has died leaves its id to others.
        entry = self._keys.get(id(held))
        return entry[1] if entry is not None and entry[0]() is held else None

    def without(self, held: _Held) -> _Held:
        """The dictionary itself if nothing in it is ours, or a copy without what is ours."""
        keys = self._find(held)
        if not keys:
            return held
        shown = OrderedDict((key, value) for key, value in held.items() if key not in keys)
        vars(shown).update(vars(held))
        return shown

    def _install(self) -> None:
        self._earlier = _REDUCERS.get(OrderedDict)
        _REDUCERS[OrderedDict] = self.reduce
        for patch in _SCRIPTING:
            patch.add(self)

    def _uninstall(self) -> None:
        for patch in _SCRIPTING:
            patch.remove(self)
        # Somebody else's on top of ours stays, and ours only passes through.
        if _REDUCERS.get(OrderedDict) == self.reduce:
            if self._earlier is None:
                del _REDUCERS[OrderedDict]
            else:
                _REDUCERS[OrderedDict] = self._earlier

    def reduce(self, held: Any) -> Any:
        """How `copy` and `pickle` take an OrderedDict apart: as ever, without what is ours."""
        shown = self.without(held)
        return shown.__reduce__() if self._earlier is None else self._earlier(shown)


class HookSet:
    """Hooks that one owner puts on modules and optimizers, and takes away again; copies leave them out.

    What is put where is noted before it is done, and `close` looks for the hooks where they were to lie: an interrupt
    at any line, of adding or of removing, leaves none behind once `close` has run, which it may do twice.
    """

    def __init__(self) -> None:
        self._placed: list[tuple[tuple[_Held, ...], Uncopied]] = []

    def before_forward(self, module: nn.Module, hook: Uncopied, *, with_kwargs: bool = False) -> None:
        """Have `hook(module, args)` called before the module's forward, or `hook(module, args, kwargs)`."""
        places: Any = (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs)
        self._add(places, hook, module.register_forward_pre_hook, with_kwargs=with_kwargs)

    def after_forward(self, module: nn.Module, hook: Uncopied, *, always_call: bool = False) -> None:
        """Have `hook(module, args, output)` called after the module's forward; with `always_call` if it raised, too."""
        places: Any = (module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called)
        self._add(places, hook, module.register_forward_hook, always_call=always_call)

    def before_step(self, optimizer: Any, hook: Uncopied) -> None:
        """Have `hook(optimizer, args, kwargs)` called before the optimizer's step."""
        self._add((optimizer._optimizer_step_pre_hooks,), hook, optimizer.register_step_pre_hook)

    def after_step(self, optimizer: Any, hook: Uncopied) -> None:
        """Have `hook(optimizer, args, kwargs)` called after the optimizer's step."""
        self._add((optimizer._optimizer_step_post_hooks,), hook, optimizer.register_step_post_hook)

    def before_any_step(self, table: _Held, hook: Uncopied) -> None:
        """Have `hook(optimizer, args, kwargs)` called before each step of any optimizer of the process."""
        self._add((table,), hook, register_optimizer_step_pre_hook)

    def before_state_dict(self, module: nn.Module, hook: Uncopied) -> None:
        """Have `hook(module, prefix, keep_vars)` called before the module's state is given out."""
        places: Any = (module._state_dict_pre_hooks,)
        self._add(places, hook, module.register_state_dict_pre_hook)

    def before_load(self, module: nn.Module, hook: Uncopied) -> None:
        """Have `hook` called as a pre-hook of the module's `load_state_dict`, with what is given and its prefix."""
        places: Any = (module._load_state_dict_pre_hooks,)
        self._add(places, hook, module.register_load_state_dict_pre_hook)

    def after_load(self, module: nn.Module, hook: Uncopied) -> None:
        """Have `hook(module, incompatible_keys)` called when the module has loaded a state."""
        places: Any = (module._load_state_dict_post_hooks,)
        self._add(places, hook, module.register_load_state_dict_post_hook)

    def before_optimizer_load(self, optimizer: Any, hook: Uncopied) -> None:
        """Have `hook(optimizer, state_dict)` called before the optimizer loads a state."""
        places = (optimizer._optimizer_load_state_dict_pre_hooks,)
        self._add(places, hook, optimizer.register_load_state_dict_pre_hook)

    def after_optimizer_load(self, optimizer: Any, hook: Uncopied) -> None:
        """Have `hook(optimizer)` called when the optimizer has loaded a state."""
        places = (optimizer._optimizer_load_state_dict_post_hooks,)
        self._add(places, hook, optimizer.register_load_state_dict_post_hook)

    def _add(self, places: tuple[_Held, ...], hook: Uncopied, register: Callable[..., Any], **options: Any) -> None:
        self._placed.append((places, hook))
        key = register(hook, **options).id
        for held in places:
            if key in held:
                _OURS.add(held, key)

    def move_to_end(self, held: _Held) -> None:
        """Have all hooks that are ours in a dictionary called after those of others."""
        for key in [key for key, each in held.items() if isinstance(each, Uncopied)]:
            held.move_to_end(key)

    def leave(self, module: nn.Module) -> None:
        """Take those of one module away."""
        held = module._forward_pre_hooks, module._forward_hooks
        for places, hook in self._placed:
            if any(places[0] is each for each in held):
                _take_away(places, hook)

    def close(self) -> None:
        """Take them all away."""
        for places, hook in self._placed:
            _take_away(places, hook)
        self._placed.clear()


def _take_away(places: tuple[_Held, ...], hook: Uncopied) -> None:
    held, *extra = places
    # torch wraps some of its hooks, and keeps what it was given in `.hook`.
    for key in [key for key, each in held.items() if each is hook or getattr(each, "hook", None) is hook]:
        # Last from where it is looked for: an interrupt in between leaves it to be found again.
        for each in (*extra, held):
            if key in each:
                _OURS.remove(id(each), key)
                del each[key]


def _without_ours(original: Callable[..., Any], _: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with _hidden(module):
        return original(module, *args, **kwargs)


@contextmanager
def _hidden(model: nn.Module) -> Iterator[None]:
    """Our hooks out of the dictionaries of all modules for a while: TorchScript would compile each hook it finds."""
    before: list[tuple[_Held, _Held]] = []
    for module in model.modules():
        for held in (getattr(module, name) for name in _HOOKS):
            shown = _OURS.without(held)
            if shown is not held:
                before.append((held, held.copy()))
                _refill(held, shown)
    try:
        yield
    finally:
        for held, all_of_them in before:
            _refill(held, all_of_them)


def _refill(held: _Held, entries: _Held) -> None:
    held.clear()
    held.update(entries)


def _scripting() -> tuple[Patch, ...]:
    # Where scripting and tracing both turn a module into TorchScript; a torch without it has nothing to hide from.
    place = getattr(torch.jit, "_recursive", None)
    return (Patch(place, "create_script_module", _without_ours),) if hasattr(place, "create_script_module") else ()


_SCRIPTING = _scripting()
_OURS = _Ours()
