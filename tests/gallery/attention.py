"""Attention that goes wrong: rows without a key, masks that are added or multiplied, scores beyond the range."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .nets import BATCH, GPT, LENGTH, VOCAB, WIDTH, Attention, causal, shifted
from .parts import ALL, HALF, WIDE, Case, Training


class LeftPadded(Attention):
    def weights(self, query: Tensor, key: Tensor, keep: Tensor | None) -> Tensor:
        allowed = causal(query.size(1))
        if keep is not None:
            allowed = allowed & keep[:, None, :]
        scores = query @ key.transpose(-2, -1) * WIDTH**-0.5
        out: Tensor = scores.masked_fill(~allowed, -torch.inf).softmax(dim=-1)
        return out


class Packed(Attention):
    """A token sees those of its own text; each mask is right alone, and added they leave the range of the dtype."""

    def weights(self, query: Tensor, key: Tensor, keep: Tensor | None) -> Tensor:
        assert keep is not None
        least, zeros = torch.finfo(query.dtype).min, query.new_zeros(query.size(0), query.size(1), query.size(1))
        padding = zeros.masked_fill(~keep[:, None, :], least)
        texts = zeros.masked_fill(~(keep[:, None, :] & keep[:, :, None]), least)
        mask = padding + texts
        scores = query @ key.transpose(-2, -1) * WIDTH**-0.5
        return torch.softmax(scores + mask, dim=-1)


class Billion(Attention):
    def weights(self, query: Tensor, key: Tensor, keep: Tensor | None) -> Tensor:
        scores = query @ key.transpose(-2, -1) * WIDTH**-0.5
        if keep is not None:
            scores = scores + (1.0 - keep[:, None, :].to(query.dtype)) * -1e9
        return nn.functional.softmax(scores, dim=-1)


class Unscaled(Attention):
    def weights(self, query: Tensor, key: Tensor, keep: Tensor | None) -> Tensor:
        scores = query.mul(400) @ key.mul(400).transpose(-2, -1)
        return (scores / 400 / 400).masked_fill(~causal(query.size(1)), -1e4).softmax(-1)


class WithoutMaximum(Attention):
    """A softmax by hand, with a temperature that was meant to sharpen it."""

    def weights(self, query: Tensor, key: Tensor, keep: Tensor | None) -> Tensor:
        scores = (query @ key.transpose(-2, -1)) * 400
        raised = scores.exp() * causal(query.size(1))
        return raised / raised.sum(-1, keepdim=True)


class Multiplied(Attention):
    def weights(self, query: Tensor, key: Tensor, keep: Tensor | None) -> Tensor:
        scores = F.relu(query @ key.transpose(-2, -1))
        mask = scores.new_zeros(scores.shape[-2:]).masked_fill(~causal(query.size(1)), -torch.inf)
        return (scores * mask).softmax(-1)


class Sharp(Attention):
    """A penalty on the entropy of the weights, of which those that are masked are 0."""

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        weights = super().weights(self.query(x), self.key(x), keep)
        entropy = -(weights * weights.log()).sum(-1, keepdim=True)
        out: Tensor = self.out(weights @ self.value(x)) + 0.01 * entropy
        return out


class Reader(nn.Module):
    """Latents that read a text by torch's own attention, and ask for the weights too."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.latents = nn.Parameter(torch.randn(2, WIDTH))
        self.cross = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x, latents = self.tokens(ids), self.latents.expand(len(ids), -1, -1)
        read, _ = self.cross(latents, x, x, key_padding_mask=ids == 0)
        return F.cross_entropy(self.head(read.mean(1)), targets[:, 0])


def _padded() -> Tensor:
    """Which tokens are no padding; the second row begins with three that are."""
    keep = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    keep[1, :3] = False
    return keep


def left_padding() -> Training:
    """Padding on the left and a causal mask leave the first positions of a row without any key."""
    return Training(GPT(LeftPadded), [((*shifted(), _padded()), ())])


def two_minimum_masks() -> Training:
    """A mask by text and a padding mask, both of the dtype's minimum, added; one sample only fills the batch up."""
    keep = _padded()
    keep[2] = False
    return Training(GPT(Packed), [((*shifted(), keep), ())])


def mask_of_a_billion() -> Training:
    """-1e9 is -inf in float16, and a sample of padding only has nothing else."""
    keep = _padded()
    keep[2] = False
    return Training(GPT(Billion), [((*shifted(), keep), ())])


def scores_without_scale() -> Training:
    """Scores that are scaled after the product, not before it."""
    return Training(GPT(Unscaled), [(shifted(), ())])


def softmax_by_hand() -> Training:
    """exp without the maximum subtracted."""
    return Training(GPT(WithoutMaximum), [(shifted(), ())])


def mask_multiplied() -> Training:
    """A mask of 0 and -inf is multiplied in place of added."""
    return Training(GPT(Multiplied), [(shifted(), ())])


def entropy_of_attention() -> Training:
    """p log p of weights that are 0 where the mask is."""
    return Training(GPT(Sharp), [(shifted(), ())])


def empty_text() -> Training:
    """A sample of padding only, read by nn.MultiheadAttention."""
    ids, targets = shifted()
    ids[3] = 0
    return Training(Reader(), [((ids, targets), ())])


FIRST = "blocks.0.attn"
CASES = (
    Case(left_padding, "softmax", FIRST, "-torch.inf).softmax(dim=-1)", "fully_masked_row", runs=ALL),
    Case(two_minimum_masks, "softmax", FIRST, "torch.softmax(scores + mask", "two_masks_added", runs=ALL),
    Case(mask_of_a_billion, "softmax", FIRST, "nn.functional.softmax(scores", "mask_beyond_dtype", runs=HALF),
    Case(scores_without_scale, "matmul", FIRST, "query.mul(400) @ key.mul(400)", "matmul_overflow", runs=HALF),
    Case(softmax_by_hand, "exp", FIRST, "scores.exp()", "exp_overflow", runs=ALL),
    Case(mask_multiplied, "multiplication", FIRST, "(scores * mask)", "zero_times_inf", runs=ALL),
    Case(entropy_of_attention, "log", FIRST, "weights.log()", "log_of_probability", runs=ALL),
    Case(empty_text, "softmax", "cross", "self.cross(latents, x, x", "fully_masked_row", runs=WIDE),
)
