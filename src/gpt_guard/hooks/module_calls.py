"""Calls of modules noticed from outside of their hooks: what is called in a module's place, on behalf of those watched.

A module with hooks runs by torch's slow path, and each hook costs a call more. Instead, `nn.Module` gets what stands in
each instance for the compiled form of the module: one function, set on the class while a module is watched, that asks
which one is called. So nothing lies in a module, and nothing gets into what is made of its dictionary: a copy, a
pickle, a replica of `DataParallel`, a clone that shares all but the parameters. All hooks of the user run inside.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.compiler import is_dynamo_compiling

from gpt_guard.hooks.copies import Uncopiable, Uncopied
from gpt_guard.hooks.hook import EntryHook, ReturnHook
from gpt_guard.hooks.untraced import left_alone, looking

_PLACE = "_compiled_call_impl"
_LOCK = threading.RLock()
_OWN = tuple(f"gpt_guard.{part}." for part in ("hooks", "callbacks", "checks", "replaying"))


class _Watched:
    """Who is told about one module, and of what; holds it, so that its id stays its own."""

    __slots__ = ("enter", "leave", "module", "told")

    def __init__(self, module: nn.Module, told: tuple[Told, ...]) -> None:
        self.module = module
        self.told = told
        entries = [_called(each, each.hook.enter) for each in told if isinstance(each.hook, EntryHook)]
        returns = [_called(each, each.hook.leave) for each in told if isinstance(each.hook, ReturnHook)]
        self.enter = _all_of([call for call in entries if call is not None])
        self.leave = _all_of([call for call in returns if call is not None])


def _called(told: Told, call: Callable[..., None]) -> Callable[..., None] | None:
    return told.hook.lightly() if told.light else call


def _all_of(calls: list[Callable[..., None]]) -> Callable[..., None] | None:
    """One call in place of several; most modules have one, which is called without anything between."""
    if len(calls) < 2:
        return calls[0] if calls else None

    def each(*args: Any) -> None:
        for call in calls:
            call(*args)

    return each


_WATCHED: dict[int, _Watched] = {}


def watched_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What every module calls in its own place while one is watched; those that are not are called as ever."""
    # By this name `testing.reads` knows what only stands around code of others.
    original: Callable[..., Any] = self._call_impl
    # A compiler that traces through the call of a module with hooks must meet nothing of ours.
    if is_dynamo_compiling():
        return original(*args, **kwargs)
    watched = _WATCHED.get(id(self))
    # Inside of compiled code that Dynamo is not looking at now, it would compile each function that we call.
    if watched is None or looking() is not None or (self._forward_pre_hooks and _gives_way(watched)):
        return original(*args, **kwargs)
    if (enter := watched.enter) is not None:
        enter(args, kwargs)
    output = original(*args, **kwargs)
    if (leave := watched.leave) is not None:
        leave(args, kwargs, output)
    return output


def fits(module: nn.Module) -> bool:
    """Whether calls of a module can be noticed here; where they cannot, hooks of torch's serve.

    Not where a class, or somebody else, has changed how modules are called, nor where `module.compile()` has taken the
    place, nor where pre-hooks may change what a module is called with. An `nn.TransformerEncoderLayer` keeps hooks: it
    looks for them, and where it finds none, its fast path for inference calls none of its parts.
    """
    kind: Any = type(module)
    return (
        _KNOWN
        and nn.Module._compiled_call_impl in (None, watched_call)
        and kind.__call__ is nn.Module._wrapped_call_impl
        and kind.__getattribute__ is object.__getattribute__
        and kind._compiled_call_impl is nn.Module._compiled_call_impl
        and _PLACE not in vars(module)
        and not _foreign(module._forward_pre_hooks)
        and not isinstance(module, nn.TransformerEncoderLayer)
    )


class Told:
    """A hook that is told when its module begins or returns, in the order of adding; after an exception it is not.

    It stands outside of all other hooks as long as that is possible, and is a hook of torch's where it is not.
    """

    def __init__(self, module: nn.Module, hook: EntryHook | ReturnHook) -> None:
        self.hook = hook
        self.light = False
        self._module = module
        self._handle: Uncopiable | None = None
        with _LOCK:
            if fits(module):
                nn.Module._compiled_call_impl = watched_call
                _set(module, (*_told(module), self))
            else:
                self.become_hook()

    def become_hook(self) -> None:
        """From here on a hook of torch's, the last of the module's."""
        hook, module = self.hook, self._module
        if isinstance(hook, EntryHook):
            self._handle = Uncopiable(module.register_forward_pre_hook(hook, with_kwargs=True))
        else:
            self._handle = Uncopiable(module.register_forward_hook(hook))

    def follow(self, *, light: bool) -> None:
        """Tell the hook what it wants to know in light steps, or all."""
        with _LOCK:
            self.light = light
            if self in (told := _told(self._module)):
                _set(self._module, told)

    def remove(self) -> None:
        """Stop telling; may run twice. With the last one, `nn.Module` is as it was."""
        with _LOCK:
            if self._handle is not None:
                self._handle.remove()
            elif self in _told(self._module):
                _set(self._module, tuple(each for each in _told(self._module) if each is not self))


def _told(module: nn.Module) -> tuple[Told, ...]:
    watched = _WATCHED.get(id(module))
    return () if watched is None else watched.told


def _set(module: nn.Module, told: tuple[Told, ...]) -> None:
    if told:
        _WATCHED[id(module)] = _Watched(module, told)
        return
    del _WATCHED[id(module)]
    # What somebody else has put on top of ours stays, and ours only passes through.
    if not _WATCHED and nn.Module._compiled_call_impl is watched_call:
        nn.Module._compiled_call_impl = None


def _foreign(hooks: Mapping[int, Any]) -> bool:
    """Whether a hook is not gpt_guard's own; what `inject_nonfinite` puts there is to count as the user's."""
    return any(not isinstance(hook, Uncopied) and not _home(hook).startswith(_OWN) for hook in hooks.values())


def _home(hook: Any) -> str:
    return getattr(hook, "__module__", None) or type(hook).__module__


def _gives_way(watched: _Watched) -> bool:
    """Whether a pre-hook has come that may change what the module is called with; then ours follow it, as hooks."""
    hooks: Any = watched.module._forward_pre_hooks
    if not _foreign(hooks):
        return False
    with _LOCK:
        own = [key for key, hook in hooks.items() if isinstance(hook, Uncopied)]
        told = _told(watched.module)
        if told:
            _set(watched.module, ())
        for each in told:
            each.become_hook()
        # Those of guards count on the forward having begun.
        for key in own:
            hooks.move_to_end(key)
    return True


def _is_known() -> bool:
    """Whether this version of torch calls what a module holds for its compiled form, as those from 2.0 on do."""
    call = getattr(nn.Module, "_wrapped_call_impl", None)
    names = getattr(getattr(call, "__code__", None), "co_names", ())
    return _PLACE in names and "_call_impl" in names and hasattr(nn.Module, _PLACE)


_KNOWN = _is_known() and left_alone(watched_call)
