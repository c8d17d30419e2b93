"""Bugs inside of the model: what a position or a row may know of, and which parameters get a gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mini_gpt import CausalSelfAttention, MiniGPT, MiniGPTConfig

from .project import BLOCK, Project
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
    def change(module: Any, x: Tensor) -> Tensor:
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
    def change(module: Any, x: Tensor) -> Tensor:
        out = module.block(x)
        return out + module.gate * module.extra(out.roll(-1, 1))

    project.model_class = around_block("GatedLeak", change)


@mutant("causality", "GG661")
def a_mean_is_taken_over_the_batch(project: Project) -> None:
    def change(module: Any, x: Tensor) -> Tensor:
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


@mutant("gradients", "GG202")
def a_layer_is_never_used(project: Project) -> None:
    class Unused(MiniGPT):
        def __init__(self, config: MiniGPTConfig) -> None:
            super().__init__(config)
            self.spare = nn.Linear(config.embedding_dim, config.embedding_dim)

    project.model_class = Unused


@mutant("gradients", "GG202")
def embeddings_are_detached(project: Project) -> None:
    def change(module: Any, x: Tensor) -> Tensor:
        out: Tensor = module.block(x.detach())
        return out + module.gate * module.extra(out)

    project.model_class = around_block("Detached", change)


@mutant("gradients", "GG202")
def a_block_runs_without_a_graph(project: Project) -> None:
    def change(module: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            inner = module.block(x) - x
        out: Tensor = x + inner
        return out + module.gate * module.extra(out)

    project.model_class = around_block("WithoutGraph", change)


@mutant("gradients", "GG303")
def blocks_are_in_a_python_list(project: Project) -> None:
    class Listed(MiniGPT):
        def __init__(self, config: MiniGPTConfig) -> None:
            super().__init__(config)
            blocks = list(self.blocks)
            del self.blocks
            object.__setattr__(self, "blocks", blocks)

    project.model_class = Listed


@mutant("gradients", "GG310")
def everything_is_frozen(project: Project) -> None:
    for parameter in project.model.parameters():
        parameter.requires_grad_(False)


@mutant("gradients", "GG304")
def a_branch_is_multiplied_by_zero(project: Project) -> None:
    def change(module: Any, x: Tensor) -> Tensor:
        out: Tensor = module.block(x)
        return out + 0.0 * module.extra(out) + module.gate * out

    project.model_class = around_block("DeadBranch", change)


@mutant("gradients", "GG104")
def the_derivative_is_infinite_at_zero(project: Project) -> None:
    def change(module: Any, x: Tensor) -> Tensor:
        out: Tensor = module.block(x)
        zero = (out - out.detach()).pow(2).sum(-1, keepdim=True).sqrt()
        return out + zero + module.gate * module.extra(out)

    project.model_class = around_block("RootAtZero", change)


@mutant("overfit", "GG675")
def gradients_have_the_wrong_sign(project: Project) -> None:
    class Ascending(MiniGPT):
        def __init__(self, config: MiniGPTConfig) -> None:
            super().__init__(config)
            for parameter in self.parameters():
                parameter.register_hook(lambda grad: -grad)

    project.model_class = Ascending


@mutant("overfit", "GG671")
def logits_are_squashed_by_tanh(project: Project) -> None:
    def forward(self: MiniGPT, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits = MiniGPT.forward(self, ids)[0].tanh()
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    project.given["overfit_steps"] = 300
    project.model_class = type("Squashed", (MiniGPT,), {"forward": forward})


@mutant("overfit", "GG671")
def tokens_are_blurred_before_the_model_sees_them(project: Project) -> None:
    """Every id is rounded down to a multiple of four, so that four tokens look the same."""

    def forward(self: MiniGPT, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return MiniGPT.forward(self, ids // 4 * 4, targets)

    project.given["overfit_steps"] = 300
    project.model_class = type("Blurred", (MiniGPT,), {"forward": forward})


@mutant("overfit", "GG677")
def dropout_is_never_applied(project: Project) -> None:
    class Undropped(MiniGPT):
        def __init__(self, config: MiniGPTConfig) -> None:
            super().__init__(config)
            for module in self.modules():
                if isinstance(module, nn.Dropout):
                    module.forward = lambda x: x  # type: ignore[method-assign]  # the bug
            for block in self.blocks:
                block.attention.dropout = 0.0

    project.model_class = Undropped
    project.given["compare_dropout"] = True


@mutant("gradients", "GG202")
def the_embedding_is_looked_up_by_position(project: Project) -> None:
    """The ids are read, but what is looked up is the position: the token table gets no gradient."""

    class ByPosition(MiniGPT):
        def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
            places = torch.arange(ids.size(1)).expand_as(ids) % BLOCK
            self.dropout(self.token_embedding(ids))
            x = self.position_embedding(places)
            for block in self.blocks:
                x = block(x)
            logits = self.head(self.norm(x))
            if targets is None:
                return logits, None
            return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    project.model_class = ByPosition
