"""A healthy mini project, all parts of it in one object, so that a mutant can break one and leave the others alone."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from char_tokenizer import CharTokenizer
from gpt_guard.checks.runner.base import NAMES
from gpt_guard.checks.runner.report import PreflightReport
from gpt_guard.checks.runner.run import check
from mini_gpt import MiniGPT, MiniGPTConfig

BLOCK, ROWS = 16, 8
OVERFIT_STEPS = 150
"""Enough for the small model here; a healthy one is through long before."""
WHO = ["Anna", "Bert", "the captain", "a quick sailor", "my sister", "nobody", "the old cook", "every guest"]
DID = ["saw", "sold", "painted", "counted", "never found", "carried", "asked for", "dreamed of"]
WHAT = ["red ships", "green bottles", "letters", "wooden horses", "maps", "quiet rooms", "figs", "jars of zinc"]
WHERE = ["in Oslo", "near the harbour", "behind a wall", "on Friday", "by the exit", "at noon", "up north", "in a box"]

GetBatch = Callable[[], tuple[Tensor, Tensor]]


def write_text(sentences: int, seed: int) -> str:
    """Sentences at random, the same for the same seed."""
    draw = random.Random(seed)
    parts = (
        f"{draw.choice(WHO)} {draw.choice(DID)} {draw.randint(2, 99)} {draw.choice(WHAT)} {draw.choice(WHERE)}."
        for _ in range(sentences)
    )
    return " ".join(parts)


TEXT = write_text(1500, seed=1)
VAL_TEXT = write_text(150, seed=2)
TOKENIZER = CharTokenizer.from_text(TEXT + VAL_TEXT + "0123456789")
CONFIG = MiniGPTConfig(len(TOKENIZER), block_size=BLOCK, embedding_dim=32, num_heads=2, num_layers=2, dropout=0.1)


def encode(text: str) -> Tensor:
    """Ids of a text by the healthy tokenizer."""
    return torch.tensor(TOKENIZER.encode(text))


@dataclass
class Project:
    """Everything that `check` takes; `given` holds further arguments of it, `patch` sets an attribute."""

    folder: Path
    config: Any = CONFIG
    model_class: Callable[[Any], nn.Module] = MiniGPT
    tokenizer: Any = TOKENIZER
    data: dict[str, Any] = field(default_factory=dict)
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: torch.optim.AdamW(
        model.parameters(), lr=1e-3
    )
    get_batch: GetBatch | None = None
    batch: tuple[Tensor, Tensor] | None = None
    weights: dict[str, Tensor] | None = None
    checkpoint: Any = None
    given: dict[str, Any] = field(default_factory=dict)
    patch: Callable[[Any, str, Any], None] = setattr
    _model: nn.Module | None = None

    @property
    def model(self) -> nn.Module:
        """The model, built when it is first asked for: with `weights`, where there are any."""
        if self._model is None:
            torch.manual_seed(0)
            self._model = self.model_class(self.config)
            if self.weights is not None:
                self._model.load_state_dict(self.weights, strict=False)
        return self._model

    @model.setter
    def model(self, model: nn.Module) -> None:
        self._model = model

    def write_files(self) -> None:
        """Write tokenizer, splits and checkpoint into the folder, and have them checked as files."""
        TOKENIZER.save(self.folder / "tokenizer.json")
        for name, ids in self.data.items():
            torch.save(ids, self.folder / f"{name}.pt")
        torch.save(self.checkpoint or payload(self), self.folder / "checkpoint.pt")
        self.data = {name: self.folder / f"{name}.pt" for name in self.data}
        self.tokenizer = self.folder / "tokenizer.json"
        self.checkpoint = self.folder / "checkpoint.pt"

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """What the loop would draw."""
        get_batch = self.get_batch or self.healthy_batch
        return (get_batch() for _ in itertools.count())

    def healthy_batch(self) -> tuple[Tensor, Tensor]:
        """Rows of the training text, the targets one token later."""
        ids = encode(TEXT)
        rows = ids[torch.randint(len(ids) - BLOCK, (ROWS, 1)) + torch.arange(BLOCK + 1)]
        return rows[:, :-1], rows[:, 1:]

    def check(self, **options: Any) -> PreflightReport:
        """Preflight of all parts."""
        parts: dict[str, Any] = {
            "data": self.data,
            "tokenizer": self.tokenizer,
            "optimizer": self.make_optimizer(self.model),
            "config": self.config,
            "checkpoint": self.checkpoint,
            "overfit_steps": OVERFIT_STEPS,
            "device": "cpu",
        }
        if self.batch is not None:
            parts["batch"] = self.batch
        else:
            parts["batches"] = self.batches
        return check(self.model, **{**parts, **self.given, **options})


def healthy(folder: Path, *, trained: bool = False) -> Project:
    """The project with nothing wrong: fresh, or with trained weights and their checkpoint."""
    project = Project(folder, data={"train": encode(TEXT), "val": encode(VAL_TEXT)})
    if trained:
        project.weights = {name: value.clone() for name, value in trained_weights().items()}
        project.checkpoint = payload(project)
        project.given["trained"] = True
    return project


def payload(project: Project) -> dict[str, Any]:
    """A checkpoint as the example writes it."""
    weights = project.model.state_dict() if project.weights is None else project.weights
    return {
        "config": dataclasses.asdict(CONFIG),
        "model_state_dict": {name: value.clone() for name, value in weights.items()},
        "tokenizer_fingerprint": TOKENIZER.fingerprint,
        "step": 300 if project.weights is not None else 0,
    }


@cache
def trained_weights() -> dict[str, Tensor]:
    """Weights of the healthy model after it has learned the text's words, some seconds of training."""
    return train(MiniGPT)


@cache
def train(model_class: Callable[[Any], nn.Module], steps: int = 300) -> dict[str, Tensor]:
    """Train a class of model on the text and return its weights; leaves the random state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(CONFIG)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps)
        ids = encode(TEXT)
        for _ in range(steps):
            rows = ids[torch.randint(len(ids) - BLOCK, (16, 1)) + torch.arange(BLOCK + 1)]
            optimizer.zero_grad()
            model(rows[:, :-1], rows[:, 1:])[1].backward()
            optimizer.step()
            schedule.step()
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


SLOW = ("gradients", "overfit")
"""Stages that cost the most: only asked where one of them should fail, or stands right behind one that should."""


def stages_for(stage: str) -> tuple[str, ...]:
    """The names of the stages that come before one, its own, and none of the slow ones but it."""
    return tuple(name for name in NAMES[: NAMES.index(stage) + 1] if name == stage or name not in SLOW)
