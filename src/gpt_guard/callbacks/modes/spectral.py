"""Spectral norm that has not been estimated yet: only forwards in training mode estimate it, and none has run."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm

from gpt_guard.callbacks.updates.findings import listed
from gpt_guard.catalogue import finding
from gpt_guard.hooks.frames import user_line
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment

# A spectral norm is at least the Frobenius norm over the root of the rank: where that is above 2, the estimate is half
# of what it should be, or less. One forward in training mode brings it near 1; the random start is off by the size.
_MOST = 2.0


def spectral_weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Path, module and weight of each `torch.nn.utils.spectral_norm`.

    `torch.nn.utils.parametrizations.spectral_norm` estimates when it is built and needs no look.
    """
    for path, module in model.named_modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm) and isinstance(weight := getattr(module, hook.name, None), Tensor):
                yield path, module, weight.detach()


def not_estimated(watch: Watch) -> Finding | None:
    """GG508 for such weights that run in eval mode and are not normalised; to be asked after the first forward.

    Reads the device, for a model that has such weights and is evaluated before it was called in training mode.
    """
    norms = {
        path: float(weight.norm()) / math.sqrt(min(_matrix(weight)))
        for path, module, weight in spectral_weights(watch.model)
        if not module.training
    }
    wrong = {path: norm for path, norm in norms.items() if norm > _MOST}
    if not wrong:
        return None
    first = max(wrong, key=wrong.__getitem__)
    weights = "1 weight" if len(wrong) == 1 else f"{len(wrong)} weights"
    verb = "is" if len(wrong) == 1 else "are"
    return finding(
        "GG508",
        f"The model is evaluated before it was called in training mode, and {weights} under "
        f"spectral_norm ({listed(wrong)}) {verb} not normalised: that of `{first}` has a spectral norm of at "
        f"least {wrong[first]:.3g}, where it should be 1.",
        likely=["no_training_forward"],
        step=watch.step,
        moment=Moment.FORWARD,
        evaluation=True,
        module=first,
        module_class=type(watch.model.get_submodule(first)).__name__,
        where=user_line(),
        evidence={"at_least": wrong},
        guard="EvalModeAssert",
    )


def _matrix(weight: Tensor) -> tuple[int, int]:
    """Rows and columns of the weight as a matrix: the norm does not depend on which dimension comes first."""
    rows = weight.shape[0] if weight.dim() else 1
    return rows, max(weight.numel() // max(rows, 1), 1)
