"""Which causes of GG101 the evidence shows, suggests or speaks against, by their keys."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from gpt_guard.callbacks.finite.blame import Blame, Shown
from gpt_guard.hooks.autograd_graph.explain import Operation
from gpt_guard.hooks.watch import Watch

OF_HALF = ("overflow_half", "eps_lost")
"""They need float16 somewhere."""
_HALF_MAX = torch.finfo(torch.float16).max
# Within an order of magnitude of the limit, the next product or sum goes over it.
_NEAR = 0.1


def causes_shown(watch: Watch, culprit: Blame, operation: Operation | None, *, diverging: bool) -> Iterable[str]:
    """The causes that the evidence points to, each with a test and a fix of its own."""
    if diverging:
        yield "lr_too_high"
    if operation is not None:
        yield {"log_of_zero": "log_or_div_zero"}.get(operation.cause, operation.cause)
    if used_neg_inf(watch, culprit):
        yield "neg_inf_input"
    elif culprit.masked_rows:
        yield "all_masked_row"


def causes_likely(watch: Watch, culprit: Blame) -> Iterable[str]:
    """The causes that fit module, dtype and values, the likeliest first."""
    assert culprit.maker is not None
    module, shown = watch.tap.modules[culprit.maker], culprit.shown
    nan, infinite = _kinds(shown)
    if culprit.masked_rows:
        yield "all_masked_row"
    if shown.dtype == "float16" and (infinite or _near_half_limit(shown)):
        yield "overflow_half"
    if isinstance(module, (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)):
        yield "zero_std"
    own_code = culprit.receiver is not None or culprit.after is not None
    if own_code and nan and "att" in (watch.tap.names[culprit.maker] + type(module).__name__).lower():
        yield "all_masked_row"
    if culprit.neg_inf is not None:
        yield "neg_inf_input"
    if infinite and shown.dtype != "float16":
        yield "exp_overflow"
    if (own_code and nan) or shown.dtype not in ("float16", "bfloat16"):
        # Whatever else it is, a float32 output has not left the range of float16.
        yield "log_or_div_zero"
        yield "negative_root"


def used_neg_inf(watch: Watch, culprit: Blame) -> bool:
    """Whether -inf went into a module that has no use for it."""
    return (
        culprit.neg_inf is not None and culprit.maker is not None and _takes_no_mask(watch.tap.modules[culprit.maker])
    )


def _takes_no_mask(module: nn.Module) -> bool:
    """A single layer of torch's: it has no use for -inf."""
    softmax = isinstance(module, (nn.Softmax, nn.LogSoftmax, nn.Softmax2d, nn.MultiheadAttention))
    plain = type(module).__module__.startswith("torch.nn.") and next(module.children(), None) is None
    return plain and not softmax


def _kinds(shown: Shown) -> tuple[bool, bool]:
    """Whether NaN and whether +inf is in it; extremes that are NaN hide infinities."""
    if shown.stats is not None:
        return shown.stats.nan > 0, shown.stats.pos_inf > 0
    nan = shown.low != shown.low
    return nan, not nan and shown.high == float("inf")


def _near_half_limit(shown: Shown) -> bool:
    if shown.stats is None:
        return True
    top = max(abs(shown.stats.finite_min or 0.0), abs(shown.stats.finite_max or 0.0))
    return top > _NEAR * _HALF_MAX
