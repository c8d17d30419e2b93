"""Leaks that only show in training mode, and prefixes whose logits depend on how long the row is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mini_gpt import MiniGPT, MiniGPTConfig

from .bugs_shapes import Output, loss_of
from .project import Project
from .table import mutant


def after(name: str, change: Any) -> type[MiniGPT]:
    """MiniGPT whose logits are `change(self, ids, logits)`."""

    def forward(self: MiniGPT, ids: Tensor, targets: Tensor | None = None) -> Output:
        logits = change(self, ids, MiniGPT.forward(self, ids)[0])
        return logits, None if targets is None else loss_of(logits, targets)

    return type(name, (MiniGPT,), {"forward": forward})


def embedded(self: MiniGPT, ids: Tensor) -> Tensor:
    out: Tensor = self.head(self.token_embedding(ids))
    return out


@mutant("causality", "GG660", "training_mode")
def the_mask_is_missing_in_training_mode(project: Project) -> None:
    project.model_class = after(
        "Unmasked",
        lambda self, ids, logits: logits + (embedded(self, ids).flip(1).cumsum(1).flip(1) if self.training else 0.0),
    )


@mutant("causality", "GG660", "training_mode")
def the_next_token_is_mixed_in_while_training(project: Project) -> None:
    project.model_class = after(
        "Helped", lambda self, ids, logits: logits + (embedded(self, ids).roll(-1, 1) if self.training else 0.0)
    )


@mutant("causality", "GG661", "training_mode")
def the_batch_mean_is_taken_off_while_training(project: Project) -> None:
    project.model_class = after(
        "Centred",
        lambda self, ids, logits: logits - (embedded(self, ids).mean(0, keepdim=True) if self.training else 0.0),
    )


@mutant("causality", "GG661", "training_mode")
def rows_are_mixed_while_training(project: Project) -> None:
    project.model_class = after(
        "Mixed", lambda self, ids, logits: logits.lerp(logits.roll(1, 0), 0.1) if self.training else logits
    )


@mutant("causality", "GG648", "reversed_positions")
def positions_are_counted_from_the_end(project: Project) -> None:
    class Reversed(MiniGPT):
        def __init__(self, config: MiniGPTConfig) -> None:
            super().__init__(config)
            self.position_embedding.register_forward_hook(lambda module, args, output: output.flip(0))

    project.model_class = Reversed


@mutant("causality", "GG648", "length")
def logits_are_divided_by_the_length(project: Project) -> None:
    project.model_class = after("Divided", lambda self, ids, logits: logits / ids.size(1) ** 0.5)


@mutant("causality", "GG648", "length")
def positions_are_stretched_over_the_row(project: Project) -> None:
    def change(self: MiniGPT, ids: Tensor, logits: Tensor) -> Tensor:
        share = torch.arange(ids.size(1)) / ids.size(1)
        wave: Tensor = torch.sin(7 * share)[:, None] * F.softplus(self.head.weight[:, 0])
        return logits + wave

    project.model_class = after("Stretched", change)
