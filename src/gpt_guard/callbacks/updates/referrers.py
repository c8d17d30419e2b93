"""Who holds a tensor: the optimizers and modules of this process, found through the garbage collector.

One pass over all live objects, some tens of milliseconds: only under suspicion, and once for each.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass
class Holders:
    """`stepped`: ids of the tensors that an optimizer holds; `names`: who has the others, e.g. `weight` of a Linear."""

    stepped: set[int] = field(default_factory=set)
    names: list[str] = field(default_factory=list)
    modes: list[bool] = field(default_factory=list)

    @property
    def resting(self) -> bool:
        """Whether modules hold them and all of those are in eval mode, as a teacher or a perceptual network is."""
        return bool(self.modes) and not any(self.modes)


def holders(tensors: Iterable[Tensor]) -> Holders:
    """The optimizers and modules that hold any of these tensors directly; reads no values."""
    wanted = {id(tensor) for tensor in tensors}
    found = Holders()
    everything = gc.get_objects()
    # By its type: isinstance may run code of the object, as a lazy proxy's, and takes far longer.
    kinds = {kind for kind in set(map(type, everything)) if issubclass(kind, (Optimizer, nn.Module))}
    for each in everything:
        kind = type(each)
        if kind not in kinds:
            continue
        if issubclass(kind, Optimizer):
            groups = vars(each).get("param_groups", ())
            found.stepped |= {id(tensor) for group in groups for tensor in group["params"]} & wanted
        else:
            for name, parameter in vars(each).get("_parameters", {}).items():
                if id(parameter) in wanted:
                    found.names.append(f"`{name}` of a {kind.__name__}")
                    found.modes.append(bool(vars(each).get("training", True)))
    return found
