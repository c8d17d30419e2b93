"""What counts as the same answer of a model, and where two forwards part.

Every module's inputs and outputs of both are compared in the order in which they came.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpt_guard.hooks.tensors import walk
from gpt_guard.records import SourceLine

SAME_SHAPE = 64.0
"""Roundings allowed between two forwards of one shape. torch promises no bit-equality (its notes on numerical
accuracy); a leak through an untrained attention layer of width 1000 is a thousand times as large in float32."""

Pick = Callable[[Tensor], "Tensor | None"]
"""The part of a tensor that should not have changed; None where a tensor has no such part."""


def difference(one: Tensor, other: Tensor) -> Tensor:
    """`|one - other|` elementwise, where equal infinities and NaN in both count as equal, NaN in one as infinite."""
    one, other = one.detach(), other.detach()
    if one.is_complex():
        one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
    if not one.is_floating_point():
        one, other = one.double(), other.double()
    apart = (one - other).abs()
    apart = apart.masked_fill((one == other) | (one.isnan() & other.isnan()), 0.0)
    return apart.nan_to_num(nan=float("inf"), posinf=float("inf"))


def rounding(values: Tensor, roundings: float = SAME_SHAPE) -> float:
    """How far values of this dtype and size may be apart by rounding alone; reads the device."""
    if not values.is_floating_point() or not values.numel():
        return 0.0
    finite = values.detach().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return float(roundings * torch.finfo(values.dtype).eps * finite.abs().max())


def across_shapes(values: Tensor) -> float:
    """The same where the shapes or the places of rows differ: half of the digits, `sqrt(eps)`.

    Kernels are chosen by shape, and their sums run in another order.
    """
    eps = torch.finfo(values.dtype).eps if values.is_floating_point() else 1.0
    return rounding(values, eps**-0.5)


class ModuleEvent(NamedTuple):
    """Tensors entering or leaving a module; `caller` is the module whose code was running around it."""

    path: str
    entering: bool
    caller: str | None
    tensors: tuple[Tensor, ...]


class FirstDifference(NamedTuple):
    """The module that first made a difference: its path ("" is the model itself), and how that is known."""

    path: str
    module: nn.Module
    origin: str

    @property
    def where(self) -> SourceLine | None:
        """The first line of its forward, where that is not torch's own code."""
        kind = type(self.module)
        if kind.__module__.startswith("torch."):
            return None
        try:
            code = inspect.unwrap(kind.forward).__code__
        except AttributeError:  # scripted, or written in C
            return None
        return SourceLine(file=code.co_filename, line=code.co_firstlineno, function=code.co_qualname)

    @property
    def named(self) -> dict[str, Any]:
        """The fields of a finding that say where."""
        kind = type(self.module).__name__
        return {"module": self.path, "module_class": kind, "origin": self.origin, "where": self.where}


def traced(model: nn.Module, run: Callable[[], Any]) -> list[ModuleEvent]:
    """Run something and return what entered and left each module. Copies everything: only after a failure.

    The hooks are gone afterwards, also after an exception.
    """
    events: list[ModuleEvent] = []
    running: list[str] = []

    def note(path: str, entering: bool, value: Any) -> None:
        # Cloned: what is changed in place later (`x += ...`) must not change here.
        tensors = tuple(tensor.detach().clone() for _, tensor in walk(value))
        events.append(ModuleEvent(path, entering, running[-1] if running else None, tensors))

    def before(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            note(path, True, (args, kwargs))
            running.append(path)

        return hook

    def after(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if path in running:
                del running[len(running) - 1 - running[::-1].index(path) :]
            note(path, False, output)

        return hook

    handles = []
    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(before(path), with_kwargs=True))
        handles.append(module.register_forward_hook(after(path)))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return events


def first_difference(
    model: nn.Module, one: Sequence[ModuleEvent], other: Sequence[ModuleEvent], pick: Pick
) -> FirstDifference | None:
    """The module in which two forwards part, judged by `pick` of each tensor; None where no module shows it.

    A module whose inputs agree and whose output does not made the difference itself. If an input differs while
    everything before agreed, the code of the module around it did, between its children.
    """
    paths = dict(model.named_modules())
    last: str | None = None
    for first, second in zip(one, other, strict=False):
        if first[:3] != second[:3]:
            return None  # the two took different ways: experts, early exit
        if any(_apart(a, b, pick) for a, b in zip(first.tensors, second.tensors, strict=False)):
            return _blame(paths, first, last)
        if not first.entering:
            last = first.path
    return None


def _apart(one: Tensor, other: Tensor, pick: Pick) -> bool:
    if one.shape != other.shape or one.is_complex():
        return False
    a, b = pick(one), pick(other)
    return a is not None and b is not None and bool(a.numel()) and float(difference(a, b).max()) > rounding(one)


def _blame(paths: dict[str, nn.Module], event: ModuleEvent, last: str | None) -> FirstDifference | None:
    path = event.path if not event.entering else event.caller
    if path is None:
        return None
    made = paths[path]
    if event.entering:
        since = f" and after `{last}`" if last is not None and _inside(last, path) else ""
        origin = f"its own code made it, before `{event.path}`{since}: what enters `{event.path}` has changed already"
    elif any(True for _ in made.children()):
        origin = "its own code made it: what entered it and what its children returned had not changed"
    else:
        origin = "what entered it had not changed, what it returned had"
    return FirstDifference(path, made, origin)


def _inside(path: str, around: str) -> bool:
    return path != around and (not around or path.startswith(f"{around}."))


def at_positions(rows: int, length: int, part: slice) -> Pick:
    """Pick positions of a tensor that has them: [B, T, ...], [T, B, ...], [B, H, T, ...], [B, C, T] or [B * T, ...]."""

    def pick(tensor: Tensor) -> Tensor | None:
        shape = tuple(tensor.shape)
        if shape[:2] == (rows, length):
            return tensor[:, part]
        if shape[:2] == (length, rows):
            return tensor[part]
        if len(shape) >= 3 and (shape[0], shape[2]) == (rows, length):
            return tensor[:, :, part]
        if len(shape) >= 2 and shape[0] == rows * length:
            return tensor.reshape(rows, length, -1)[:, part]
        return None

    return pick


def at_row(rows: int, length: int, row: int) -> Pick:
    """Pick one row of the batch, in the same layouts."""

    def pick(tensor: Tensor) -> Tensor | None:
        shape = tuple(tensor.shape)
        if len(shape) >= 2 and shape[:2] == (length, rows) and shape[0] != rows:
            return tensor[:, row]
        if len(shape) >= 2 and shape[0] == rows:
            return tensor[row]
        if len(shape) >= 2 and shape[0] == rows * length:
            return tensor.reshape(rows, length, -1)[row]
        return None

    return pick


def everything(tensor: Tensor) -> Tensor:
    """Pick all of a tensor."""
    return tensor
