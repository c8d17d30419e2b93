"""Chains: modules called one after another, each with the very output of the one before it.

What a linear layer, a norm or an activation is given and cannot lose shows in what it returns: a NaN or +inf comes out
as NaN or infinite. So one reading of the last output tells that all before it are good. Only if it is not are they
read too, the first one first, to name the one that made it.
"""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from gpt_guard.hooks.pace import Pace
from gpt_guard.hooks.tensors import version_of

# Each of these multiplies, adds or passes on every element; -inf alone may get lost in some, as a mask may.
_KINDS: tuple[type[nn.Module], ...] = (
    nn.Linear,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GELU,
    nn.SiLU,
    nn.ReLU,
    nn.Dropout,
)
_CARRYING = {kind: kind.forward for kind in _KINDS}
_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep


class Site(NamedTuple):
    """From where a module is called: the code, and the user's line as `line_in` takes it, None for the loop itself."""

    code: CodeType
    line: tuple[CodeType, int] | None


class Link(NamedTuple):
    """An output that has waited for the next module: what its module was given, and whether it is as it was returned.

    `site` tells from where the module is called. If what it was given may be bad, that code is still running.
    """

    given: Any
    unwritten: bool
    site: Site | None


class _Newest(NamedTuple):
    """The last output of a forward that another module may be called with next."""

    place: int
    output: ref[Tensor]
    version: int
    caller: FrameType


class Linked(Protocol):
    """A hook on a module that may stand in a chain."""

    index: int


def carries(module: nn.Module) -> bool:
    """Whether a module cannot lose a NaN or +inf of its one input; not a subclass, nor with another's `forward`."""
    kind = type(module)
    if _CARRYING.get(kind) is not kind.forward or "forward" in vars(module) or getattr(module, "inplace", False):
        return False
    # What a sparse weight does not store multiplies nothing, and no column shows nothing.
    layout = getattr(getattr(module, "weight", None), "layout", torch.strided)
    return layout is torch.strided and getattr(module, "out_features", 1) > 0


def hooked_everywhere() -> bool:
    """Whether somebody's hook may change what every module is given or returns."""
    return bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)


class Succession:
    """Learns in forwards where each output is tested which ones the next module is always called with.

    `known` holds the indices of the modules whose outputs may wait for it: each was called once in each forward so far,
    from one place, and nothing had written to its output before the next module returned. For those in `inside` the
    code that called them was still running then. `sites` tells where they were called from.
    `writers` are the modules that have written to their own first input. `done` tells that it has seen enough.
    """

    def __init__(self) -> None:
        self.known: set[int] = set()
        self.inside: set[int] = set()
        self.sites: dict[int, Site] = {}
        self.writers: set[int] = set()
        self._forwards = 0
        self._loop: CodeType | None = None
        self._moved: set[int] = set()
        self._followed: set[int] = set()
        self._outside: set[int] = set()
        self._called: set[int] = set()
        self._newest: _Newest | None = None

    @property
    def done(self) -> bool:
        """As many forwards as there are full steps at the start."""
        return self._forwards >= Pace.first

    def begin(self, called_at: tuple[CodeType, int] | None) -> None:
        """A forward in training mode begins; the loop has called it there."""
        self._loop = None if called_at is None else called_at[0]
        self._followed, self._outside, self._called, self._newest = set(), set(), set(), None

    def note(
        self,
        hook: Linked,
        module: nn.Module,
        args: tuple[Any, ...],
        output: Any,
        version: int | None,
        called_at: tuple[CodeType, int] | None,
        *,
        alone: bool,
    ) -> None:
        """A module has returned. `version` is that of its first input when it was called, None if that is no tensor.

        The user's code has called it there, through torch's or by itself; `alone`: with one input and no more.
        """
        newest, index = self._newest, hook.index
        if version is not None and version_of(args[0]) != version:
            self.writers.add(index)
        if newest is not None and _is(output, newest):
            # The parent gives out what its last module returned.
            return
        if newest is not None and args and _is(args[0], newest) and carries(module) and not module._forward_hooks:
            self._followed.add(newest.place)
            if not _runs(newest.caller, _caller()):
                self._outside.add(newest.place)
        self._newest = None
        if index in self._called:
            self._followed.discard(index)
        elif alone and type(output) is Tensor and output.numel() and version_of(output) >= 0:
            caller = _caller()
            self._newest = _Newest(index, ref(output), version_of(output), caller)
            line = None if called_at is None or called_at[0] is self._loop else called_at
            site = Site(caller.f_code, line)
            if self.sites.setdefault(index, site) != site:
                self._moved.add(index)
        self._called.add(index)

    def end(self) -> None:
        """The forward is over."""
        self._newest = None
        self._forwards += 1
        self._followed -= self.writers | self._moved
        inside = self._followed - self._outside
        first = self._forwards == 1
        self.known = self._followed if first else self.known & self._followed
        self.inside = inside if first else self.inside & inside

    def forget(self) -> None:
        """A forward was left by an exception, perhaps: hold none of its frames."""
        self._newest = None


def _is(value: Any, newest: _Newest) -> bool:
    tensor = newest.output()
    return tensor is not None and value is tensor and version_of(tensor) == newest.version


def _caller() -> FrameType:
    """Who has called the module that has just returned: behind our own frames and torch's of the call."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_OWN) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_back or frame


def _runs(caller: FrameType, frame: FrameType | None) -> bool:
    """Whether a frame is the caller's, or of something that it has called and waits for.

    Not if the same code runs in between, as a block's inside of a block: then code alone does not tell which it was.
    """
    while frame is not None and frame.f_code is not caller.f_code:
        frame = frame.f_back
    return frame is caller
