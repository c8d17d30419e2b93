"""AutocastUse: mixed precision that was asked for and does not reach the model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.settings import check_types
from gpt_guard.catalogue import finding
from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.functions.function_calls import FunctionCall
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Observation, SourceLine

# Losses and norms run in float32 under autocast on purpose; so do products as small as these on their way there.
_LEAST = 2


class AutocastUse(Guard):
    """Looks, in the inspected steps, at the dtype in which matrix products of the model come out while autocast is on.

    Told are products in float32 of float32 inputs while autocast is on for the model's device, with their module and
    line, and a loss under autocast after a forward that ran without. Silent where autocast is nowhere on. A part kept
    out on purpose by `autocast(enabled=False)` is not told: there autocast is off. `least` is the number of such
    products that a module must make before it counts.

    Raises GuardUsageError for `least` below 1.
    """

    inspects: ClassVar[bool] = True

    def __init__(self, *, least: int = _LEAST) -> None:
        check_types(AutocastUse, locals())
        if least < 1:
            raise GuardUsageError(f"least is {least}; it counts matrix products and must be at least 1")
        self._least = least
        self._said: set[str] = set()
        self._clear()

    def _clear(self) -> None:
        self._full: dict[str, tuple[int, SourceLine | None, str]] = {}
        self._cast = 0
        self._without = 0
        self._loss: SourceLine | None = None
        self._elsewhere: str | None = None

    def attach(self, watch: Watch) -> None:
        super().attach(watch)
        self._clear()
        functions = watch.inspection.functions
        functions.listen(["product"], self._multiplied)
        functions.listen(["cross_entropy", "mse_loss", "nll_loss"], self._lost)

    def detach(self) -> None:
        self._clear()
        super().detach()

    def _multiplied(self, call: FunctionCall) -> None:
        out, inside = call.result, call.module
        if not isinstance(out, Tensor) or inside is None or self.watch.evaluation or not out.is_floating_point():
            return
        device = out.device.type
        if torch.is_autocast_enabled(device):
            if out.dtype is torch.float32:
                self._note(call, inside)
            else:
                self._cast += 1
        else:
            self._without += 1
            others = [
                kind for kind in ("cuda", "cpu", "mps", "xpu") if kind != device and torch.is_autocast_enabled(kind)
            ]
            self._elsewhere = others[0] if others else self._elsewhere

    def _note(self, call: FunctionCall, inside: nn.Module) -> None:
        place = self.watch.tap.index.get(id(inside))
        if place is None:
            return
        path = self.watch.tap.names[place]
        count, line, kind = self._full.get(path, (0, None, ""))
        self._full[path] = (count + 1, line or call.line, kind or type(inside).__name__)

    def _lost(self, call: FunctionCall) -> None:
        out = call.result
        if isinstance(out, Tensor) and not self.watch.evaluation and torch.is_autocast_enabled(out.device.type):
            self._loss = self._loss or call.line

    def judge(self, seen: Observation) -> Iterable[Finding]:
        """Tell once a step has shown it."""
        if not self._full and not self._without:
            return
        if self._elsewhere is not None and not self._cast:
            device = next((each.device.type for each in self.watch.parameters.values()), "cpu")
            yield from self._finding(
                seen,
                "other_device",
                f"autocast is on for {self._elsewhere}, and the model computes on {device}: nothing is cast.",
                None,
                "",
                None,
            )
        elif self._loss is not None and not self._cast and not self._full:
            yield from self._finding(
                seen,
                "outside",
                f"The loss was computed under autocast, and all {self._without} matrix products of the model before it "
                f"without: the model is called outside of the context.",
                None,
                "",
                self._loss,
            )
        for path, (count, line, kind) in self._full.items():
            if count >= self._least and self._cast:
                yield from self._finding(
                    seen,
                    "custom",
                    f"{count} matrix products of `{path}` ({kind}) came out in float32 under autocast; "
                    f"{self._cast} others of the model were cast.",
                    path,
                    kind,
                    line,
                )
        if not self.watch.inspection.active:
            self._clear()

    def _finding(
        self, seen: Observation, likely: str, text: str, path: str | None, kind: str, line: SourceLine | None
    ) -> Iterable[Finding]:
        cause = path if path is not None else likely
        if cause in self._said:
            return
        self._said.add(cause)
        yield finding(
            "GG510",
            text,
            likely=[likely],
            step=seen.step,
            moment=Moment.FORWARD,
            module=path,
            module_class=kind or None,
            where=line,
            cause_id=cause,
            evidence={"cast": self._cast, "float32": sum(each[0] for each in self._full.values()) + self._without},
            guard=self.name,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"said": sorted(self._said)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._said = set(state["said"])
