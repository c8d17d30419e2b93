"""Layers, losses, products and masks that fail: the marked line, and what is to be told of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .parts import FULL, HALF, INF, Fault


def std_of_one(h: Tensor) -> Tensor:
    return h[:1].std(0)  # fault


def softmax_of_a_masked_row(h: Tensor) -> Tensor:
    scores = h.masked_fill(torch.tensor([[True], [False], [True]]), -INF)
    return scores.softmax(-1)  # fault


def added_mask(h: Tensor) -> Tensor:
    mask = torch.zeros(3, 4).masked_fill(torch.tensor([[False], [True], [False]]), -INF).to(h.dtype)
    scores = h + mask
    return F.softmax(scores, dim=-1) @ h.T  # fault


def mask_added_by_the_product(h: Tensor) -> Tensor:
    mask = h.new_zeros(1, 3, 3)
    mask[0, 1] = -INF
    scores = torch.baddbmm(mask, h[None], h.t()[None])
    return scores.softmax(-1)  # fault


def smoothed_loss_of_masked_logits(h: Tensor) -> Tensor:
    logits = h.masked_fill(torch.tensor([True, False, False, False]), -INF)
    return F.cross_entropy(logits, torch.tensor([1, 2, 3]), label_smoothing=0.1)  # fault


def sum_over_a_mask(h: Tensor) -> Tensor:
    scores = h.masked_fill(torch.tensor([True, False, False, False]), -INF)
    return scores.mean(-1)  # fault


def logsumexp_by_rows(h: Tensor) -> Tensor:
    scores = h + torch.tensor([[0.0], [-INF], [0.0]]).to(h.dtype)
    return torch.logsumexp(scores, -1).sum()  # fault


def softmax_by_hand(h: Tensor) -> Tensor:
    scores = h.masked_fill(torch.ones(3, 4, dtype=torch.bool), -INF)
    shifted = scores - scores.amax(-1, keepdim=True)  # fault
    return shifted.exp()


def two_masks(h: Tensor) -> Tensor:
    least = torch.finfo(h.dtype).min
    causal = torch.full_like(h, least).masked_fill(torch.tensor([True, False, False, False]), 0)
    padding = torch.full_like(h, least).masked_fill(torch.tensor([True, True, False, False]), 0)
    both = causal[:, 2:] + padding[:, 2:]
    return (h[:, 2:] + both).softmax(-1)  # fault


def mask_of_a_billion(h: Tensor) -> Tensor:
    keep = torch.zeros_like(h)
    scores = h + (1 - keep) * -1e9
    return scores.softmax(-1)  # fault


def mask_multiplied(h: Tensor) -> Tensor:
    mask = torch.tensor([0.0, -INF, 0.0, 0.0]).to(h.dtype)
    gate = h * 0
    return gate * mask  # fault


def attention_of_huge_queries(h: Tensor) -> Tensor:
    q = h[None, None] * 1e20
    return F.scaled_dot_product_attention(q, q, q)[0, 0]  # fault


def target_masked(h: Tensor) -> Tensor:
    logits = h.masked_fill(torch.tensor([True, False, False, False]), -INF)
    return F.cross_entropy(logits, torch.tensor([0, 1, 2]))  # fault


def labels_ignored(h: Tensor) -> Tensor:
    return F.cross_entropy(h, torch.full((3,), -100))  # fault


def infinite_logit(h: Tensor) -> Tensor:
    logits = h.masked_fill(torch.tensor([True, False, False, False]), INF)
    return F.log_softmax(logits, dim=-1)  # fault


def exp_of_a_log_variance(h: Tensor) -> Tensor:
    logvar = h.abs() * 1000 + 100
    return (0.5 * logvar + logvar).exp()  # fault


def convolution_in_half(h: Tensor) -> Tensor:
    return F.conv1d((h * 300)[None], torch.full((2, 3, 2), 300.0).to(h.dtype))  # fault


def step_on_the_way(h: Tensor) -> Tensor:
    return F.smooth_l1_loss(h * 60000, -h * 60000)  # fault


def target_too_long(h: Tensor) -> Tensor:
    log_probs = F.log_softmax(h.float()[:, None], -1)
    return F.ctc_loss(log_probs, torch.tensor([[1, 2, 2, 3]]), torch.tensor([3]), torch.tensor([4]))  # fault


def gelu_of_a_mask(h: Tensor) -> Tensor:
    masked = h.masked_fill(h == h.max(), -INF)
    return F.gelu(masked)  # fault


def log_softmax_of_a_masked_row(h: Tensor) -> Tensor:
    logits = h.masked_fill(torch.tensor([[True], [False], [False]]), -INF)
    return F.cross_entropy(logits, torch.tensor([1, 2, 3]))  # fault


def scores_in_half(h: Tensor) -> Tensor:
    q, k = h * 1000, h * 1000
    return q @ k.transpose(-2, -1)  # fault


def square_in_half(h: Tensor) -> Tensor:
    return (h.abs() * 0 + 300).pow(2)  # fault


def sum_in_half(h: Tensor) -> Tensor:
    return (h * 0 + 30000).sum()  # fault


def cast_to_half(h: Tensor) -> Tensor:
    big = h.float() * 0 + 1e5
    return big.half()  # fault


def product_beyond_range(h: Tensor) -> Tensor:
    return (h * 0 + 3e38) * 10  # fault


def acos_of_a_cosine(h: Tensor) -> Tensor:
    cosine = h * 0 + 1.01
    return cosine.acos()  # fault


def atanh_of_one(h: Tensor) -> Tensor:
    return torch.atanh(h * 0 + 1)  # fault


def negative_running_var(h: Tensor) -> Tensor:
    mean, var = h.new_zeros(4), h.new_full((4,), -1.0)
    return F.batch_norm(h, mean, var, training=False)  # fault


def layer_norm_overflow(h: Tensor) -> Tensor:
    return F.layer_norm(h * 1e30, (4,))  # fault


def inverse_of_singular(h: Tensor) -> Tensor:
    out: Tensor = torch.linalg.inv_ex(torch.zeros(4, 4) + h.sum() * 0)[0]  # fault
    return out


def kl_by_hand(h: Tensor) -> Tensor:
    p = F.one_hot(torch.tensor([0, 1, 2]), 4).to(h.dtype)
    return (p * (p.log() - h)).sum()  # fault


def in_place(h: Tensor) -> Tensor:
    x = h * 0
    x.log_()  # fault
    return x.add_(1)


FAULTS = (
    Fault(std_of_one, "std", "std_of_one"),
    Fault(softmax_of_a_masked_row, "softmax", "fully_masked_row"),
    Fault(added_mask, "softmax", "fully_masked_row"),
    Fault(mask_added_by_the_product, "softmax", "fully_masked_row"),
    Fault(smoothed_loss_of_masked_logits, "sum", "mask_used"),
    Fault(sum_over_a_mask, "mean", "mask_used"),
    Fault(logsumexp_by_rows, "sum", "logsumexp_masked"),
    Fault(softmax_by_hand, "subtraction", "inf_minus_inf"),
    Fault(two_masks, "softmax", "two_masks_added"),
    Fault(mask_of_a_billion, "softmax", "mask_beyond_dtype", dtypes=HALF),
    Fault(mask_multiplied, "multiplication", "zero_times_inf"),
    Fault(attention_of_huge_queries, "scaled_dot_product_attention", "matmul_overflow", dtypes=FULL),
    Fault(target_masked, "cross entropy (nll_loss)", "target_masked"),
    Fault(labels_ignored, "cross entropy (nll_loss)", "all_labels_ignored"),
    Fault(infinite_logit, "log_softmax", "plus_inf_logit"),
    Fault(exp_of_a_log_variance, "exp", "exp_overflow"),
    Fault(convolution_in_half, "convolution", "matmul_overflow", dtypes=HALF),
    Fault(step_on_the_way, "smooth_l1_loss", "overflow", dtypes=HALF),
    Fault(target_too_long, "ctc_loss", "no_alignment", dtypes=FULL),
    Fault(gelu_of_a_mask, "gelu", "mask_used"),
    Fault(log_softmax_of_a_masked_row, "log_softmax", "fully_masked_row"),
    Fault(scores_in_half, "matmul", "matmul_overflow", dtypes=HALF),
    Fault(square_in_half, "pow", "sum_overflow", dtypes=HALF),
    Fault(sum_in_half, "sum", "sum_overflow", dtypes=HALF),
    Fault(cast_to_half, "cast", "cast_overflow"),
    Fault(product_beyond_range, "multiplication", "lr_too_high", dtypes=(torch.float32, torch.bfloat16)),
    Fault(acos_of_a_cosine, "acos", "outside_domain"),
    Fault(atanh_of_one, "atanh", "outside_domain"),
    Fault(negative_running_var, "batch norm", "running_var", dtypes=FULL),
    Fault(layer_norm_overflow, "layer norm", "norm_layer", dtypes=FULL),
    Fault(inverse_of_singular, "inv_ex", "singular_matrix", dtypes=FULL),
    Fault(kl_by_hand, "multiplication", "zero_times_inf"),
    Fault(in_place, "log", "log_of_zero"),
)
