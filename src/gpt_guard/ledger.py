"""The ledger: device scalars wait here until the host reads them all at once.

A read of a device tensor stalls the host until the device has caught up. So nothing that measures reads: it puts its
scalars (or short vectors) here, and Guardian reads once per step, in one transfer per device and dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Readings = dict[str, Any]


class Ledger:
    """Scalars and short vectors waiting for the one host read of the step.

    Entries are kept under a label, so that what was measured after step 7 is still told under step 7 when it is read
    together with step 8.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[object, str, Any]] = []
        self.label: object = None

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, name: str, value: Tensor | float | list[float]) -> None:
        """Keep a detached scalar or vector (or plain floats) under a name; does not read the device."""
        self._waiting.append((self.label, name, value.detach() if isinstance(value, Tensor) else value))

    def read(self) -> dict[object, Readings]:
        """Read everything that waits, by label and name; vectors come back as lists. The one place that syncs."""
        waiting, self._waiting = self._waiting, []
        values: list[Any] = [value for _, _, value in waiting]
        _fetch(values)
        found: dict[object, Readings] = {}
        for (label, name, _), value in zip(waiting, values, strict=True):
            found.setdefault(label, {})[name] = value
        return found

    def drop(self, prefix: str) -> None:
        """Forget the entries whose name starts so: they belong to gradients that were thrown away."""
        if self._waiting:
            self._waiting = [entry for entry in self._waiting if not entry[1].startswith(prefix)]

    def clear(self) -> None:
        """Forget what waits, without reading it."""
        self._waiting.clear()


def _fetch(values: list[Any]) -> None:
    """Replace the tensors in `values` by Python numbers, with one transfer for each accelerator and dtype."""
    batches: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, value in enumerate(values):
        if isinstance(value, Tensor):
            if value.device.type == "cpu":
                values[place] = value.tolist()
            else:
                batches.setdefault((value.device, value.dtype), []).append(place)
    for places in batches.values():
        host = torch.cat([values[place].reshape(-1) for place in places]).tolist()
        start = 0
        for place in places:
            shape, count = values[place].shape, values[place].numel()
            values[place] = host[start] if shape == () else host[start : start + count]
            start += count
