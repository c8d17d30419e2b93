"""Bugs that keep parameters from learning: no gradient, a wrong one, a loss that cannot fall."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mini_gpt import CausalSelfAttention, MiniGPT, MiniGPTConfig

from .bugs_models import around_block
from .project import BLOCK, Project
from .table import mutant


@mutant("gradients", "GG202")
def a_layer_is_never_used(project: Project) -> None:
    class Unused(MiniGPT):
        def __init__(self, config: MiniGPTConfig) -> None:
            super().__init__(config)
            self.spare = nn.Linear(config.embedding_dim, config.embedding_dim)

    project.model_class = Unused


@mutant("gradients", "GG202")
def embeddings_are_detached(project: Project) -> None:
    def change(module: Any, x: Tensor) -> Any:
        out = module.block(x.detach())
        return out + module.gate * module.extra(out)

    project.model_class = around_block("Detached", change)


@mutant("gradients", "GG202")
def a_block_runs_without_a_graph(project: Project) -> None:
    def change(module: Any, x: Tensor) -> Any:
        with torch.no_grad():
            inner = module.block(x) - x
        out = x + inner
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
    def change(module: Any, x: Tensor) -> Any:
        out = module.block(x)
        return out + 0.0 * module.extra(out) + module.gate * out

    project.model_class = around_block("DeadBranch", change)


@mutant("gradients", "GG104")
def the_derivative_is_infinite_at_zero(project: Project) -> None:
    def change(module: Any, x: Tensor) -> Any:
        out = module.block(x)
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
def every_token_looks_the_same(project: Project) -> None:
    """The model sees how long the text is, and nothing of what it says."""

    def forward(self: MiniGPT, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return MiniGPT.forward(self, torch.zeros_like(ids), targets)

    project.given["overfit_steps"] = 300
    project.model_class = type("Blind", (MiniGPT,), {"forward": forward})


@mutant("overfit", "GG677")
def dropout_is_never_applied(project: Project) -> None:
    class Undropped(MiniGPT):
        def __init__(self, config: MiniGPTConfig) -> None:
            super().__init__(config)
            for module in self.modules():
                if isinstance(module, nn.Dropout):
                    object.__setattr__(module, "forward", lambda x: x)
                if isinstance(module, CausalSelfAttention):
                    module.dropout = 0.0

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
