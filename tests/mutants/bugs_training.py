"""Bugs of the optimizer, of evaluation, of checkpoints."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mini_gpt import MiniGPT, MiniGPTConfig

from .project import Project
from .table import mutant


@mutant("optimizer", "GG307")
def the_optimizer_holds_an_old_copy(project: Project) -> None:
    project.make_optimizer = lambda model: torch.optim.AdamW(copy.deepcopy(model).parameters(), lr=1e-3)


@mutant("optimizer", "GG302")
def the_optimizer_lacks_the_head(project: Project) -> None:
    project.make_optimizer = lambda model: torch.optim.AdamW(
        [p for name, p in model.named_parameters() if "head" not in name], lr=1e-3
    )


@mutant("optimizer", "GG401")
def the_learning_rate_is_zero(project: Project) -> None:
    project.make_optimizer = lambda model: torch.optim.AdamW(model.parameters(), lr=0.0)


@mutant("optimizer", "GG321")
def the_learning_rate_is_ten(project: Project) -> None:
    project.make_optimizer = lambda model: torch.optim.AdamW(model.parameters(), lr=10.0)


@mutant("optimizer", "GG402")
def the_learning_rate_is_nan(project: Project) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer.param_groups[0]["lr"] = float("nan")
        return optimizer

    project.make_optimizer = make


@mutant("optimizer", "GG320")
def a_parameter_is_in_two_groups(project: Project) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer.param_groups[0]["params"].append(optimizer.param_groups[0]["params"][0])
        return optimizer

    project.make_optimizer = make


@mutant("optimizer", "GG305")
def updates_are_lost_to_rounding(project: Project) -> None:
    project.model = MiniGPT(project.config).to(torch.bfloat16)
    project.given["make_model"] = lambda: MiniGPT(project.config).to(torch.bfloat16)
    project.make_optimizer = lambda model: torch.optim.AdamW(model.parameters(), lr=1e-7, weight_decay=0.0)


@mutant("validation", "GG663")
def dropout_stays_on_in_evaluation(project: Project) -> None:
    class Noisy(MiniGPT):
        def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
            logits = F.dropout(MiniGPT.forward(self, ids)[0], 0.02)
            if targets is None:
                return logits, None
            return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    project.model_class = Noisy


@mutant("validation", "GG665")
def eval_does_nothing(project: Project) -> None:
    class Stubborn(MiniGPT):
        def train(self, mode: bool = True) -> Stubborn:
            return super().train(True)

    project.model_class = Stubborn
    project.config = replace(project.config, dropout=0.02)


@mutant("validation", "GG664")
def evaluation_updates_a_running_mean(project: Project) -> None:
    class Centring(MiniGPT):
        running_mean: Tensor

        def __init__(self, config: MiniGPTConfig) -> None:
            super().__init__(config)
            self.register_buffer("running_mean", torch.zeros(config.embedding_dim))
            self.norm.register_forward_hook(self.note)

        def note(self, _: nn.Module, args: Any, output: Tensor) -> None:
            with torch.no_grad():
                self.running_mean.lerp_(output.mean((0, 1)).float(), 0.1)

    project.model_class = Centring


class Unsaved(MiniGPT):
    def __init__(self, config: MiniGPTConfig) -> None:
        super().__init__(config)
        self.scale = torch.rand(config.embedding_dim) + 0.5
        self.norm.register_forward_hook(lambda module, args, output: output * self.scale)


@mutant("checkpoint", "GG720")
def logits_depend_on_a_tensor_that_is_not_saved(project: Project) -> None:
    project.model_class = Unsaved


@mutant("checkpoint", "GG706", trained=True)
def the_saved_weights_are_nan(project: Project) -> None:
    project.checkpoint["model_state_dict"]["head.weight"][3, 3] = float("nan")


@mutant("checkpoint", "GG705", trained=True)
def the_saved_model_is_wider(project: Project) -> None:
    wide = MiniGPT(replace(project.config, embedding_dim=48))
    project.checkpoint["model_state_dict"] = wide.state_dict()


@mutant("checkpoint", "GG705", trained=True)
def the_saved_model_has_a_layer_less(project: Project) -> None:
    weights = project.checkpoint["model_state_dict"]
    project.checkpoint["model_state_dict"] = {k: v for k, v in weights.items() if not k.startswith("blocks.1.")}


@mutant("checkpoint", "GG705", trained=True)
def the_saved_vocabulary_is_larger(project: Project) -> None:
    other = MiniGPT(replace(project.config, vocab_size=project.config.vocab_size + 3))
    project.checkpoint["model_state_dict"] = other.state_dict()


@mutant("checkpoint", "GG702", trained=True)
def the_model_is_built_with_another_number_of_heads(project: Project) -> None:
    """All shapes fit, and every answer is another."""
    project.checkpoint["config"]["num_heads"] = 4


@mutant("checkpoint", "GG708", trained=True)
def the_saved_optimizer_is_of_another_model(project: Project) -> None:
    other = MiniGPT(replace(project.config, num_layers=1))
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-3)
    other(*project.healthy_batch())[1].backward()
    optimizer.step()
    project.checkpoint["optimizer_state_dict"] = optimizer.state_dict()
