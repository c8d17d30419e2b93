"""Bugs of the sampling loop, in a model that has learned its text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mini_gpt import MiniGPT

from .project import BLOCK, Project
from .table import mutant


def sampling(generate: Any) -> type[MiniGPT]:
    """MiniGPT with another generate."""
    return type("Sampling", (MiniGPT,), {"generate": generate})


@torch.no_grad()
def draw(
    self: MiniGPT,
    ids: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    *,
    context: Any = lambda ids: ids[:, -BLOCK:],
    position: int = -1,
    cold: Any = lambda logits, temperature: logits / max(temperature, 1e-6),
) -> Tensor:
    """The usual loop, of which each mutant changes one thing."""
    for _ in range(max_new_tokens):
        logits = self(context(ids))[0][:, position]
        chosen = torch.multinomial(cold(logits, temperature).softmax(-1), 1)
        ids = torch.cat([ids, chosen], 1)
    return ids


def in_eval(run: Any) -> Any:
    """Put a generate into eval mode and back, as a healthy one does."""

    def generate(self: MiniGPT, ids: Tensor, max_new_tokens: int, temperature: float = 1.0) -> Tensor:
        was = self.training
        self.eval()
        try:
            out: Tensor = run(self, ids, max_new_tokens, temperature)
        finally:
            self.train(was)
        return out

    return generate


@mutant("generation", "GG681", trained=True)
def the_oldest_tokens_are_kept(project: Project) -> None:
    def run(self: MiniGPT, ids: Tensor, max_new_tokens: int, temperature: float) -> Tensor:
        return draw(self, ids, max_new_tokens, temperature, context=lambda ids: ids[:, :BLOCK])

    project.model_class = sampling(in_eval(run))


@mutant("generation", "GG682", trained=True)
def the_context_is_never_cropped(project: Project) -> None:
    def run(self: MiniGPT, ids: Tensor, max_new_tokens: int, temperature: float) -> Tensor:
        return draw(self, ids, max_new_tokens, temperature, context=lambda ids: ids)

    project.model_class = sampling(in_eval(run))


@mutant("generation", "GG681", trained=True)
def the_first_position_is_sampled(project: Project) -> None:
    def run(self: MiniGPT, ids: Tensor, max_new_tokens: int, temperature: float) -> Tensor:
        return draw(self, ids, max_new_tokens, temperature, position=0)

    project.model_class = sampling(in_eval(run))


@mutant("generation", "GG681", trained=True)
def only_the_last_token_is_given(project: Project) -> None:
    def run(self: MiniGPT, ids: Tensor, max_new_tokens: int, temperature: float) -> Tensor:
        return draw(self, ids, max_new_tokens, temperature, context=lambda ids: ids[:, -1:])

    project.model_class = sampling(in_eval(run))


@mutant("generation", "GG684", trained=True)
def temperature_multiplies(project: Project) -> None:
    def run(self: MiniGPT, ids: Tensor, max_new_tokens: int, temperature: float) -> Tensor:
        return draw(self, ids, max_new_tokens, temperature, cold=lambda logits, temperature: logits * temperature)

    project.model_class = sampling(in_eval(run))


@mutant("generation", "GG683", trained=True)
def generate_switches_to_training_mode(project: Project) -> None:
    def generate(self: MiniGPT, ids: Tensor, max_new_tokens: int, temperature: float = 1.0) -> Tensor:
        self.train()
        return draw(self, ids, max_new_tokens, temperature)

    project.model_class = sampling(generate)


@mutant("generation", "GG683", trained=True)
def generate_leaves_the_model_in_eval_mode(project: Project) -> None:
    def generate(self: MiniGPT, ids: Tensor, max_new_tokens: int, temperature: float = 1.0) -> Tensor:
        self.eval()
        return draw(self, ids, max_new_tokens, temperature)

    project.model_class = sampling(generate)


@mutant("generation", "GG684", trained=True)
def top_k_is_ignored(project: Project) -> None:
    def generate(
        self: MiniGPT, ids: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None
    ) -> Tensor:
        out: Tensor = in_eval(draw)(self, ids, max_new_tokens, temperature)
        return out

    project.model_class = sampling(generate)


@mutant("generation", "GG681", trained=True)
def softmax_is_applied_twice_before_the_draw(project: Project) -> None:
    def run(self: MiniGPT, ids: Tensor, max_new_tokens: int, temperature: float) -> Tensor:
        return draw(self, ids, max_new_tokens, temperature, cold=lambda logits, temperature: logits.softmax(-1))

    project.model_class = sampling(in_eval(run))


@mutant("generation", "GG688", trained=True)
def the_default_temperature_is_four(project: Project) -> None:
    def generate(self: MiniGPT, ids: Tensor, max_new_tokens: int, temperature: float = 4.0) -> Tensor:
        out: Tensor = in_eval(draw)(self, ids, max_new_tokens, temperature)
        return out

    project.model_class = sampling(generate)
