"""Notice forward passes of one model, and keep in order what its modules return.

No stack of modules is trusted: activation checkpointing runs parts of a forward a second time inside `backward()` and
stops half-way by an exception. Whatever fires during a backward is a recomputation and is ignored.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.chains import Link, Succession, hooked_everywhere
from gpt_guard.hooks.compiled import eager_modules, is_compiled_in_place
from gpt_guard.hooks.copies import Uncopiable
from gpt_guard.hooks.frames import user_site
from gpt_guard.hooks.hook import EntryHook, EntryNote, ReturnHook
from gpt_guard.hooks.idle_patterns import idle_patterns
from gpt_guard.hooks.module_calls import Told
from gpt_guard.hooks.outputs import InPlaceInput, OutputTest, ReturnNote
from gpt_guard.hooks.roots import RootBegins, RootEnded
from gpt_guard.hooks.waiting import Waiting, release, settle
from gpt_guard.hooks.weigh import Scales, WeighInputs, WeighOutputs

# A model whose modules are called one by one is never called itself, and nothing would end the list.
_MOST_RETURNS = 50_000


class ForwardListener(Protocol):
    """Who is told about the forwards of the watched model itself."""

    def forward_begins(self) -> None:
        """The model was called; `inputs` of the tap holds what with."""

    def forward_ended(self, output: Any) -> None:
        """The model returned."""


Suspect = Callable[[int, str, Tensor, bool, Link | None], None]


class ForwardTap:
    """Listens to one model: its own calls always, the outputs of its modules once a guard asks for them.

    `order` lists the indices of the modules that returned since the model was called. On the CPU, where a reading is
    free, each output is tested where it is made, so that the traceback of a halt points into the user's own forward;
    anywhere else extremes of inputs and outputs wait in `scales`, and nothing is read here. Holds no activation: what
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
        self.immediate = immediate
        self.scales = Scales()
        self.paused = False
        self.order: deque[int] = deque(maxlen=_MOST_RETURNS)
        self.entered: dict[int, tuple[int | None, int]] = {}
        self.inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.ignored: set[int] = set()
        self.untested: dict[int, list[weakref.ref[Tensor]]] = {}
        self.unwatched: set[str] = set()
        self.calls = 0
        self.last: Callable[[], Any] = _nothing
        self.last_version = 0
        self.succession = Succession()
        self.learning = self.sparing = False
        self.waiting: Waiting | None = None
        # Replaced by a caller that switches off a guard which fails.
        self.listen: Callable[..., None] = _call
        self._suspect: Suspect | None = None
        self._listener: ForwardListener | None = None
        self._handles: list[Any] = []
        self._light = False

    def open(self, listener: ForwardListener) -> None:
        """Notice calls of the model; before any guard adds hooks, so that a forward has begun when they run."""
        self._listener = listener
        if self.modules:
            self._pre(self.model, RootBegins(self, 0, self.model))

    @property
    def watching(self) -> bool:
        """Whether a guard has asked for the outputs of the modules."""
        return self._suspect is not None

    def watch_outputs(self, suspect: Suspect, ignore: Iterable[str] = ()) -> None:
        """Test the outputs of all modules whose path matches none of the patterns; `suspect` is told about bad ones.

        It gets the module's index, the position in its input or output, the tensor, whether that was an input, and the
        link of an output that has waited. Raises GuardUsageError for a second guard that asks.
        """
        if self._suspect is not None:
            raise GuardUsageError("module outputs are watched already: give one FiniteGuard, not two")
        self._suspect = suspect
        patterns = tuple(ignore)
        self.unwatched.update(idle_patterns(patterns, [path for path, _ in self.model.named_modules()]))
        for index, (path, module) in enumerate(zip(self.names, self.modules, strict=True)):
            if any(fnmatchcase(path, pattern) for pattern in patterns):
                self.ignored.add(index)
                self.unwatched.add(f"{path or 'the model itself'} (ignored as asked)")
            self._watch_module(index, module)

    def newly_compiled(self) -> list[str]:
        """Paths of modules that `module.compile()` has taken since they were last asked for: they are not told of."""
        pairs = zip(self.names, self.modules, strict=True)
        found = [path for path, each in pairs if is_compiled_in_place(each) and path not in self.compiled_later]
        self.compiled_later += found
        return found

    def shield(self, run: Callable[..., None]) -> None:
        """Have the guard called through `run(method, *args)`, which keeps a failure of the guard out of the forward."""
        if self._suspect is not None:
            self._suspect = partial(run, self._suspect)

    def _watch_module(self, index: int, module: nn.Module) -> None:
        if index in self.ignored:
            self._post(module, ReturnNote(self, index, module))
        elif self.immediate:
            if _runs_own_code(module):
                self._pre(module, EntryNote(self, index, module))
            elif getattr(module, "inplace", False):
                self._pre(module, InPlaceInput(self, index, module))
            self._post(module, OutputTest(self, index, module))
        else:
            self._pre(module, WeighInputs(self, index, module))
            self._post(module, WeighOutputs(self, index, module), always=True)

    def _pre(self, module: nn.Module, hook: EntryHook) -> None:
        if self.immediate:
            self._handles.append(Told(module, hook))
        else:
            self._handles.append(Uncopiable(module.register_forward_pre_hook(hook, with_kwargs=True)))

    def _post(self, module: nn.Module, hook: ReturnHook, *, always: bool = False) -> None:
        if self.immediate:
            self._handles.append(Told(module, hook))
        else:
            self._handles.append(Uncopiable(module.register_forward_hook(hook, always_call=always)))

    def finish_setup(self) -> None:
        """Add the hook that sees the model return; last, so that its output is tested before it counts as returned."""
        if self.modules:
            self._post(self.model, RootEnded(self, 0, self.model))

    def close(self) -> None:
        """Take every hook away and drop every reference; may run twice."""
        while self._handles:
            self._handles.pop().remove()
        self.forget()
        self.scales.clear()
        self.inputs = None
        self.modules.clear()
        self.index.clear()
        self._suspect = self._listener = None

    def forget(self) -> None:
        """Drop what was kept of the current forward."""
        self.order.clear()
        self.entered.clear()
        self.untested.clear()
        self.scales.running.clear()
        self.last = _nothing
        release(self)
        self.succession.forget()

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model itself was called: from inside of its own forward, perhaps, or after one that has failed."""
        if self.waiting is not None:
            settle(self)
        if self._light:
            # As `forget`, without what light steps do not keep.
            self.order.clear()
            self.entered.clear()
            self.untested.clear()
            self.last = _nothing
        else:
            self.forget()
        self.inputs = (args, kwargs)
        self.calls += 1
        if self._listener is not None:
            self._listener.forward_begins()

    def end(self, output: Any) -> None:
        """The model itself returned."""
        if self.waiting is not None:
            settle(self)
        if self.learning:
            self.succession.end()
        self.learning = self.sparing = False
        self.last = _nothing
        if self._listener is not None:
            self._listener.forward_ended(output)

    def learn(self) -> None:
        """Test all outputs in the forward that begins, and see which of them could wait for the next module."""
        self.as_ever()
        if not self.succession.done:
            self.learning = True
            self.succession.begin(user_site())

    def spare(self) -> None:
        """Do not test outputs that can wait in the forward that begins, if the next module is called with them."""
        self.learning, self.sparing = False, not hooked_everywhere()
        if not self._light:
            self._follow(light=True)

    def as_ever(self) -> None:
        """Test all outputs in the forward that begins."""
        self.learning = self.sparing = False
        self._follow(light=False)

    def _follow(self, *, light: bool) -> None:
        if light != self._light:
            self._light = light
            for handle in self._handles:
                if isinstance(handle, Told):
                    handle.follow(light=light)

    def suspect(
        self, index: int, position: str, tensor: Tensor, *, entering: bool = False, link: Link | None = None
    ) -> None:
        """Hand a tensor that failed the cheap test to the guard that asked for it."""
        if self._suspect is not None:
            self.listen(self._suspect, index, position, tensor, entering, link)

    def cannot_test(self, index: int, why: str) -> None:
        """A tensor of a kind that has no sum, or a transform such as vmap, in which no value can be read."""
        self.unwatched.add(f"{self.names[index] or 'the model itself'}: {why}")

    def source_of(self, tensor: Tensor) -> int | None:
        """The module with untested outputs that returned this very tensor in the current forward, or None."""
        for index, outputs in self.untested.items():
            if any(output() is tensor for output in outputs):
                return index
        return None


def _runs_own_code(module: nn.Module) -> bool:
    """Whether code of the user's own, or several modules, work on the input: a layer of torch's only reads it."""
    return next(module.children(), None) is not None or not type(module).__module__.startswith("torch.nn.")


def _nothing() -> None:
    return None


def _call(listener: Callable[..., None], *args: Any) -> None:
    listener(*args)
