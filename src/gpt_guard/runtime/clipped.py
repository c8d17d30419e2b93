"""What `clip_grad_norm_` has done to the gradients since the last backward, told by the call itself."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

from torch import Tensor

from gpt_guard.callbacks.loop_order.order_calls import NORM_CLIPS

# torch.nn.utils.clip_grad: the factor is min(1, max_norm / (total_norm + 1e-6)).
_EPSILON = 1e-6


class NormClip:
    """Follows the clipping of one set of parameters: `calls` since `begin`, and the `factor` of the only one.

    `factor` is None unless exactly one call has scaled exactly these parameters, in whatever order. Reads the total
    norm that the call was given: for parameters where a reading is free.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = list(parameters)
        self._ids: set[int] = set()
        self.calls = 0
        self.factor: float | None = None

    def open(self) -> None:
        """Begin to listen."""
        for patch in NORM_CLIPS:
            patch.add(self)

    def close(self) -> None:
        """Stop listening, and let the parameters go; may run twice."""
        for patch in NORM_CLIPS:
            patch.remove(self)
        self._parameters.clear()
        self._ids.clear()

    def begin(self) -> None:
        """A backward has begun: what was clipped before it does not count."""
        self.calls, self.factor = 0, None

    def norm_clipped(self, parameters: list[Tensor], max_norm: Any, total_norm: Any) -> None:
        """One call, of whoever it may be."""
        self.calls += 1
        self.factor = None
        if self.calls > 1 or not isinstance(total_norm, Tensor) or not self._all_of_ours(parameters):
            return
        factor = float(max_norm) / (total_norm.item() + _EPSILON)
        # A limit of zero or below does not clip: what it does is measured.
        if factor > 0.0:
            self.factor = min(1.0, factor)

    def _all_of_ours(self, parameters: list[Tensor]) -> bool:
        if len(parameters) != len(self._parameters):
            return False
        if all(map(is_, parameters, self._parameters)):
            return True
        self._ids = self._ids or set(map(id, self._parameters))
        return set(map(id, parameters)) == self._ids
