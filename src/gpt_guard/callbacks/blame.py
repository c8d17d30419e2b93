"""Blame: from the first bad tensor of a forward to the module whose code made it.

A module made a bad output only if what it was given and the parameters it reads are good. If its input was bad, the
code of the module around it made it, between two of its children; that one may have been given it in turn, and so on
outwards until an input is good, or the model's own inputs are reached.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gpt_guard.hooks.forward import ForwardTap
from gpt_guard.hooks.tensors import describe, looks_bad, walk
from gpt_guard.records import TensorStats


@dataclass(frozen=True)
class Blame:
    """Who made it: a module (`index` into the tap's names, None where the batch itself is bad) or a bad parameter.

    `receiver` is the module that only received it; `after` the last child of the maker that had returned.
    """

    index: int | None
    receiver: int | None = None
    after: int | None = None
    state: tuple[str, TensorStats] | None = None
    input_position: str | None = None
    input_stats: TensorStats | None = None
    masked_rows: int = 0
    certain: bool = True


def blame(tap: ForwardTap, index: int, output: Tensor, inputs: tuple[Any, Any]) -> Blame:
    """Find the maker of a bad output, right after the module returned it. Reads tensors exactly: only after a failure.

    `inputs` are the module's (args, kwargs). An input that shares memory with the output (an in-place module) tells
    nothing about what came in, and is left out.
    """
    received = _bad_input(inputs, output)
    if received is None:
        return _made_inside(tap, index, inputs)
    for outer in _ancestors(tap, index):
        entered = tap.entered.get(outer)
        if entered is None:
            continue
        (given, version) = entered
        if not _still_as_given(given, version) or _bad_input(given, None) is None:
            state = bad_state(tap.modules[outer], tap.names[outer], deep=True)
            after = _last_child(tap, outer, index)
            return Blame(outer, index, after, state, received[0], received[1])
    if _bad_input(tap.inputs, None) is not None:
        return Blame(None, index, None, None, *received)
    return Blame(_nearest(tap, index), index, _last_child(tap, 0, index), None, *received, certain=False)


def _made_inside(tap: ForwardTap, index: int, inputs: tuple[Any, Any]) -> Blame:
    module, name = tap.modules[index], tap.names[index]
    state = bad_state(module, name, deep=True)
    return Blame(index, after=_last_child(tap, index, index), state=state, masked_rows=_masked_rows(inputs))


def _bad_input(inputs: Any, output: Tensor | None) -> tuple[str, TensorStats] | None:
    for position, tensor in walk(_flat(inputs)):
        if output is not None and _same_memory(tensor, output):
            continue
        if (stats := looks_bad(tensor)) is not None:
            return position, stats
    return None


def _flat(inputs: Any) -> Any:
    """Positions read better as `[0]` and `['mask']` than with the pair of args and kwargs around them."""
    if inputs is None:
        return ()
    args, kwargs = inputs
    return {**dict(enumerate(args)), **kwargs}


def _same_memory(one: Tensor, other: Tensor) -> bool:
    try:
        return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return False


def _still_as_given(given: Any, version: int | None) -> bool:
    args = given[0]
    return version is None or not args or not isinstance(args[0], Tensor) or args[0]._version == version


def _masked_rows(inputs: tuple[Any, Any]) -> int:
    """Rows along the last dimension that are -inf throughout, in inputs that hold -inf as a mask does."""
    for _, tensor in walk(_flat(inputs)):
        stats = describe(tensor)
        if stats is not None and stats.only_neg_inf and tensor.dim():
            return int((tensor == -float("inf")).all(-1).sum())
    return 0


def bad_state(module: nn.Module, path: str, *, deep: bool) -> tuple[str, TensorStats] | None:
    """The first parameter or buffer of a module that holds NaN or +inf, with its full name; -inf alone is a mask."""
    prefix = f"{path}." if path else ""
    for name, tensor in (*module.named_parameters(recurse=deep), *module.named_buffers(recurse=deep)):
        if (stats := looks_bad(tensor)) is not None:
            return prefix + name, stats
    return None


def _ancestors(tap: ForwardTap, index: int) -> list[int]:
    """Modules around this one whose forward could be running, innermost first."""
    places = {name: place for place, name in enumerate(tap.names)}
    path, found = tap.names[index], []
    while path:
        path = path.rpartition(".")[0]
        if path in places:
            found.append(places[path])
    return found


def _nearest(tap: ForwardTap, index: int) -> int:
    for outer in _ancestors(tap, index):
        if not isinstance(tap.modules[outer], (nn.ModuleList, nn.ModuleDict)):
            return outer
    return 0


def _last_child(tap: ForwardTap, outer: int, before: int) -> int | None:
    """The module inside `outer` that had returned last when `before` was called."""
    prefix = f"{tap.names[outer]}." if tap.names[outer] else ""
    own = f"{tap.names[before]}."
    for index in reversed(tap.order):
        name = tap.names[index]
        if index not in (before, outer) and name.startswith(prefix) and (before == outer or not name.startswith(own)):
            return index
    return None
