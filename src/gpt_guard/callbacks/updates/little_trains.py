"""Whether anything but biases and scales is trained: freezing by name easily freezes more than was meant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from gpt_guard.callbacks.updates.param_plan import listed
from gpt_guard.catalogue import finding
from gpt_guard.records import Finding, Moment, Severity

SAID = "little trains"


def only_scales(model: Mapping[str, Tensor], step: int) -> Iterator[Finding]:
    """GG310, as a note, where every trainable parameter has fewer than two dimensions and frozen matrices exist.

    Methods that train no more than that (BitFit, (IA)^3, TENT) do it on purpose, so it is only worth knowing. Looks at
    shapes and flags alone.
    """
    free = {name: tensor for name, tensor in model.items() if tensor.requires_grad}
    frozen = [name for name, tensor in model.items() if not tensor.requires_grad and tensor.dim() >= 2]
    if not free or not frozen or any(tensor.dim() >= 2 for tensor in free.values()):
        return
    trained = sum(tensor.numel() for tensor in free.values())
    total = sum(tensor.numel() for tensor in model.values())
    matrices = f"All {len(frozen)} weight matrices of the model are" if len(frozen) > 1 else "Its only weight matrix is"
    yield finding(
        "GG310",
        f"{trained:,} of {total:,} elements are trained, biases and scales alone ({listed(free)}). {matrices} frozen "
        f"({listed(frozen, 3)}).",
        title="No weight matrix is trainable",
        severity=Severity.INFO,
        likely=["frozen_by_name"],
        step=step,
        moment=Moment.AFTER_STEP,
        parameter=frozen[-1],
        cause_id=SAID,
        evidence={"trained": trained, "elements": total, "frozen": frozen[:50]},
    )
