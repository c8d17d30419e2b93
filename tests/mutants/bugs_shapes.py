"""Bugs in what forward takes and returns, and in the loss that it computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mini_gpt import MiniGPT, MiniGPTConfig

from .project import BLOCK, Project
from .table import mutant

Output = tuple[Tensor, Tensor | None]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def with_forward(name: str, forward: Any) -> type[MiniGPT]:
    """MiniGPT with another forward."""
    return type(name, (MiniGPT,), {"forward": forward})


@mutant("shapes", "GG640")
def logits_have_the_vocabulary_before_time(project: Project) -> None:
    def forward(self: MiniGPT, ids: Tensor, targets: Tensor | None = None) -> Output:
        logits = MiniGPT.forward(self, ids)[0]
        return logits.transpose(1, 2), None if targets is None else loss_of(logits, targets)

    project.model_class = with_forward("Turned", forward)


@mutant("shapes", "GG640")
def only_the_last_position_is_returned(project: Project) -> None:
    def forward(self: MiniGPT, ids: Tensor, targets: Tensor | None = None) -> Output:
        logits, loss = MiniGPT.forward(self, ids, targets)
        return logits[:, -1], loss

    project.model_class = with_forward("LastOnly", forward)


@mutant("shapes", "GG640")
def predictions_in_place_of_logits(project: Project) -> None:
    def forward(self: MiniGPT, ids: Tensor, targets: Tensor | None = None) -> Output:
        logits, loss = MiniGPT.forward(self, ids, targets)
        return logits.argmax(-1, keepdim=True).expand_as(logits), loss

    project.model_class = with_forward("Predicting", forward)


class NarrowHead(MiniGPT):
    def __init__(self, config: MiniGPTConfig) -> None:
        super().__init__(config)
        self.head = nn.Linear(config.embedding_dim, config.vocab_size - 2, bias=False)


@mutant("shapes", "GG641")
def the_head_is_too_narrow_for_the_vocabulary(project: Project) -> None:
    project.model_class = NarrowHead

    def get_batch() -> tuple[Tensor, Tensor]:
        x, y = project.healthy_batch()
        return x.clamp(max=30), y.clamp(max=30)

    project.get_batch = get_batch


@mutant("shapes", "GG642")
def the_loss_is_not_reduced(project: Project) -> None:
    def forward(self: MiniGPT, ids: Tensor, targets: Tensor | None = None) -> Output:
        logits = MiniGPT.forward(self, ids)[0]
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")

    project.model_class = with_forward("Unreduced", forward)


class ShortTable(MiniGPT):
    def __init__(self, config: MiniGPTConfig) -> None:
        super().__init__(config)
        self.position_embedding = nn.Embedding(config.block_size - 1, config.embedding_dim)


@mutant("shapes", "GG643")
def the_position_table_is_one_row_short(project: Project) -> None:
    project.model_class = ShortTable


@mutant("shapes", "GG644")
def squeeze_loses_the_batch_of_one(project: Project) -> None:
    def forward(self: MiniGPT, ids: Tensor, targets: Tensor | None = None) -> Output:
        logits, loss = MiniGPT.forward(self, ids, targets)
        return logits.squeeze(), loss

    project.model_class = with_forward("Squeezing", forward)


@mutant("shapes", "GG644")
def forward_knows_one_length_only(project: Project) -> None:
    def forward(self: MiniGPT, ids: Tensor, targets: Tensor | None = None) -> Output:
        logits, loss = MiniGPT.forward(self, ids, targets)
        return logits.view(ids.size(0), BLOCK, -1), loss

    project.model_class = with_forward("Rigid", forward)


@mutant("initial-loss", "GG652")
def the_model_ends_with_softmax(project: Project) -> None:
    def forward(self: MiniGPT, ids: Tensor, targets: Tensor | None = None) -> Output:
        scores = MiniGPT.forward(self, ids)[0].softmax(-1)
        return scores, None if targets is None else loss_of(scores, targets)

    project.model_class = with_forward("WithSoftmax", forward)


@mutant("initial-loss", "GG652")
def the_loss_is_fed_probabilities(project: Project) -> None:
    def forward(self: MiniGPT, ids: Tensor, targets: Tensor | None = None) -> Output:
        logits = MiniGPT.forward(self, ids)[0]
        return logits, None if targets is None else loss_of(logits.softmax(-1), targets)

    project.model_class = with_forward("DoubleSoftmax", forward)


@mutant("batches", "GG603")
def batch_and_model_both_shift(project: Project) -> None:
    def forward(self: MiniGPT, ids: Tensor, targets: Tensor | None = None) -> Output:
        logits = MiniGPT.forward(self, ids)[0]
        return logits, None if targets is None else loss_of(logits[:, :-1], targets[:, 1:])

    project.model_class = with_forward("ShiftingToo", forward)


@mutant("initial-loss", "GG653")
def the_loss_shifts_backwards(project: Project) -> None:
    def forward(self: MiniGPT, ids: Tensor, targets: Tensor | None = None) -> Output:
        logits = MiniGPT.forward(self, ids)[0]
        return logits, None if targets is None else loss_of(logits[:, 1:], targets[:, :-1])

    project.model_class = with_forward("Backwards", forward)


@mutant("initial-loss", "GG654")
def logits_and_targets_are_flattened_in_other_orders(project: Project) -> None:
    def forward(self: MiniGPT, ids: Tensor, targets: Tensor | None = None) -> Output:
        logits = MiniGPT.forward(self, ids)[0]
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.transpose(0, 1).flatten(0, 1), targets.flatten())

    project.model_class = with_forward("Crossed", forward)


@mutant("initial-loss", "GG655")
def the_loss_is_a_sum(project: Project) -> None:
    def forward(self: MiniGPT, ids: Tensor, targets: Tensor | None = None) -> Output:
        logits = MiniGPT.forward(self, ids)[0]
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")

    project.model_class = with_forward("Summing", forward)


class LoudHead(MiniGPT):
    def __init__(self, config: MiniGPTConfig) -> None:
        super().__init__(config)
        nn.init.normal_(self.head.weight, std=1.0)


@mutant("initial-loss", "GG650")
def the_output_layer_starts_fifty_times_too_large(project: Project) -> None:
    project.model_class = LoudHead


@mutant("initial-loss", "GG650")
def the_bias_prefers_one_token(project: Project) -> None:
    class Biased(MiniGPT):
        def __init__(self, config: MiniGPTConfig) -> None:
            super().__init__(config)
            self.head = nn.Linear(config.embedding_dim, config.vocab_size)
            nn.init.normal_(self.head.weight, std=0.02)
            with torch.no_grad():
                self.head.bias.zero_()
                self.head.bias[0] = 12.0

    project.model_class = Biased


@mutant("initial-loss", "GG658", trained=True)
def the_trained_weights_were_not_loaded(project: Project) -> None:
    project.weights = None
    project.checkpoint = None


@mutant("initial-loss", "GG658", trained=True)
def training_data_was_encoded_by_another_tokenizer(project: Project) -> None:
    order = torch.randperm(project.config.vocab_size, generator=torch.Generator().manual_seed(0))
    project.data = {name: order[ids] for name, ids in project.data.items()}
    x, y = project.healthy_batch()
    project.batch = (order[x], order[y])
    project.config = replace(project.config)
