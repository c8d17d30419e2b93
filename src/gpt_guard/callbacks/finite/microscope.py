"""Microscope: which outputs grow towards the end of their dtype's range, told before they get there."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.settings import check_types
from gpt_guard.catalogue import finding
from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.copies import HookSet
from gpt_guard.hooks.module_hooks import ModuleHooks
from gpt_guard.hooks.output_hooks import Hook
from gpt_guard.hooks.tensors import readable, walk, watchable
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Observation

_READING = "microscope"
# Growth within one window that no warm-up shows; doubling once or twice is what learning does.
_GROWN = 4.0
# Fewer steps give no rate.
_LEAST_STEPS = 5
# From half of the range on, one sum of two such values leaves it.
_SHARE = 0.5
_LISTED = 5


@dataclass
class Row:
    """One module: what its outputs are now, and how large they were over the last steps."""

    module: str
    module_class: str
    dtype: torch.dtype
    low: float = 0.0
    high: float = 0.0
    rms: float = 0.0
    sizes: deque[float] = field(default_factory=deque)

    @property
    def size(self) -> float:
        """The largest magnitude; infinities and the dtype's lowest number, which masks are made of, are left out."""
        low = abs(self.low) if math.isfinite(self.low) and self.low > torch.finfo(self.dtype).min else 0.0
        return max(low, abs(self.high)) if math.isfinite(self.high) else low

    @property
    def share(self) -> float:
        """The part of the dtype's range that is used."""
        return self.size / torch.finfo(self.dtype).max

    @property
    def growth(self) -> float:
        """How many times larger than at the beginning of the window."""
        return self.size / self.sizes[0] if self.sizes and self.sizes[0] > 0 else 1.0

    @property
    def steps_left(self) -> float:
        """Steps until the range is left if it goes on growing as it did over the window; infinite if it does not."""
        rate = math.log(self.growth) / max(len(self.sizes) - 1, 1) if self.growth > 1 else 0.0
        return -math.log(self.share) / rate if rate > 0 and self.share > 0 else math.inf


class Microscope(Guard):
    """Warn (GG112) before a module's outputs leave the range of their dtype.

    Reported once, of the module that is nearest to it: it has grown at least fourfold over the last steps, and either
    uses half of the range or will leave it within `window` steps at this rate. Each training forward costs two more
    reading passes over every output of every module; one vector joins the host read of the step. Modules inside of
    compiled ones are not seen.

    - `window`: how many steps growth is measured over.
    """

    def __init__(self, *, window: int = 20) -> None:
        check_types(Microscope, locals())
        if window < _LEAST_STEPS:
            raise GuardUsageError(
                f"Microscope(window={window}) cannot work: a rate takes at least {_LEAST_STEPS} steps"
            )
        self.window = window
        self._ranges: OutputRanges | None = None
        self._measured: RangesRead | None = None
        self._rows: dict[int, Row] = {}
        self._told = False

    def attach(self, watch: Watch) -> None:
        """Hook every module."""
        super().attach(watch)
        self._ranges = OutputRanges(watch.tap)
        self._ranges.open()

    def detach(self) -> None:
        """Take the hooks away; the table stays."""
        if self._ranges is not None:
            self._ranges.close()
        self._ranges = self._measured = None
        self._told = False
        super().detach()

    def before_step(self, optimizer: Optimizer) -> None:
        """Hand what was measured to the host read that follows."""
        if self._ranges is not None and (measured := self._ranges.take()) is not None:
            self._measured = measured
            self.watch.ledger.put(_READING, measured.values.reshape(-1))

    def judge(self, seen: Observation) -> Iterable[Finding]:
        """Compare each module with what it was."""
        if self._measured is None or _READING not in seen.readings:
            return
        self._take_in(self._measured, seen.readings[_READING])
        self._measured = None
        if not self._told and (near := self._nearest()) is not None:
            self._told = True
            yield self._warning(near, seen)

    def _take_in(self, measured: RangesRead, numbers: list[float]) -> None:
        tap = self.watch.tap
        for place, (index, dtype) in enumerate(zip(measured.modules, measured.dtypes, strict=True)):
            row = self._rows.get(index)
            if row is None or row.dtype is not dtype:
                kind = type(tap.modules[index]).__name__
                row = self._rows[index] = Row(tap.names[index], kind, dtype, sizes=deque(maxlen=self.window + 1))
            row.low, row.high, row.rms = numbers[3 * place : 3 * place + 3]
            if row.size > 0:
                row.sizes.append(row.size)

    def _nearest(self) -> Row | None:
        near = [row for row in self._rows.values() if len(row.sizes) > _LEAST_STEPS and row.growth >= _GROWN]
        near = [row for row in near if row.share >= _SHARE or row.steps_left <= self.window]
        # Of a block and its last layer, which return the same, the one further inside comes first.
        return max(near, key=lambda row: (row.share, row.module.count("."), row.module), default=None)

    def _warning(self, row: Row, seen: Observation) -> Finding:
        half = row.dtype is torch.float16
        whose = f"`{row.module}`" if row.module else "the model"
        dtype = str(row.dtype).removeprefix("torch.")
        left = (
            f" At this rate it is left within {max(math.ceil(row.steps_left), 1)} steps."
            if row.steps_left < 1e3
            else ""
        )
        return finding(
            "GG112",
            f"The output of {whose} has grown {row.growth:.3g}x in {len(row.sizes) - 1} steps, to {row.size:.4g}: "
            f"{row.share:.2g} of the range of {dtype}, which ends at {torch.finfo(row.dtype).max:.5g}.{left}",
            likely=["half_range"] if half else ["diverging"],
            module=row.module,
            module_class=row.module_class,
            step=seen.step,
            moment=Moment.BEFORE_STEP,
            evidence={"modules": [_told(each) for each in self._largest()]},
            cause_id="range",
        )

    def _largest(self) -> list[Row]:
        return sorted(self._rows.values(), key=lambda row: row.share, reverse=True)[:_LISTED]

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """The newest step as aligned text, a line for each module in the order of their first return.

        `of range` is the share of the dtype's range that the largest value uses, `growth` that value against the first
        step of the window.
        """
        if not self._rows:
            return "No step has been measured yet."
        lines = [("module", "dtype", "min", "max", "rms", "of range", "growth")]
        for row in self._rows.values():
            dtype = str(row.dtype).removeprefix("torch.")
            figures = (f"{row.low:.4g}", f"{row.high:.4g}", f"{row.rms:.4g}", f"{row.share:.2g}", f"{row.growth:.3g}x")
            lines.append((row.module or "(model)", dtype, *figures))
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        )


def _told(row: Row) -> dict[str, Any]:
    return {
        "module": row.module,
        "dtype": str(row.dtype).removeprefix("torch."),
        "min": row.low,
        "max": row.high,
        "rms": row.rms,
        "share": row.share,
        "growth": row.growth,
    }


class RangesRead(NamedTuple):
    """The modules that were measured, by index, with the dtype of their outputs, and a tensor of shape `[modules, 3]`.

    Its columns are minimum, maximum and root mean square, over all outputs and calls of the step.
    """

    modules: list[int]
    dtypes: list[torch.dtype]
    values: Tensor


class OutputRanges:
    """Hooks on every module that a tap watches; two reading passes over each output, none of them read by the host."""

    def __init__(self, tap: ModuleHooks) -> None:
        self._tap = tap
        self._hooks = HookSet()
        self._found: dict[int, tuple[torch.dtype, Tensor]] = {}

    def open(self) -> None:
        """Begin to measure."""
        for index, module in enumerate(self._tap.modules):
            self._hooks.after_forward(module, _Look(self._tap, index, module, self))

    def close(self) -> None:
        """Take the hooks away; may run twice."""
        self._hooks.close()
        self._found.clear()

    @torch.no_grad()
    def note(self, index: int, output: Any) -> None:
        """Measure the floating-point tensors of one output; not in a forward without gradients."""
        for _, tensor in walk(output):
            values = readable(tensor) if watchable(tensor) else None
            if values is None:
                continue
            wide = values.dtype if values.dtype is torch.float64 else torch.float32
            norm = torch.linalg.vector_norm(values, dtype=wide) / math.sqrt(values.numel())
            low, high = torch.aminmax(values)
            row = torch.stack([low.to(wide), high.to(wide), norm])
            before = self._found.get(index)
            if before is not None:
                row = torch.cat([torch.minimum(row[:1], before[1][:1]), torch.maximum(row[1:], before[1][1:])])
            self._found[index] = (values.dtype, row)

    def take(self) -> RangesRead | None:
        """What the step has brought; None for nothing. Reads nothing."""
        found, self._found = self._found, {}
        if not found:
            return None
        rows = [row for _, row in found.values()]
        device = rows[0].device
        stacked = torch.stack(
            [row.to(device, torch.float64 if device.type == "cpu" else torch.float32) for row in rows]
        )
        return RangesRead(list(found), [dtype for dtype, _ in found.values()], stacked)


class _Look(Hook):
    def __init__(self, tap: ModuleHooks, index: int, module: nn.Module, ranges: OutputRanges) -> None:
        super().__init__(tap, index, module)
        self._ranges = ranges

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.active(module) and torch.is_grad_enabled():
            self._ranges.note(self.index, output)
