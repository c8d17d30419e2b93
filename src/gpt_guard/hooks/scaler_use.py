"""Whether a GradScaler is used in its order: scale, backward, unscale_, clip, scaler.step; told from the calls."""

from __future__ import annotations

from enum import IntEnum

from torch import Tensor

from gpt_guard.hooks.ledger import Ledger

State = list[tuple[int, int]]


class Misuse(IntEnum):
    """What the order of calls makes possible; the norms at the step decide whether it is so."""

    CLIPPED_SCALED = 1
    PLAIN_STEP = 2
    UNSCALED_LOSS = 3
    BOTH_STEPS = 4


class ScalerUse:
    """Follows the calls from the first backward of a step to the step of each optimizer; reads no values.

    Says nothing where it is not sure: where some losses of one step were scaled and others were not, or where nobody
    scales at all. `seen` is False until a scaler has scaled something: until then nothing is to be told to it.
    """

    def __init__(self) -> None:
        self.seen = False
        self.scale: Tensor | None = None
        self._carried: Tensor | None = None
        self._sure = True
        self._new = True
        self._after_backward: State = []
        self._unscaled: set[int] = set()
        self._applied: dict[int, State] = {}
        self._inside: int | None = None
        self._touched = False

    def scaled(self, scale: Tensor | None) -> None:
        """A loss was scaled by this."""
        self.seen = True
        self.scale = scale if scale is not None else self.scale

    def backward_ended(self, unit: Tensor | None, *, fresh: bool, state: State) -> None:
        """A backward of ours left gradients that carry `unit`; `fresh` if a loss was scaled just for it."""
        if unit is None and not self.seen:
            # Nobody has scaled anything so far: only that this step has had an unscaled backward is worth noting.
            self._new, self._after_backward = False, state
            return
        if self._new:
            self._new, self._sure, self._carried = False, True, unit
            self._unscaled.clear()
            self._applied.clear()
        elif (self._carried is None) != (unit is None) or self._unscaled:
            self._sure = False
        # A scale that is only kept from an earlier backward may not be that of this loss.
        self._sure = self._sure and fresh == (unit is not None)
        self._after_backward = state

    def unscales(self, index: int) -> None:
        """The loop calls `scaler.unscale_()` for an optimizer of ours."""
        self._unscaled.add(index)

    def scaler_steps(self, index: int, state: State) -> None:
        """`scaler.step()` begins for an optimizer of ours, with its gradients still as the loop has left them."""
        self._inside = index
        self._touched = state != self._after_backward

    def scaler_stepped(self) -> None:
        """`scaler.step()` returned."""
        self._inside = None

    def at_step(self, index: int, state: State) -> Misuse | None:
        """What may be wrong with the step that begins; None for every healthy order of calls."""
        if not self._sure:
            return None
        if self._inside == index:
            if self._carried is None:
                return None if self._new else Misuse.UNSCALED_LOSS
            return Misuse.CLIPPED_SCALED if self._touched and index not in self._unscaled else None
        if index in self._applied:
            return Misuse.BOTH_STEPS if self._applied[index] == state else None
        return Misuse.PLAIN_STEP if self._carried is not None and index not in self._unscaled else None

    def put(self, ledger: Ledger, index: int, state: State) -> None:
        """Leave what may be wrong, and the scale, for whoever judges the step."""
        if self.scale is not None and (misuse := self.at_step(index, state)) is not None:
            ledger.put("scaler.case", misuse.value)
            ledger.put("scaler.scale", self.scale)

    def step_ended(self, index: int, state: State) -> None:
        """The optimizer has made its step: the next backward begins another one."""
        self._new = True
        if self._inside == index:
            self._applied[index] = state
