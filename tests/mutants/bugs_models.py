"""Bugs inside of the model: what a position or a row may know of, and which parameters get a gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mini_gpt import CausalSelfAttention, MiniGPT, MiniGPTConfig

from .project import Project
from .table import mutant


def around_block(name: str, change: Any) -> type[MiniGPT]:
    """MiniGPT in which `change(module, x)` is added behind the first block; `module` may hold parameters."""

    class Wrapped(nn.Module):
        def __init__(self, block: nn.Module, config: MiniGPTConfig) -> None:
            super().__init__()
            self.block = block
            self.extra = nn.Linear(config.embedding_dim, config.embedding_dim)
            self.gate = nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = change(self, x)
            return out

    class Changed(MiniGPT):
        def __init__(self, config: MiniGPTConfig) -> None:
            super().__init__(config)
            self.blocks[0] = Wrapped(self.blocks[0], config)

    Changed.__name__ = name
    return Changed


def mask_of(seen: Any) -> type[MiniGPT]:
    """MiniGPT whose attention sees what `seen(length)`, a boolean [T, T], allows."""

    class Masked(CausalSelfAttention):
        def forward(self, x: Tensor) -> Tensor:
            batch, length, width = x.shape
            heads = self.query_key_value(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
            query, key, value = heads.permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=seen(length))
            output: Tensor = self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
            return output

    class OtherMask(MiniGPT):
        def __init__(self, config: MiniGPTConfig) -> None:
            super().__init__(config)
            for block in self.blocks:
                block.attention = Masked(config)

    return OtherMask


@mutant("causality", "GG660")
def no_causal_mask(project: Project) -> None:
    project.model_class = mask_of(lambda length: None)


@mutant("causality", "GG660")
def the_mask_shows_one_token_too_many(project: Project) -> None:
    project.model_class = mask_of(lambda length: torch.ones(length, length, dtype=torch.bool).tril(1))


@mutant("causality", "GG660")
def the_mask_is_a_finite_number(project: Project) -> None:
    project.model_class = mask_of(lambda length: torch.full((length, length), -5.0).triu(1))


@mutant("causality", "GG660")
def a_mean_is_taken_over_time(project: Project) -> None:
    def change(module: Any, x: Tensor) -> Any:
        out = module.block(x)
        return out - out.mean(1, keepdim=True) * 0.1 + 0.0 * module.gate + module.extra(out)

    project.model_class = around_block("MeanOverTime", change)


@mutant("causality", "GG660")
def a_convolution_is_padded_on_both_sides(project: Project) -> None:
    class Convolving(MiniGPT):
        def __init__(self, config: MiniGPTConfig) -> None:
            super().__init__(config)
            width = config.embedding_dim
            self.blocks[0].mlp = nn.Sequential(Turn(), nn.Conv1d(width, width, 3, padding=1), Turn())

    class Turn(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.transpose(1, 2)

    project.model_class = Convolving


@mutant("causality", "GG660")
def a_leak_opens_in_training(project: Project) -> None:
    def change(module: Any, x: Tensor) -> Any:
        out = module.block(x)
        return out + module.gate * module.extra(out.roll(-1, 1))

    project.model_class = around_block("GatedLeak", change)


@mutant("causality", "GG661")
def a_mean_is_taken_over_the_batch(project: Project) -> None:
    def change(module: Any, x: Tensor) -> Any:
        out = module.block(x)
        return out - 0.1 * out.mean(0, keepdim=True) + module.gate * module.extra(out)

    project.model_class = around_block("MeanOverBatch", change)


@mutant("causality", "GG661")
def attention_takes_rows_for_positions(project: Project) -> None:
    """batch_first is missing: each position attends to the same position of all rows."""

    class Crossing(MiniGPT):
        def __init__(self, config: MiniGPTConfig) -> None:
            super().__init__(config)
            self.blocks[0] = Across(config)

    class Across(nn.Module):
        def __init__(self, config: MiniGPTConfig) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(config.embedding_dim, config.num_heads)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = x + self.attention(x, x, x, need_weights=False)[0]
            return out

    project.model_class = Crossing
