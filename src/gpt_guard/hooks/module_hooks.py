"""Notice forward passes of one model through plain torch hooks, and keep in order what its modules return.

No stack of modules is trusted: activation checkpointing runs parts of a forward a second time inside `backward()` and
stops half-way by an exception. Whatever fires during a backward is a recomputation and is ignored.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Protocol

from torch import Tensor, nn

from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.compiled import eager_modules, is_compiled_in_place
from gpt_guard.hooks.copies import HookSet, Uncopied
from gpt_guard.hooks.output_hooks import (
    EntryExtremes,
    EntryNote,
    Extremes,
    InPlaceInput,
    OutputTest,
    ReturnExtremes,
    ReturnNote,
    RootBegins,
    RootEnded,
)

# Where `module.compile()` puts what is called in the place of the module.
_COMPILED = "_compiled_call_impl"
# A model whose modules are called one by one is never called itself, and nothing would end the list.
_MOST_RETURNS = 50_000


class ForwardListener(Protocol):
    """Who is told about the forwards of the watched model itself."""

    def forward_begins(self) -> None:
        """The model was called; `inputs` of the hooks holds what with."""

    def forward_ended(self, output: Any) -> None:
        """The model returned."""


Suspect = Callable[[int, str, Tensor, bool], None]


class ModuleHooks:
    """Listens to one model: its own calls always, the outputs of its modules once a guard asks for them.

    `order` lists the indices of the modules that returned since the model was called. On the CPU, where a reading is
    free, each output is tested where it is made, so that the traceback of a halt points into the user's own forward;
    anywhere else extremes of inputs and outputs wait in `extremes`, and nothing is read here. Holds no activation: what
    it remembers of one is a weak reference.
    """

    def __init__(self, model: nn.Module, *, immediate: bool) -> None:
        self.model = model
        self.inside_compiled: list[str] = []
        self.compiled_later: list[str] = []
        found = list(eager_modules(model, self.inside_compiled))
        self.names = [path for path, _ in found]
        self.modules = [module for _, module in found]
        self.index = {id(module): place for place, module in enumerate(self.modules)}
        self._dictionaries = [vars(module) for module in self.modules]
        self.immediate = immediate
        self.extremes = Extremes()
        self.paused = False
        self.order: deque[int] = deque(maxlen=_MOST_RETURNS)
        self.entered: dict[int, tuple[int | None, int]] = {}
        self.inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.ignored: set[int] = set()
        self.untested: dict[int, list[weakref.ref[Tensor]]] = {}
        self.unwatched: set[str] = set()
        self.calls = 0
        # Whether each module's output is tested, not only what the model itself returns.
        self.insides_watched = False
        self.last: Callable[[], Any] = _nothing
        self.last_version = 0
        # Seconds that the hooks on single modules have taken.
        self.spent = 0.0
        # Replaced by a caller that switches off a guard which fails.
        self.listen: Callable[..., None] = _call
        self._suspect: Suspect | None = None
        self._listener: ForwardListener | None = None
        self._hooks = HookSet()

    def open(self, listener: ForwardListener) -> None:
        """Notice calls of the model; before any guard adds hooks, so that a forward has begun when they run."""
        self._listener = listener
        if self.modules:
            self._hooks.before_forward(self.model, RootBegins(self, 0, self.model), with_kwargs=True)

    @property
    def watching(self) -> bool:
        """Whether a guard has asked for the outputs of the modules."""
        return self._suspect is not None

    def watch_outputs(self, suspect: Suspect, ignore: Iterable[str] = (), *, modules: bool = True) -> None:
        """Test the outputs of all modules whose path matches none of the patterns; `suspect` is told about bad ones.

        It gets the module's index, the position in its input or output, the tensor, and whether that was an input.
        Without `modules` only what the model itself returns is tested. Raises GuardUsageError for a second guard that
        asks.
        """
        if self._suspect is not None:
            raise GuardUsageError("module outputs are watched already: give one FiniteGuard, not two")
        self._suspect = suspect
        self.insides_watched = modules
        patterns = tuple(ignore)
        self.unwatched.update(idle_patterns(patterns, [path for path, _ in self.model.named_modules()]))
        for index, (path, module) in enumerate(zip(self.names, self.modules, strict=True)):
            if patterns and any(fnmatchcase(path, pattern) for pattern in patterns):
                self.ignored.add(index)
                self.unwatched.add(f"{path or 'the model itself'} (ignored as asked)")
            if modules or not index:
                self._watch_module(index, module)

    def newly_compiled(self) -> list[str]:
        """Paths of modules that `module.compile()` has taken since this was last asked: nothing is told of them.

        Hooks on them are taken away, before they become part of the compiled code. One look into each module's
        dictionary, and nothing more where there are none.
        """
        if not any(_COMPILED in each for each in self._dictionaries):
            return []
        pairs = zip(self.names, self.modules, strict=True)
        found = [path for path, each in pairs if is_compiled_in_place(each) and path not in self.compiled_later]
        self.compiled_later += found
        for path in found:
            # The module itself, and not what stands under its path by now.
            for module in self.modules[self.names.index(path)].modules():
                self._hooks.leave(module)
        return found

    def _watch_module(self, index: int, module: nn.Module) -> None:
        hooks = self._hooks
        if index in self.ignored:
            hooks.after_forward(module, ReturnNote(self, index, module))
        elif self.immediate:
            if _runs_own_code(module):
                hooks.before_forward(module, EntryNote(self, index, module))
            elif getattr(module, "inplace", False):
                hooks.before_forward(module, InPlaceInput(self, index, module))
            hooks.after_forward(module, OutputTest(self, index, module))
        else:
            hooks.before_forward(module, EntryExtremes(self, index, module), with_kwargs=True)
            hooks.after_forward(module, ReturnExtremes(self, index, module), always_call=True)

    def finish_setup(self) -> None:
        """Add the hook that sees the model return; last, so that its output is tested before it counts as returned."""
        if self.modules:
            self._hooks.after_forward(self.model, RootEnded(self, 0, self.model))

    def close(self) -> None:
        """Take every hook away and drop every reference; may run twice."""
        self._hooks.close()
        self.forget()
        self.extremes.clear()
        self.inputs = None
        self.modules.clear()
        self._dictionaries.clear()
        self.index.clear()
        self._suspect = self._listener = None

    def forget(self) -> None:
        """Drop what was kept of the current forward."""
        self.order.clear()
        self.entered.clear()
        self.untested.clear()
        self.extremes.running.clear()
        self.last = _nothing

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model itself was called: from inside of its own forward, perhaps, or after one that has failed."""
        self.forget()
        self.inputs = (args, kwargs)
        self.calls += 1
        # Hooks that came later may change the batch, which ours see from the next call on, and the output.
        held: Any
        for held in (self.model._forward_pre_hooks, self.model._forward_hooks):
            if held and not isinstance(next(reversed(held.values())), Uncopied):
                self._hooks.move_to_end(held)
        if self._listener is not None:
            self._listener.forward_begins()

    def end(self, args: tuple[Any, ...], output: Any) -> None:
        """The model itself returned; `args` are what its forward was given in the end."""
        self.last = _nothing
        if self._listener is not None:
            self._listener.forward_ended(output)

    def suspect(self, index: int, position: str, tensor: Tensor, *, entering: bool = False) -> None:
        """Hand a tensor that failed the cheap test to the guard that asked for it."""
        if self._suspect is not None:
            self.listen(self._suspect, index, position, tensor, entering)

    def cannot_test(self, index: int, why: str) -> None:
        """A tensor of a kind that has no sum, or a transform such as vmap, in which no value can be read."""
        self.unwatched.add(f"{self.names[index] or 'the model itself'}: {why}")

    def source_of(self, tensor: Tensor) -> int | None:
        """The module with untested outputs that returned this very tensor in the current forward, or None."""
        for index, outputs in self.untested.items():
            if any(output() is tensor for output in outputs):
                return index
        return None


def idle_patterns(patterns: Iterable[str], paths: Sequence[str]) -> list[str]:
    """What to say of each pattern that matches none of the paths: a slip of the pen, or meant for another model."""
    found: list[str] = []
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in paths):
            near = ", ".join(get_close_matches(pattern.rstrip("*").rstrip("."), paths, n=3))
            hint = f"; near it: {near}" if near else ""
            found.append(f"nothing is ignored by {pattern!r}: it matches no module{hint}")
    return found


def _runs_own_code(module: nn.Module) -> bool:
    """Whether code of the user's own, or several modules, work on the input: a layer of torch's only reads it."""
    return next(module.children(), None) is not None or not type(module).__module__.startswith("torch.nn.")


def _nothing() -> None:
    return None


def _call(listener: Callable[..., None], *args: Any) -> None:
    listener(*args)
