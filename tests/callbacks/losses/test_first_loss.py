"""The first loss of a run: far above an even guess is a warning where the model starts untrained."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gpt_guard import Finding, Guardian, Severity
from gpt_guard.callbacks.losses.guard import LossInputs

VOCABULARY, WIDTH = 50, 32


class Language(nn.Module):
    """Embedding, norm, tied or own head."""

    def __init__(self, *, tied: bool, scale: float = 1.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.scale = scale
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.tokens(ids).roll(1, 1))) * self.scale
        return logits


def said(model: nn.Module) -> list[Finding]:
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Guardian(model, optimizer, guards=[LossInputs()], sinks=[], summary=False) as guardian:
        for _ in range(3):
            ids = torch.randint(VOCABULARY, (8, 17))
            optimizer.zero_grad()
            F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()
    return [each for each in guardian.findings if each.code == "GG627"]


def drawn(model: Language, std: float) -> Language:
    nn.init.normal_(model.head.weight, std=std)
    return model


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (Language(tied=True), "head.weight"),
        (drawn(Language(tied=False), 1.0), "head.weight"),
        (Language(tied=False, scale=30.0), "head.weight"),
    ],
    ids=["tied to an embedding of torch's default", "a wide head", "a temperature"],
)
def test_an_untrained_model_that_starts_far_above_is_a_warning(model: nn.Module, name: str) -> None:
    (found,) = said(model)
    assert (found.severity, found.step) == (Severity.WARNING, 0)
    assert f"`{name}` has a std of" in found.seen


def test_a_trained_model_on_another_task_is_a_note() -> None:
    model = drawn(Language(tied=False), 1.0)
    nn.init.uniform_(model.norm.weight, 0.8, 1.2)
    (found,) = said(model)
    assert found.severity is Severity.INFO


@pytest.mark.parametrize(
    "model",
    [Language(tied=False), drawn(Language(tied=True), 0.02), drawn(Language(tied=False), WIDTH**-0.5)],
    ids=["torch's default head", "GPT-2's std", "one over the root of the width"],
)
def test_usual_initialisations_are_silent(model: nn.Module) -> None:
    assert said(model) == []
