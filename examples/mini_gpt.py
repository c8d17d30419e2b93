"""A small GPT, written by hand: learned positions, pre-norm blocks, causal attention, one loss.

It knows nothing of who trains it, and needs no other file. Shapes use B for the batch, T for tokens in a row and V for
the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class MiniGPTConfig:
    """The sizes of a MiniGPT; `dataclasses.asdict(config)` is what a checkpoint stores.

    Raises ValueError for sizes that cannot work.
    """

    vocab_size: int
    block_size: int = 32
    embedding_dim: int = 64
    num_heads: int = 4
    num_layers: int = 2
    expansion_factor: int = 4
    dropout: float = 0.1

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "block_size", "embedding_dim", "num_heads", "num_layers", "expansion_factor")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.embedding_dim % self.num_heads:
            raise ValueError(
                f"embedding_dim {self.embedding_dim} cannot be shared out to {self.num_heads} heads; "
                f"choose num_heads that divides it"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout}; it is the share of values dropped, from 0 to below 1")


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a position sees itself and what came before it; [B, T, C] in and out."""

    def __init__(self, config: MiniGPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.query_key_value = nn.Linear(config.embedding_dim, 3 * config.embedding_dim)
        self.projection = nn.Linear(config.embedding_dim, config.embedding_dim)
        self.residual_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.query_key_value(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        output: Tensor = self.residual_dropout(self.projection(mixed.transpose(1, 2).reshape(batch, length, width)))
        return output


class MLP(nn.Module):
    """The position-wise half of a block: widen, GELU, narrow; [B, T, C] in and out."""

    def __init__(self, config: MiniGPTConfig) -> None:
        super().__init__()
        hidden = config.expansion_factor * config.embedding_dim
        self.up = nn.Linear(config.embedding_dim, hidden)
        self.activation = nn.GELU()
        self.down = nn.Linear(hidden, config.embedding_dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.dropout(self.down(self.activation(self.up(x))))
        return output


class Block(nn.Module):
    """Attention and MLP, each normalised before and added back; [B, T, C] in and out."""

    def __init__(self, config: MiniGPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.embedding_dim)
        self.attention = CausalSelfAttention(config)
        self.mlp_norm = nn.LayerNorm(config.embedding_dim)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        return x


class MiniGPT(nn.Module):
    """A decoder-only language model over token ids."""

    def __init__(self, config: MiniGPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.embedding_dim)
        self.position_embedding = nn.Embedding(config.block_size, config.embedding_dim)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.embedding_dim)
        self.head = nn.Linear(config.embedding_dim, config.vocab_size, bias=False)
        self.apply(_init_weights)
        # Each block adds two terms to the residual stream; scaling them down keeps its variance at depth (GPT-2, 2.3).
        for name, parameter in self.named_parameters():
            if name.endswith(("projection.weight", "down.weight")):
                parameter.data.div_((2 * config.num_layers) ** 0.5)
        # Small logits: an untrained model then guesses evenly, and its loss starts at log V.
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, token_ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return logits [B, T, V] and, with `targets` [B, T], the mean cross-entropy in nats.

        Targets of -100 are left out. Raises ValueError for rows longer than `config.block_size`.
        """
        length = token_ids.size(1)
        if length > self.config.block_size:
            raise ValueError(
                f"token_ids has {length} positions, the model was built for block_size {self.config.block_size}; "
                f"shorten the rows, or build the model with a larger block_size"
            )
        positions = torch.arange(length, device=token_ids.device)
        x = self.dropout(self.token_embedding(token_ids) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(
        self,
        token_ids: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Append `max_new_tokens` sampled ids to `token_ids` [B, T]; only the last block_size ids are looked at.

        `temperature` 0 takes the likeliest id. Runs in eval mode and puts the mode back, also after an error.
        Raises ValueError for options out of range and for ids that the vocabulary does not have.
        """
        check_sampling_options(
            token_ids, self.config.vocab_size, max_new_tokens, temperature, top_k, top_p, repetition_penalty
        )
        was_training = self.training
        self.eval()
        try:
            for _ in range(max_new_tokens):
                logits, _ = self(token_ids[:, -self.config.block_size :])
                probabilities = next_token_probabilities(
                    logits[:, -1], token_ids, temperature, top_k, top_p, repetition_penalty
                )
                chosen = torch.multinomial(probabilities, num_samples=1, generator=generator)
                token_ids = torch.cat([token_ids, chosen], dim=1)
        finally:
            self.train(was_training)
        return token_ids


def _init_weights(module: nn.Module) -> None:
    """Normal with variance 1/width; the usual std of 0.02 is that of a model some 2000 wide, and slow at 64."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=module.weight.size(1) ** -0.5)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


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
