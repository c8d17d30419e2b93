"""IndexCalls: what an embedding is asked for that it does not have, named before torch's error or the device assert."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from gpt_guard.callbacks.attention.masks import padding_inside
from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.settings import check_types
from gpt_guard.catalogue import finding
from gpt_guard.hooks.functions.function_calls import FunctionCall
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Observation
from gpt_guard.records.render import number

_POSITION_NAMES = ("pos", "wpe")


class IndexCalls(Guard):
    """Looks at the ids that enter an embedding, before the lookup, in inspected forwards; reads the device there.

    An id without a row is an IndexError on the CPU and, on an accelerator, an assert that ends the process's use of the
    device and points to an unrelated line: here the module, the largest id and the size of its table are named first.
    Ids that are the same consecutive numbers in each row are positions, and a table that is too short for them has
    causes of its own.

    - `padding_share`: share of an input `[B, T]` from which `padding_idx` between real tokens is reported: 1 %, since
      padding stands at an end of a row, and less changes no loss that anyone would look at.
    """

    inspects: ClassVar[bool] = True
    judged_at: ClassVar[frozenset[Moment]] = frozenset()

    def __init__(self, padding_share: float = 0.01) -> None:
        check_types(IndexCalls, locals())
        self._padding_share = padding_share

    def attach(self, watch: Watch) -> None:
        super().attach(watch)
        watch.inspection.functions.listen(("embedding",), self._look_up, before=True)

    def judge(self, seen: Observation) -> Iterable[Finding]:
        """Everything is reported at the call."""
        return ()

    def _look_up(self, call: FunctionCall) -> None:
        ids, table = call.get("input"), call.get("weight")
        if not _readable(ids) or not isinstance(table, Tensor) or table.dim() != 2 or not ids.numel():
            return
        low, high = (int(end) for end in ids.aminmax())
        if low < 0 or high >= table.size(0):
            self.watch.submit(self._missing(call, ids, low, high, table.size(0)))
        elif ids.dim() == 2:
            self._padding_used(call, ids)

    def _missing(self, call: FunctionCall, ids: Tensor, low: int, high: int, rows: int) -> Finding:
        place, path = self._place(call)
        bad = (ids < 0) | (ids >= rows)
        first = tuple(int(each) for each in bad.nonzero()[0])
        count = int(bad.sum())
        positions = _consecutive(ids) or any(name in path.rpartition(".")[2].lower() for name in _POSITION_NAMES)
        what = "position" if positions else "id"
        worst = low if low < 0 else high
        seen = (
            f"The embedding {f'`{path}` ' if path else ''}has {rows} rows, 0 to {rows - 1}, and is asked for {what} "
            f"{worst}: {count} of {ids.numel()} ids have no row, the first at {list(first)}. The lookup fails next."
        )
        return finding(
            "GG695" if positions else "GG631",
            seen,
            likely=_likely_positions(low, high, ids, rows) if positions else _likely_ids(low, high, ids[bad], rows),
            evaluation=self.watch.evaluation,
            evidence={"smallest": low, "largest": high, "rows": rows, "count": count, "first": list(first)},
            **place,
        )

    def _padding_used(self, call: FunctionCall, ids: Tensor) -> None:
        padding = call.get("padding_idx")
        if not isinstance(padding, int) or padding < 0:
            return
        share = float(padding_inside(ids, padding).float().mean())
        if share < self._padding_share:
            return
        place, path = self._place(call)
        self.watch.submit(
            finding(
                "GG696",
                f"{number(100 * share)} % of the ids that enter the embedding {f'`{path}` ' if path else ''}are "
                f"padding_idx={padding} with real tokens on both sides: its row gets no gradient.",
                evidence={"share": share, "padding_idx": padding},
                **place,
            )
        )

    def _place(self, call: FunctionCall) -> tuple[dict[str, Any], str]:
        """What a finding says of where and when, and the path of the embedding."""
        place = self.watch.calls.place(call)
        known = {"step": self.watch.step, "moment": Moment.FORWARD, "guard": self.name, **place.fields}
        return known, place.module or ""


def _readable(ids: object) -> bool:
    """Plain integers whose values are there; while a CUDA graph is recorded nothing can be read."""
    if type(ids) is not Tensor or ids.is_floating_point() or ids.is_meta or ids.dtype is torch.bool:
        return False
    return not (ids.is_cuda and torch.cuda.is_current_stream_capturing())


def _consecutive(ids: Tensor) -> bool:
    """Whether each row counts up by one, and all rows are the same: what `torch.arange` gives."""
    if ids.dim() not in (1, 2) or ids.size(-1) < 2:
        return False
    rows = ids.reshape(-1, ids.size(-1))
    return bool((rows.diff(dim=1) == 1).all()) and bool((rows == rows[0]).all())


def _likely_positions(low: int, high: int, ids: Tensor, rows: int) -> list[str]:
    if low > 0 and ids.size(-1) <= rows:
        return ["offset"]
    return ["longer_rows"] if high - rows < ids.size(-1) else ["offset"]


def _likely_ids(low: int, high: int, bad: Tensor, rows: int) -> list[str]:
    if low in (-100, -1):
        return ["ignore_index"]
    if low < 0:
        return ["wrapped", "ignore_index"]
    if high == rows and bool((bad == rows).all()):
        return ["off_by_one", "special"]
    return ["special", "model_size"] if bad.unique().numel() == 1 else ["other_tokenizer", "model_size"]
