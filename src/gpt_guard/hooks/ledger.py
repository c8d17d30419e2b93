"""The ledger: device scalars wait here until the host reads them all at once.

A read of a device tensor stalls the host until the device has caught up. So nothing that measures reads: it puts its
scalars (or short vectors) here, and Guardian reads once per step, in one transfer per device and dtype.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

Readings = dict[str, Any]


class Ledger:
    """Scalars and short vectors waiting for the one host read of the step.

    Entries are kept under a label, so that what was measured after step 7 is still told under step 7 when it is read
    together with step 8. Of two entries of one name under one label the later one counts.
    """

    def __init__(self) -> None:
        self._waiting: dict[object, Readings] = {}
        self.label: object = None

    @property
    def waits(self) -> bool:
        """Whether anything does."""
        return bool(self._waiting)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, name: str, value: Any) -> None:
        """Keep a detached scalar or vector, or something on the host, under a name; does not read the device."""
        waiting = self._waiting.get(self.label)
        if waiting is None:
            waiting = self._waiting[self.label] = {}
        waiting[name] = value.detach() if isinstance(value, Tensor) else value

    def read(self) -> dict[object, Readings]:
        """Read everything that waits, by label and name; vectors come back as lists. The one place that syncs."""
        waiting, self._waiting = self._waiting, {}
        _fetch(waiting.values())
        return waiting

    def drop(self, prefix: str) -> None:
        """Forget the entries whose name starts so: they belong to gradients that were thrown away."""
        for label in list(self._waiting):
            kept = {name: value for name, value in self._waiting[label].items() if not name.startswith(prefix)}
            if kept:
                self._waiting[label] = kept
            else:
                del self._waiting[label]

    def clear(self) -> None:
        """Forget what waits, without reading it."""
        self._waiting.clear()


def _fetch(waiting: Iterable[Readings]) -> None:
    """Replace the tensors by Python numbers, in place, with one transfer for each accelerator and dtype."""
    batches: dict[tuple[torch.device, torch.dtype], list[tuple[Readings, str]]] = {}
    for readings in waiting:
        for name, value in readings.items():
            if isinstance(value, Tensor):
                if value.device.type == "cpu":
                    readings[name] = value.item() if value.dim() == 0 else value.tolist()
                else:
                    batches.setdefault((value.device, value.dtype), []).append((readings, name))
    for places in batches.values():
        values = [readings[name] for readings, name in places]
        host = torch.cat([value.reshape(-1) for value in values]).tolist()
        start = 0
        for (readings, name), value in zip(places, values, strict=True):
            count = value.numel()
            readings[name] = host[start] if value.shape == () else host[start : start + count]
            start += count
