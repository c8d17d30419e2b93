"""How the next token is drawn from a row of logits: repetition penalty, temperature, top-k, top-p, in this order."""

from __future__ import annotations

import torch
from torch import Tensor


def next_token_probabilities(
    logits: Tensor,
    token_ids: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
) -> Tensor:
    """Return probabilities [B, V] for the id that follows `token_ids` [B, T], from the last position's logits [B, V].

    Penalty: logits of ids already in the row are divided by it when positive and multiplied when negative
    (Keskar et al. 2019, CTRL, section 4.1). Top-p: the smallest set of likeliest ids whose probability reaches `top_p`
    (Holtzman et al. 2019), never fewer than one.
    """
    if repetition_penalty != 1.0:
        seen = logits.gather(1, token_ids)
        penalised = torch.where(seen > 0, seen / repetition_penalty, seen * repetition_penalty)
        logits = logits.scatter(1, token_ids, penalised)
    if temperature == 0.0:
        likeliest = logits.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(logits).scatter(1, likeliest, 1.0)
    logits = logits / temperature
    if top_k is not None:
        # Ids, not a threshold: with equal logits a threshold would let more than k through.
        kept = logits.topk(min(top_k, logits.size(-1)), dim=-1).indices
        logits = torch.full_like(logits, -torch.inf).scatter(1, kept, logits.gather(1, kept))
    probabilities = logits.softmax(dim=-1)
    if top_p is not None:
        ordered, ids = probabilities.sort(dim=-1, descending=True)
        before = ordered.cumsum(dim=-1) - ordered
        probabilities = probabilities.scatter(1, ids, ordered.masked_fill(before >= top_p, 0.0))
        probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
    return probabilities


def check_sampling_options(
    token_ids: Tensor,
    vocab_size: int,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    repetition_penalty: float,
) -> None:
    """Raise ValueError that says what was given and what would work; reads the device once, for the id range."""
    if token_ids.dim() != 2 or token_ids.size(1) == 0:
        raise ValueError(
            f"token_ids has shape {list(token_ids.shape)}; give [B, T] with at least one id a row, "
            f"e.g. torch.tensor([[start_id]])"
        )
    if token_ids.is_floating_point() or token_ids.is_complex() or token_ids.dtype == torch.bool:
        raise ValueError(f"token_ids is {token_ids.dtype}; give integer ids, e.g. token_ids.long()")
    if token_ids.numel() and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size:
        raise ValueError(
            f"token_ids runs from {int(token_ids.min())} to {int(token_ids.max())}, the vocabulary from 0 to "
            f"{vocab_size - 1}; were they made by another tokenizer?"
        )
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; give 0 or more")
    if not 0.0 <= temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}; give a number above 0, or 0 for the likeliest id each time")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is {top_k}; give 1 or more, or None to keep all ids")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p is {top_p}; give a probability above 0 and up to 1, or None to keep all ids")
    if not 0.0 < repetition_penalty < float("inf"):
        raise ValueError(f"repetition_penalty is {repetition_penalty}; give 1 for none, or more (1.2 is usual)")
