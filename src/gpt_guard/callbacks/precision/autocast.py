"""AutocastUse: mixed precision that does not reach the model, or in which its gradients vanish."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.precision.underflow import Underflow
from gpt_guard.callbacks.settings import check_types
from gpt_guard.catalogue import finding
from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.functions.call_record import CallPlace
from gpt_guard.hooks.functions.function_calls import FunctionCall
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Observation, SourceLine

# Losses and norms run in float32 under autocast on purpose; so do products as small as these on their way there.
_LEAST = 2


class AutocastUse(Guard):
    """Looks, in the inspected steps, at the dtype in which matrix products of the model come out while autocast is on.

    It reports products in float32 of float32 inputs while autocast is on for the model's device, with their module and
    line, and a loss under autocast after a forward that ran without. Silent where autocast is nowhere on. A part kept
    out on purpose by `autocast(enabled=False)` is not reported: there autocast is off. `least` is the number of such
    products that a module must make before it counts.

    Where products are in float16 and no GradScaler is in use, the share of gradient elements that are exactly zero is
    read with the step (GG512).

    Raises GuardUsageError for `least` below 1.
    """

    inspects: ClassVar[bool] = True

    def __init__(self, *, least: int = _LEAST) -> None:
        check_types(AutocastUse, locals())
        if least < 1:
            raise GuardUsageError(f"least is {least}; it counts matrix products and must be at least 1")
        self._least = least
        self._reported: set[str] = set()
        self._underflow = Underflow()
        self._clear()

    def _clear(self) -> None:
        self._full: dict[str, tuple[int, CallPlace]] = {}
        self._cast = 0
        self._without = 0
        self._loss: SourceLine | None = None
        self._elsewhere: str | None = None
        self._underflow.half = 0

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
        out = call.result
        if not isinstance(out, Tensor) or call.module is None or self.watch.evaluation or not out.is_floating_point():
            return
        device = out.device.type
        self._underflow.half += out.dtype is torch.float16
        if not torch.is_autocast_enabled(device):
            self._without += 1
            others = (
                kind for kind in ("cuda", "cpu", "mps", "xpu") if kind != device and torch.is_autocast_enabled(kind)
            )
            self._elsewhere = next(others, self._elsewhere)
        elif out.dtype is not torch.float32:
            self._cast += 1
        elif (place := self.watch.calls.place(call)).module is not None:
            count, first = self._full.get(place.module, (0, place))
            self._full[place.module] = (count + 1, first)

    def _lost(self, call: FunctionCall) -> None:
        out = call.result
        if isinstance(out, Tensor) and not self.watch.evaluation and torch.is_autocast_enabled(out.device.type):
            self._loss = self._loss or call.line

    def after_backward(self) -> None:
        if "GG512" not in self._reported:
            self._underflow.measure(self.watch)

    def judge(self, seen: Observation) -> Iterable[Finding]:
        """Report once a step has shown it."""
        if "GG512" not in self._reported and (found := self._underflow.judge(self.watch, seen)) is not None:
            self._reported.add("GG512")
            yield found
        if not self._full and not self._without:
            return
        float32 = sum(count for count, _ in self._full.values()) + self._without
        for likely, text, place in self._issues():
            # A cause that is the model's own module is known by its path.
            cause = likely if place.module is None else place.module
            if cause not in self._reported:
                self._reported.add(cause)
                yield finding(
                    "GG510",
                    text,
                    likely=[likely],
                    step=seen.step,
                    moment=Moment.FORWARD,
                    cause_id=cause,
                    evidence={"cast": self._cast, "float32": float32},
                    guard=self.name,
                    **place.fields,
                )
        if not self.watch.inspection.active:
            self._clear()

    def _issues(self) -> Iterator[tuple[str, str, CallPlace]]:
        """Cause, text and place of each thing that is wrong."""
        if self._elsewhere is not None and not self._cast:
            device = next((each.device.type for each in self.watch.parameters.values()), "cpu")
            text = f"autocast is on for {self._elsewhere}, and the model computes on {device}: nothing is cast."
            yield "other_device", text, CallPlace(None, None, None)
        elif self._loss is not None and not self._cast and not self._full:
            text = (
                f"The loss was computed under autocast, and all {self._without} matrix products of the model before it "
                f"without: the model is called outside of the context."
            )
            yield "outside", text, CallPlace(self._loss, None, None)
        for path, (count, place) in self._full.items():
            if count >= self._least and self._cast:
                text = (
                    f"{count} matrix products of `{path}` ({place.module_class}) came out in float32 under autocast; "
                    f"{self._cast} others of the model were cast."
                )
                yield "custom", text, place

    def state_dict(self) -> dict[str, Any]:
        return {"said": sorted(self._reported)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._reported = set(state["said"])
