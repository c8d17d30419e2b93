"""MiniGPT with one thing wrong, as functions of a config: for `--break`, and for `gpt-guard check --model`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor
from torch.nn import functional as F

from mini_gpt import CausalSelfAttention, MiniGPT, MiniGPTConfig


class UnmaskedSelfAttention(CausalSelfAttention):
    """The same attention without its causal mask."""

    def forward(self, x: Tensor) -> Tensor:
        """Like the original, but for is_causal."""
        batch, length, width = x.shape
        heads = self.query_key_value(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout)
        output: Tensor = self.residual_dropout(self.projection(mixed.transpose(1, 2).reshape(batch, length, width)))
        return output


def unmasked(config: MiniGPTConfig) -> MiniGPT:
    """Each position sees all others, the one that it should predict included."""
    model = MiniGPT(config)
    for block in model.blocks:
        block.attention = UnmaskedSelfAttention(config)
    return model


def in_a_list(config: MiniGPTConfig) -> MiniGPT:
    """The blocks are in a Python list: `parameters()`, `to()` and `state_dict()` do not know them."""
    model = MiniGPT(config)
    blocks = list(model.blocks)
    del model.blocks
    object.__setattr__(model, "blocks", blocks)
    return model


def other_vocabulary(config: MiniGPTConfig) -> MiniGPT:
    """One token more."""
    return MiniGPT(replace(config, vocab_size=config.vocab_size + 1))


def wider(config: MiniGPTConfig) -> MiniGPT:
    """Twice as wide."""
    return MiniGPT(replace(config, embedding_dim=2 * config.embedding_dim))


def deeper(config: MiniGPTConfig) -> MiniGPT:
    """One block more."""
    return MiniGPT(replace(config, num_layers=config.num_layers + 1))


WRONG: dict[str, Callable[[MiniGPTConfig], MiniGPT]] = {
    "another vocabulary": other_vocabulary,
    "another width": wider,
    "another number of layers": deeper,
}
