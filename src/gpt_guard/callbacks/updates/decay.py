"""Whether weight decay alone takes the weights away."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer

from gpt_guard.catalogue import finding
from gpt_guard.records import Finding, Observation, Severity
from gpt_guard.records.render import learning_rate, number

# Decay multiplies a weight by 1 - lr * weight_decay in each step (I. Loshchilov and F. Hutter, "Decoupled weight decay
# regularization", 2019). At a tenth half of it is gone after 7 steps; usual values are 1e-3 and below.
_LARGE = 0.1
_ALL = 1.0


class DecayWatch:
    """Looks at lr times weight decay of each group whenever the learning rate is higher than ever before.

    `said` holds what was reported already, and is added to.
    """

    def __init__(self, said: set[str]) -> None:
        self._said = said
        self._highest: dict[int, float] = {}

    def rises(self, index: int, highest: float) -> bool:
        """Whether this learning rate, the highest of its groups, is higher than any before of this optimizer."""
        if not highest > self._highest.get(index, 0.0):
            return False
        self._highest[index] = highest
        return True

    def judge(self, seen: Observation, optimizer: Optimizer) -> Iterator[Finding]:
        """GG312 for the group with the largest product, once the learning rate `rises`; floats only."""
        if "GG312" in self._said:
            return
        products = [
            (lr * group["weight_decay"], place, lr, group)
            for place, (lr, group) in enumerate(zip(seen.lr, optimizer.param_groups, strict=False))
            if _multiplies(optimizer, group)
        ]
        product, place, lr, group = max(products, default=(0.0, 0, 0.0, {}), key=lambda each: each[0])
        if product >= _LARGE:
            self._said.add("GG312")
            yield finding(
                "GG312",
                f"{type(optimizer).__name__} multiplies {len(group['params'])} parameters by 1 - lr * weight_decay = "
                f"{number(1.0 - product)} in each step (lr {learning_rate(lr)}, weight_decay "
                f"{number(float(group['weight_decay']))}, parameter group {place}).",
                severity=Severity.ERROR if product >= _ALL else Severity.WARNING,
                step=seen.step,
                moment=seen.moment,
                evidence={"product": product, "lr": lr, "weight_decay": group["weight_decay"], "group": place},
            )


def _multiplies(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether this group's decay acts on the weights themselves and not through Adam's normalised gradient."""
    names = {kind.__name__ for kind in type(optimizer).__mro__}
    acts = "SGD" in names or group.get("decoupled_weight_decay") or any(name.startswith("AdamW") for name in names)
    known = isinstance(group.get("weight_decay"), (int, float))
    return bool(acts and known and any(tensor.requires_grad for tensor in group["params"]))
