"""Healthy models that are no plain decoder: recurrent, adapted, an encoder, those of libraries."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mini_gpt import MiniGPT, MiniGPTConfig

from .variants import Output, cross_entropy


class Recurrent(nn.Module):
    """A GRU that gives logits and no loss."""

    def __init__(self, config: MiniGPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.embedding_dim)
        self.recurrent = nn.GRU(config.embedding_dim, config.embedding_dim, batch_first=True)
        self.head = nn.Linear(config.embedding_dim, config.vocab_size)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.recurrent(self.embedding(ids))[0])
        return logits


class LowRank(nn.Module):
    """A frozen linear layer and a trainable correction of rank 2, which begins as zero."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Parameter(torch.randn(2, frozen.in_features) / math.sqrt(frozen.in_features))
        self.up = nn.Parameter(torch.zeros(frozen.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.frozen(x) + x @ self.down.T @ self.up.T
        return out


class Adapted(MiniGPT):
    """LoRA on all linear layers in the blocks of a frozen MiniGPT."""

    def __init__(self, config: MiniGPTConfig, weights: dict[str, Tensor] | None = None) -> None:
        super().__init__(config)
        if weights is not None:
            self.load_state_dict(weights)
        self.requires_grad_(False)
        for path, layer in list(self.blocks.named_modules()):
            if isinstance(layer, nn.Linear):
                parent, _, name = path.rpartition(".")
                setattr(self.blocks.get_submodule(parent), name, LowRank(layer))


class Answer(NamedTuple):
    """What libraries return."""

    loss: Tensor | None
    logits: Tensor


class ShiftingInside(nn.Module):
    """Takes `labels=input_ids` and shifts them itself, as the Hugging Face models do."""

    def __init__(self, config: MiniGPTConfig) -> None:
        super().__init__()
        self.config = config
        self.body = MiniGPT(config)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Answer:
        logits = self.body(input_ids)[0]
        return Answer(None if labels is None else cross_entropy(logits[:, :-1], labels[:, 1:]), logits)


@dataclass
class EncoderConfig:
    """Sizes of an encoder with a padding token."""

    vocab_size: int
    block_size: int = 16
    embedding_dim: int = 32
    num_heads: int = 2
    num_layers: int = 2
    dropout: float = 0.0
    pad_id: int = 0


class Encoder(nn.Module):
    """Both sides are seen, padding is masked, masked tokens are to be guessed."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.embedding_dim)
        self.position = nn.Embedding(config.block_size, config.embedding_dim)
        layer = nn.TransformerEncoderLayer(
            config.embedding_dim, config.num_heads, 64, config.dropout, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, config.num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(config.embedding_dim, config.vocab_size)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Output:
        x = self.embedding(ids) + self.position(torch.arange(ids.size(1), device=ids.device))
        logits = self.head(self.layers(x, src_key_padding_mask=ids == self.config.pad_id))
        return logits, None if targets is None else cross_entropy(logits, targets)


class TorchDecoder(nn.Module):
    """nn.TransformerEncoder with a causal mask of -inf, as in torch's tutorials."""

    def __init__(self, config: MiniGPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.embedding_dim)
        self.position = nn.Parameter(0.02 * torch.randn(config.block_size, config.embedding_dim))
        layer = nn.TransformerEncoderLayer(config.embedding_dim, config.num_heads, 64, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, config.num_layers)
        self.head = nn.Linear(config.embedding_dim, config.vocab_size)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(config.block_size))

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Output:
        length = ids.size(1)
        mask: Any = self.mask
        x = self.layers(self.embedding(ids) + self.position[:length], mask=mask[:length, :length], is_causal=True)
        logits = self.head(x)
        return logits, None if targets is None else cross_entropy(logits, targets)
