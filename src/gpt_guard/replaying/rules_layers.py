"""Why a composite operation failed: softmax, attention, normalisation, losses, products and reductions."""

from __future__ import annotations

import torch
from torch import Tensor

from gpt_guard.replaying.failed_operation import Evidence, FailedOperation, Rule
from gpt_guard.replaying.operations import names, word_for
from gpt_guard.replaying.rules_elementwise import PRODUCTS, overflow
from gpt_guard.replaying.values import be, count, dead_rows, dead_text, dtype_of, figure, limit, many


def _softmax(case: FailedOperation) -> Evidence | None:
    scores = case.tensor("self")
    dim = case.bound.get("dim", -1)
    word = word_for(case.op.base)
    dead, rows = dead_rows(scores, dim)
    if dead:
        shows = f"{word} over {dead} of {many(rows, 'row')} that {be(dead)} -inf throughout"
        return _masked(case, shows, "self", dead_text(scores, dim))
    above = count(scores == float("inf"))
    if above:
        return Evidence(f"{word} of {many(above, 'element')} that {be(above)} +inf", ("plus_inf_logit", "overflow"))
    return None


def _masked(case: FailedOperation, shows: str, name: str, fact: str) -> Evidence:
    made = next((origin.seen for origin in case.masks if origin.cause is not None), None)
    if made is not None and made.where is not None:
        shows += f"; {made.shows} at line {made.where.line}"
    return Evidence(shows, (*case.mask_causes, "fully_masked_row"), {name: (fact,)})


def attention(case: FailedOperation) -> Evidence | None:
    """The rule for all forms of scaled_dot_product_attention."""
    name = "attn_mask" if "attn_mask" in case.bound else "attn_bias"
    mask = case.optional(name)
    if mask is not None:
        dead = count((~mask).all(-1)) if mask.dtype is torch.bool else dead_rows(mask, -1)[0]
        rows = mask[..., 0].numel()
        if dead:
            shows = f"scaled_dot_product_attention with {dead} of {many(rows, 'mask row')} without a permitted key"
            fact = f"{dead} of {many(rows, 'row')} without a permitted key"
            return _masked(case, shows, name, fact)
    query, key = case.tensor("query"), case.tensor("key")
    if query.shape[:-2] != key.shape[:-2]:
        return None
    scale = case.number("scale") or query.shape[-1] ** -0.5
    most = float((query.double() @ key.double().transpose(-2, -1)).abs().max()) * scale
    if most <= limit(query.dtype):
        return None
    beyond = f"beyond {figure(limit(query.dtype))}, the largest {dtype_of(query)}"
    shows = f"attention scores reached {figure(most)}, {beyond}"
    return Evidence(shows, ("matmul_overflow", "lr_too_high"))


def _normalisation(case: FailedOperation) -> Evidence | None:
    values = case.tensor("input")
    training = bool(case.bound.get("training", case.bound.get("train", False)))
    running = case.optional("running_var")
    eps = case.number("eps") or case.number("epsilon") or 0.0
    word = word_for(case.op.base)
    if running is not None and not training:
        low = float(running.min())
        if low + eps <= 0:
            shows = f"{word} in evaluation mode with a running_var of {figure(low)} and eps {eps:g}"
            return Evidence(shows, ("running_var", "uninitialised"), {"running_var": (f"lowest {figure(low)}",)})
    if word == "batch norm" and values.dim() > 1 and values.numel() // max(values.shape[1], 1) == 1:
        return Evidence(f"{word} over a single value in each channel", ("batchnorm_one", "norm_layer"))
    low, top = float(values.min()), float(values.max())
    shows = f"{word} of values between {figure(low)} and {figure(top)}, with eps {eps:g}"
    return Evidence(shows, ("norm_layer", "eps_lost" if eps < 1e-7 else "lr_too_high"))


def _cross_entropy(case: FailedOperation) -> Evidence | None:
    target, scores = case.tensor("target"), case.tensor("self")
    ignored = case.bound.get("ignore_index", -100)
    kept = target != ignored
    if not bool(kept.any()):
        shows = f"cross entropy with 0 of {many(target.numel(), 'target')}: all are {ignored}"
        return Evidence(shows, ("all_labels_ignored",), {"target": (f"all are {ignored}",)})
    weight = case.optional("weight")
    if weight is not None and float(weight[target[kept]].sum()) == 0:
        return Evidence("cross entropy with a weight of 0 for each target", ("all_labels_ignored", "empty_count"))
    chosen = scores.gather(1, target.where(kept, 0).unsqueeze(1)).squeeze(1)[kept] if scores.dim() > 1 else scores
    infinite = count(chosen == -float("inf"))
    if not infinite:
        return None
    shows = f"cross entropy with {many(infinite, 'target')} of probability 0 (their log-probability is -inf)"
    return Evidence(shows, ("target_masked", "mask_used", "log_of_zero"))


def _spread(case: FailedOperation) -> Evidence | None:
    values = case.tensor("self")
    if not case.result.flags.nan:
        return None
    each = values.numel() // max(case.out.numel(), 1)
    correction = case.number("correction")
    if each > (1.0 if correction is None else correction):
        return None
    shows = f"{word_for(case.op.base)} over {many(each, 'element')}, {many(case.out.numel(), 'time')}"
    return Evidence(shows, ("std_of_one", "mean_of_nothing"), {"self": (f"{many(each, 'element')} in each group",)})


def _mean(case: FailedOperation) -> Evidence | None:
    if case.tensor("self").numel():
        return None
    return Evidence("the mean of an empty tensor", ("mean_of_nothing", "empty_count"))


def _over_masks(case: FailedOperation) -> Evidence | None:
    """A reduction or a product that took in a mask."""
    if not case.masks:
        return None
    special = case.mask_causes
    infinite = (read.values.detach() for read in case.reads if read.bad is not None)
    masks = sum(count(~torch.isfinite(values)) for values in infinite if values.layout is torch.strided)
    if case.behind("self", {"logsumexp"}, 2) is not None:
        special = ("logsumexp_masked", *special)
    first = special[0] if special else "mask_used"
    second = "target_masked" if case.behind("self", {"_log_softmax"}) is not None else "fully_masked_row"
    if case.op.base in PRODUCTS and case.result.flags.nan:
        first = "zero_times_inf"
    return Evidence(
        f"{word_for(case.op.base)} over {many(masks, 'value')} that {be(masks)} infinite already, as a mask is",
        (first, *special, "mask_used", second),
    )


def _loss_of_probabilities(case: FailedOperation) -> Evidence | None:
    target = case.tensor("target")
    if not target.is_floating_point():
        return None
    outside = count((target < 0) | (target > 1))
    shows = f"binary_cross_entropy with {many(outside, 'target')} outside of [0, 1]"
    return Evidence(shows, ("bce_outside",)) if outside else None


def _alignment(case: FailedOperation) -> Evidence | None:
    """A target longer than its input, or one that repeats a label and needs a blank between, has no alignment."""
    lengths = [case.bound.get(name) for name in ("input_lengths", "target_lengths")]
    shown = [each.tolist() if isinstance(each, Tensor) else list(each or ()) for each in lengths]
    shows = f"ctc loss of inputs of length {shown[0][:5]} for targets of length {shown[1][:5]}"
    return Evidence(shows, ("no_alignment", "target_masked")) if case.result.flags.pos_inf else None


def _matrix(case: FailedOperation) -> Evidence | None:
    return Evidence(f"{word_for(case.op.base)} of a matrix that cannot be inverted", ("singular_matrix",))


def _weight_norm(case: FailedOperation) -> Evidence | None:
    rows = case.tensor("v").movedim(int(case.number("dim") or 0), 0).flatten(1)
    zeros = count((rows == 0).all(1))
    shows = f"weight norm of {many(zeros, 'row')} of a weight that {be(zeros)} 0 throughout"
    return Evidence(shows, ("norm_zero",), {"v": (f"{many(zeros, 'row')} of zeros",)}) if zeros else None


_NORMALISATIONS = (
    "native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit _batch_norm_with_update "
    "_native_batch_norm_legit_no_training cudnn_batch_norm _fused_rms_norm batch_norm"
)
RULES: dict[str, tuple[Rule, ...]] = {
    **dict.fromkeys(names("_softmax _log_softmax _safe_softmax"), (_softmax,)),
    **dict.fromkeys(names(_NORMALISATIONS), (_normalisation,)),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), (_cross_entropy,)),
    **dict.fromkeys(names("std var std_mean var_mean"), (_spread, overflow)),
    **dict.fromkeys(("inverse", "linalg_inv_ex", "_linalg_solve_ex", "linalg_solve_triangular"), (_matrix,)),
    "_ctc_loss": (_alignment,),
    "ctc_loss": (_alignment,),
    "_weight_norm_interface": (_weight_norm,),
    "mean": (_mean, _over_masks, overflow),
    "binary_cross_entropy": (_loss_of_probabilities,),
}
FOR_ALL: tuple[Rule, ...] = (_over_masks, overflow)
"""Tried for every operation, after those of its own."""
