"""Notice forward passes, and reduce every watched output to a number or two.

On the CPU a reading is free, so each output is tested at once and the traceback of a halt points into the user's own
forward. On an accelerator nothing is read here: extremes of inputs and outputs wait in order, and the first bad one in
that order is where the trouble began.

No stack of modules is kept: activation checkpointing runs parts of a forward a second time inside `backward()` and stops
half-way by an exception. Whatever fires during a backward is a recomputation and is ignored.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from gpt_guard.hooks.tensors import extremes, readable, total, walk, watchable

_FAST_KINDS = (torch.float32, torch.float64)


class Place(NamedTuple):
    """Where a watched tensor sat: a module by index, entering or leaving it, and the position in the structure."""

    module: int
    entering: bool
    position: str
    shape: tuple[int, ...]
    dtype: str


class ForwardListener(Protocol):
    """Who is told about the forwards of the watched model itself."""

    def forward_begins(self) -> None:
        """The model was called; `inputs` of the tap holds what with."""

    def forward_ended(self, output: Any) -> None:
        """The model returned."""


Suspect = Callable[[int, str, Tensor, Any], None]


class ForwardTap:
    """Hooks on one model: its own calls always, the outputs of its modules once a guard asks for them.

    `order` lists the indices of the modules that returned since the model was called, in order; `entered` holds what
    each module that has children is working on. References to activations are dropped as soon as the model returns.
    """

    def __init__(self, model: nn.Module, *, immediate: bool) -> None:
        self._model = model
        self.names: list[str] = []
        self.modules: list[nn.Module] = []
        self.inside_compiled: list[str] = []
        self.immediate = immediate
        self.paused = False
        self.order: list[int] = []
        self.entered: dict[int, tuple[Any, int | None]] = {}
        self.inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.places: list[Place] = []
        self.waiting: list[Tensor] = []
        self.unwatched: set[str] = set()
        self.calls = 0
        self.last: Callable[[], Any] = _nothing
        self._suspect: Suspect | None = None
        self._listener: ForwardListener | None = None
        self._handles: list[Any] = []
        for path, module in _eager_modules(model, self.inside_compiled):
            self.names.append(path)
            self.modules.append(module)

    def open(self, listener: ForwardListener) -> None:
        """Notice calls of the model; before any guard adds hooks, so that a forward has begun when they run."""
        self._listener = listener
        if self.modules:
            self._add_pre(self._model, self._root_begins)

    @property
    def watching(self) -> bool:
        """Whether a guard has asked for the outputs of the modules."""
        return self._suspect is not None

    def watch_outputs(self, suspect: Suspect, ignore: Iterable[str] = ()) -> None:
        """Test the outputs of all modules whose path matches none of the patterns; `suspect` is told about bad ones."""
        self._suspect = suspect
        patterns = tuple(ignore)
        for index, (path, module) in enumerate(zip(self.names, self.modules, strict=True)):
            if any(fnmatchcase(path, pattern) for pattern in patterns):
                self.unwatched.add(f"{path or 'the model itself'} (ignored as asked)")
                continue
            self._watch_module(index, module)

    def _watch_module(self, index: int, module: nn.Module) -> None:
        has_children = next(module.children(), None) is not None
        if not self.immediate:
            self._add_pre(module, _partial(self._weigh_inputs, index))
            self._add_post(module, _partial(self._weigh_outputs, index))
            return
        if has_children:
            self._add_pre(module, _partial(self._enter, index))
        self._handles.append(module.register_forward_hook(_OutputHook(self, index, module), with_kwargs=True))

    def _add_pre(self, module: nn.Module, act: Callable[..., None]) -> None:
        self._handles.append(module.register_forward_pre_hook(_Hook(module, act), with_kwargs=True))

    def _add_post(self, module: nn.Module, act: Callable[..., None]) -> None:
        self._handles.append(module.register_forward_hook(_Hook(module, act), with_kwargs=True))

    def finish_setup(self) -> None:
        """Add the hook that sees the model return; last, so that its output is tested before it counts as returned."""
        if self.modules:
            self._add_post(self._model, self._root_ended)

    def close(self) -> None:
        """Take every hook away and drop every reference; may run twice."""
        while self._handles:
            self._handles.pop().remove()
        self.forget()
        self.inputs = None
        self.modules.clear()
        self._suspect = self._listener = None

    def forget(self) -> None:
        """Drop what was kept of the current forward."""
        self.order.clear()
        self.entered.clear()
        self.last = _nothing

    def _root_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.paused:
            return
        self.forget()
        self.inputs = (args, kwargs)
        self.calls += 1
        if self._listener is not None:
            self._listener.forward_begins()

    def _root_ended(self, _args: Any, _kwargs: Any, output: Any) -> None:
        if self.paused:
            return
        self.entered.clear()
        self.last = _nothing
        if self._listener is not None:
            self._listener.forward_ended(output)

    def _enter(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.paused:
            first = args[0] if args else None
            self.entered[index] = ((args, kwargs), first._version if isinstance(first, Tensor) else None)

    def test(self, index: int, inputs: Any, output: Any) -> None:
        """Test an output at once (CPU); `output` that a child has just returned was tested already."""
        for position, tensor in walk(output):
            if tensor is not self.last() and (values := self._values(index, tensor)) is not None:
                number = total(values).item()
                self.last = weakref.ref(tensor)
                if number - number != 0.0:
                    self.suspect(index, position, tensor, inputs)

    def suspect(self, index: int, position: str, tensor: Tensor, inputs: Any) -> None:
        """Hand a tensor that failed the cheap test to the guard that asked for it."""
        if self._suspect is not None:
            self._suspect(index, position, tensor, inputs)

    def _weigh_inputs(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.paused:
            self._weigh(index, (args, kwargs) if kwargs else args, entering=True)

    def _weigh_outputs(self, index: int, _args: Any, _kwargs: Any, output: Any) -> None:
        if not self.paused:
            self.order.append(index)
            self._weigh(index, output, entering=False)

    def _weigh(self, index: int, value: Any, *, entering: bool) -> None:
        for position, tensor in walk(value):
            if tensor is not self.last() and (values := self._values(index, tensor)) is not None:
                self.waiting.append(extremes(values))
                dtype = str(tensor.dtype).removeprefix("torch.")
                self.places.append(Place(index, entering, position, tuple(tensor.shape), dtype))
                self.last = weakref.ref(tensor)

    def _values(self, index: int, tensor: Tensor) -> Tensor | None:
        if not watchable(tensor):
            self.unwatched.add(f"{self.names[index] or 'the model itself'}: a {_kind(tensor)} tensor")
            return None
        return readable(tensor)


class _Hook:
    """A module hook that acts for its own module only: a copied model takes along a hook that does nothing."""

    def __init__(self, module: nn.Module, act: Callable[..., None]) -> None:
        self._module = module
        self._act = act

    def __call__(self, module: nn.Module, *seen: Any) -> None:
        if module is self._module and not torch.compiler.is_compiling():
            self._act(*seen)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return (_no_hook, ())


class _OutputHook:
    """The hot path of watching on the CPU: a plain float tensor costs one sum."""

    def __init__(self, tap: ForwardTap, index: int, module: nn.Module) -> None:
        self._tap = tap
        self._index = index
        self._module = module

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        tap = self._tap
        if tap.paused or module is not self._module or torch.compiler.is_compiling():
            return
        tap.order.append(self._index)
        if tap.entered:
            tap.entered.pop(self._index, None)
        if type(output) is not Tensor or output.dtype not in _FAST_KINDS or output.layout is not torch.strided:
            tap.test(self._index, (args, kwargs), output)
            return
        if output is tap.last():
            return
        number = output.detach().sum().item()
        tap.last = weakref.ref(output)
        # x - x is 0 for a finite number and NaN otherwise: cheaper than a call of math.isfinite.
        if number - number != 0.0:
            tap.suspect(self._index, "", output, (args, kwargs))

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return (_no_hook, ())


def _nothing(*_: Any) -> None:
    return None


def _no_hook() -> Callable[..., None]:
    return _nothing


def _partial(act: Callable[..., None], index: int) -> Callable[..., None]:
    def bound(*seen: Any) -> None:
        act(index, *seen)

    return bound


def _kind(tensor: Tensor) -> str:
    for name in ("is_meta", "is_quantized", "is_nested"):
        if getattr(tensor, name):
            return name.removeprefix("is_")
    return str(tensor.layout).removeprefix("torch.")


def _eager_modules(model: nn.Module, compiled: list[str], prefix: str = "") -> Iterable[tuple[str, nn.Module]]:
    """The modules whose hooks fire: each once, but nothing inside a compiled one, where a late hook stays silent."""
    seen: set[int] = set()
    pending = [(prefix, model)]
    while pending:
        path, module = pending.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if is_compiled_in_place(module):
            compiled.append(path)
            continue
        yield path, module
        if is_compiled_wrapper(module):
            compiled.append(path)
            continue
        children = [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]
        pending.extend(reversed(children))


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Whether this is what `torch.compile(module)` returns; hooks on the wrapper itself do fire."""
    return hasattr(module, "_orig_mod") and hasattr(module, "dynamo_ctx")


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether `module.compile()` was called: its hooks become part of the compiled code."""
    return getattr(module, "_compiled_call_impl", None) is not None
