"""Where a non-finite value was first seen in a forward: the module whose code made it.

A module made a bad output only if what it was given and the parameters it reads are good. If its input was bad, the
code of the module around it made it, between two of its children; that one may have been given it in turn, and so on
outwards until an input is good, or the caller of the model is reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gpt_guard.hooks.frames import inside_of, passed_from_outside, running_calls
from gpt_guard.hooks.module_hooks import ModuleHooks
from gpt_guard.hooks.output_hooks import ForwardExtremes, TensorPlace
from gpt_guard.hooks.tensors import describe, looks_bad, version_of, walk
from gpt_guard.hooks.weights import BadState, KnownState, bad_state
from gpt_guard.records import SourceLine, TensorStats

_Bad = tuple[str, TensorStats, Tensor]


@dataclass(frozen=True)
class Shown:
    """The bad tensor to show: exact statistics where it could be read, its extremes where only those were."""

    position: str
    shape: tuple[int, ...]
    dtype: str
    stats: TensorStats | None = None
    low: float = 0.0
    high: float = 0.0

    @classmethod
    def read(cls, position: str, stats: TensorStats) -> Shown:
        """A tensor that was read."""
        return cls(position, stats.shape, stats.dtype, stats)

    @classmethod
    def measured(cls, place: TensorPlace, low: float, high: float) -> Shown:
        """A tensor of which minimum and maximum were read with the step."""
        dtype = str(place.dtype).removeprefix("torch.")
        return cls(place.position, place.shape, dtype, None, low, high)


@dataclass(frozen=True)
class FirstSeen:
    """Who made it: the module `maker` by index, or code outside of the model (None): what it was called with was bad.

    `receiver` is the module that only received it; `after` the last module inside the maker that had returned.
    `state` is a parameter or buffer of the maker that was bad before. Where `certain` is False, `maker` is the
    closest that can be told; `ignored` says that the maker's outputs are not tested. `masked_rows` counts the rows that
    are -inf throughout in what the maker works on, `neg_inf` names an input of it that holds -inf, as a mask does;
    `bad_locals` names the variables of its code that are bad, `where` is its line, where its code is still running.
    """

    maker: int | None
    shown: Shown
    receiver: int | None = None
    after: int | None = None
    state: BadState | None = None
    masked_rows: int = 0
    neg_inf: str | None = None
    bad_locals: tuple[str, ...] = ()
    certain: bool = True
    ignored: bool = False
    where: SourceLine | None = None


def first_seen(
    tap: ModuleHooks,
    index: int,
    position: str,
    tensor: Tensor,
    *,
    entering: bool,
    untouched: dict[int, int],
    known: KnownState,
) -> FirstSeen:
    """Find the maker of a bad tensor that module `index` has just returned, or been given.

    Runs inside of the module's call and reads tensors exactly: only after a failure. `untouched` are the versions that
    float buffers had when the forward began, `known` tells what was bad when the watch began.
    """
    calls = [(tap.index[id(call.module)], call.inputs) for call in running_calls() if id(call.module) in tap.index]
    own: Any = next((inputs for module, inputs in calls if module == index and inputs is not None), ((), {}))
    # A module that has just returned stands last in the order; what matters is what had returned before.
    returned = list(tap.order) if entering else list(tap.order)[:-1]
    stats = looks_bad(tensor)
    received = (position, stats, tensor) if entering and stats is not None else _bad_input(tap, index, own)
    if received is None:
        assert stats is not None
        state = bad_state(tap.modules[index], tap.names[index], untouched, known)
        inner = _last_inside(tap, returned, index, None)
        certain = not _wrote_to_input(tap, index, own)
        shown = Shown.read(position, stats)
        rows, low = _masked_rows(own), _neg_inf(own)
        return FirstSeen(index, shown, after=inner, state=state, masked_rows=rows, neg_inf=low, certain=certain)
    source = tap.source_of(received[2])
    if source is not None:
        return FirstSeen(source, Shown.read(*received[:2]), index, ignored=True)
    around = [(module, inputs) for module, inputs in calls if module != index]
    receiver = index
    for outer, inputs in around:
        given = _given(tap, outer, inputs, received)
        if given is None:
            state = bad_state(tap.modules[outer], tap.names[outer], untouched, known)
            return _made_between(tap, outer, receiver, received, returned, state, certain=inputs is not None)
        receiver, received = outer, given
    if not around and returned and index != 0:
        return FirstSeen(None, Shown.read(*received[:2]), index, returned[-1])
    return FirstSeen(None, Shown.read(*received[:2]), receiver)


def _given(tap: ModuleHooks, outer: int, inputs: Any, received: _Bad) -> _Bad | None:
    """What is bad in what a running module was called with; a method that was called instead tells less."""
    if inputs is not None:
        return _bad_input(tap, outer, inputs)
    return received if passed_from_outside(tap.modules[0], received[2]) else None


def _made_between(
    tap: ModuleHooks,
    outer: int,
    receiver: int,
    received: _Bad,
    returned: Sequence[int],
    state: BadState | None,
    *,
    certain: bool,
) -> FirstSeen:
    inside = inside_of(tap.modules[outer])
    return FirstSeen(
        outer,
        Shown.read(*received[:2]),
        receiver,
        _last_inside(tap, returned, outer, receiver),
        state,
        _masked_rows(inside.variables),
        bad_locals=_bad_names(inside.variables),
        certain=certain,
        where=inside.line,
    )


def first_seen_on_device(
    tap: ModuleHooks,
    measured: ForwardExtremes,
    number: int,
    shown: Shown,
    untouched: dict[int, int],
    known: KnownState,
    neg_inf: str | None = None,
) -> FirstSeen:
    """The same for the first bad place of a forward, read before the step: all places before it were good.

    Parameters are still as the forward used them, and are read exactly.
    """
    place = measured.places[number]
    began, ended = measured.spans[number]
    returned = measured.order[:ended]
    if not place.entering:
        state = bad_state(tap.modules[place.module], tap.names[place.module], untouched, known)
        # It stands in the order itself by now.
        inside = [index for index in measured.order[began:ended] if index != place.module]
        return FirstSeen(place.module, shown, after=inside[-1] if inside else None, state=state, neg_inf=neg_inf)
    if place.source is not None:
        return FirstSeen(place.source, shown, place.module, ignored=True)
    if place.module == 0:
        return FirstSeen(None, shown, 0)
    if place.caller is None:
        return FirstSeen(None, shown, place.module, returned[-1] if returned else None)
    state = bad_state(tap.modules[place.caller], tap.names[place.caller], untouched, known)
    inside = measured.order[began:ended]
    return FirstSeen(place.caller, shown, place.module, inside[-1] if inside else None, state)


def _bad_input(tap: ModuleHooks, index: int, inputs: Any) -> _Bad | None:
    """The first bad tensor that a running module was given and has not itself written to since."""
    args, kwargs = inputs
    given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    for position, tensor in walk(given):
        if (stats := looks_bad(tensor)) is not None and not _written(tap, index, position, tensor):
            return position, stats, tensor
    return None


def _written(tap: ModuleHooks, index: int, position: str, tensor: Tensor) -> bool:
    if position != "[0]":
        return False
    if index in tap.entered:
        noted, _ = tap.entered[index]
        return noted is not None and version_of(tensor) != noted
    # An in-place layer of torch's: its input was tested when it came in.
    return bool(getattr(tap.modules[index], "inplace", False))


def _wrote_to_input(tap: ModuleHooks, index: int, inputs: Any) -> bool:
    """Whether a module that is bad now has written to what it was given, so that nobody knows what came in."""
    args, _ = inputs
    first = args[0] if args else None
    return index in tap.entered and isinstance(first, Tensor) and _written(tap, index, "[0]", first)


def _bad_names(variables: dict[str, Any]) -> tuple[str, ...]:
    """Local variables of the maker's code that are bad tensors."""
    return tuple(
        name for name, value in variables.items() if isinstance(value, Tensor) and looks_bad(value) is not None
    )


def _masked_rows(inputs: Any) -> int:
    """Rows along the last dimension that are -inf throughout, in tensors that hold -inf as a mask does."""
    for _, tensor in walk(inputs):
        stats = describe(tensor)
        if stats is not None and stats.only_neg_inf and tensor.dim():
            return int((tensor == -float("inf")).all(-1).sum())
    return 0


def _neg_inf(inputs: Any) -> str | None:
    """The position of the first input that holds -inf and neither NaN nor +inf."""
    args, kwargs = inputs
    for position, tensor in walk({**dict(enumerate(args)), **kwargs}):
        stats = describe(tensor)
        if stats is not None and stats.only_neg_inf:
            return position
    return None


def _last_inside(tap: ModuleHooks, returned: Sequence[int], outer: int, receiver: int | None) -> int | None:
    """The module that `outer` had called last, apart from what the receiver itself has called since."""
    if outer in tap.entered:
        returned = returned[tap.entered[outer][1] :]
    names = tap.names
    prefix = f"{names[outer]}." if names[outer] else ""
    own = None if receiver is None else f"{names[receiver]}."
    for index in reversed(returned):
        if own is not None and names[index].startswith(own):
            continue
        if index != outer and (outer in tap.entered or names[index].startswith(prefix)):
            return index
    return None
