"""Gradients that float16 has no number for: exact zeros beside values at the end of its range, without a loss scale."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpt_guard.catalogue import finding
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Observation
from gpt_guard.records.render import number

_SMALLEST = 2.0**-24
"""The smallest number of float16 above zero; half of it, and less, becomes zero."""
_NEAR = 64 * _SMALLEST
"""Where the largest element is below this, others of a hundredth of it are zero, not those of dead units alone."""
_SHARE = 0.5
_NAME = "autocast.gradient"


class Underflow:
    """Measures, after the backward of an inspected step, how many elements of each weight's gradient are exactly zero.

    Tables of embeddings are left out, whose rows are zero where a token does not occur. `half` is the number of
    products in float16 that were seen since it was last set to 0.
    """

    def __init__(self) -> None:
        self.half = 0
        self._names: list[str] = []

    def measure(self, watch: Watch) -> None:
        """Put the figures into the ledger; a few reductions for each weight, in inspected steps only."""
        if not self.half or watch.scaling or not watch.inspection.active:
            return
        tables = {id(each.weight) for each in watch.model.modules() if isinstance(each, nn.Embedding)}
        gradients = {name: each.grad for name, each in watch.parameters.items() if id(each) not in tables}
        plain = {
            name: grad.detach()
            for name, grad in gradients.items()
            if type(grad) is Tensor and grad.layout is torch.strided and grad.dim() >= 2 and grad.numel()
        }
        if not plain:
            return
        figures = [torch.stack(_figures(grad)) for grad in plain.values()]
        self._names = list(plain)
        # Those of a model that is spread over devices are read from each.
        for place, figure in enumerate(figures):
            watch.ledger.put(f"{_NAME}.{place}", figure)

    def judge(self, watch: Watch, seen: Observation) -> Finding | None:
        """GG512 where most elements of a weight's gradient were lost."""
        names, self._names = self._names, []
        lost: dict[str, tuple[float, float]] = {}
        for place, name in enumerate(names):
            zeros, largest, least = seen.readings.get(f"{_NAME}.{place}", (0.0, 0.0, 0.0))
            if zeros >= _SHARE and 0.0 < least <= 2 * _SMALLEST and largest <= _NEAR:
                lost[name] = zeros, largest
        if not lost:
            return None
        watch.underflow = True
        first, (zeros, largest) = next(iter(lost.items()))
        path, kind = watch.owner_of(first)
        return finding(
            "GG512",
            f"{self.half} matrix products came out in float16, and backward() started from a loss that no GradScaler "
            f"has scaled. {zeros:.0%} of the gradient of `{first}` are exactly zero, and its largest element is "
            f"{number(largest)}: float16 has nothing between 0 and {number(_SMALLEST)}. So it is with {len(lost)} of "
            f"{len(names)} weights.",
            step=seen.step,
            moment=Moment.AFTER_BACKWARD,
            parameter=first,
            module=path,
            module_class=kind,
            evidence={
                "zeros": {name: round(share, 4) for name, (share, _) in [*lost.items()][:50]},
                "largest": largest,
            },
            cause_id="underflow",
        )


def _figures(gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Share of exact zeros, the largest magnitude, and the smallest that is not zero."""
    sizes = gradient.abs().float()
    zero = sizes == 0
    return zero.float().mean(), sizes.amax(), sizes.masked_fill(zero, torch.inf).amin()
