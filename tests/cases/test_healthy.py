"""Healthy GPTs stay silent: whatever looks odd here is meant so."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mini_gpt import MiniGPT, MiniGPTConfig

VOCABULARY, LENGTH, WIDTH = 24, 12, 32
STEPS = 60
Guarded = Callable[..., Any]


def gpt(dropout: float = 0.0, layers: int = 2) -> MiniGPT:
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "block_size": LENGTH, "embedding_dim": WIDTH, "num_heads": 2}
    return MiniGPT(MiniGPTConfig(**sizes, num_layers=layers, dropout=dropout))


def batch(rows: int = 8, highest: int = VOCABULARY) -> tuple[Tensor, Tensor]:
    """Counting up in steps of 1 to 3: easy to learn."""
    start, stride = torch.randint(highest, (rows, 1)), torch.randint(1, 4, (rows, 1))
    ids = (start + stride * torch.arange(LENGTH + 1)) % highest
    return ids[:, :-1], ids[:, 1:]


def train(
    model: nn.Module, optimizer: Any, *, steps: int = STEPS, clip: float | None = 1.0, schedule: Any = None, **data: Any
) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(*batch(**data))[1]
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if schedule is not None:
            schedule.step()


def adamw(model: nn.Module, lr: float = 3e-3) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


def warm_up_and_cosine(step: int) -> float:
    return step / 10 if step < 10 else 0.5 + 0.5 * math.cos(math.pi * (step - 10) / (STEPS - 10))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_warm_up_from_zero_cosine_to_zero_and_clipping(guarded: Guarded, dropout: float) -> None:
    model = gpt(dropout)
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_and_cosine)
    with guarded(model, optimizer, scheduler=schedule):
        train(model, optimizer, schedule=schedule, steps=STEPS + 1)


@pytest.mark.parametrize(
    "kind",
    [
        lambda p: torch.optim.AdamW(p, lr=3e-3, fused=True),
        lambda p: torch.optim.AdamW(p, lr=3e-3, foreach=True),
        lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9),
        lambda p: torch.optim.Adagrad(p, lr=0.02),
        lambda p: torch.optim.RMSprop(p, lr=1e-3),
        lambda p: torch.optim.Adafactor(p, lr=0.01),
    ],
    ids=["fused", "foreach", "momentum", "adagrad", "rmsprop", "adafactor"],
)
def test_optimizers(guarded: Guarded, kind: Callable[[Any], Any]) -> None:
    model = gpt()
    optimizer = kind(model.parameters())
    with guarded(model, optimizer):
        train(model, optimizer)


def test_matrices_and_the_rest_have_optimizers_of_their_own(guarded: Guarded) -> None:
    model = gpt()
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    optimizers = [torch.optim.SGD(matrices, lr=0.1, momentum=0.95, nesterov=True), torch.optim.AdamW(rest, lr=3e-3)]
    with guarded(model, optimizers) as guardian:
        for _ in range(STEPS):
            loss = model(*batch())[1]
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert guardian.step == STEPS


def test_tied_weights(guarded: Guarded) -> None:
    model = gpt()
    nn.init.normal_(model.token_embedding.weight, std=0.02)
    model.head.weight = model.token_embedding.weight
    optimizer = adamw(model)
    with guarded(model, optimizer):
        train(model, optimizer)


class LowRank(nn.Module):
    """An adapter as LoRA has it: the second half starts at zero."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.base(x) + x @ self.down.T @ self.up.T
        return output


def test_frozen_layers_with_adapters(guarded: Guarded) -> None:
    model = gpt().requires_grad_(False)
    for block in model.blocks:
        attention, mlp = cast(Any, block).attention, cast(Any, block).mlp
        attention.query_key_value = LowRank(attention.query_key_value)
        mlp.up = LowRank(mlp.up)
    optimizer = adamw(model, 1e-2)
    with guarded(model, optimizer):
        train(model, optimizer)


def test_a_frozen_embedding_that_the_optimizer_holds(guarded: Guarded) -> None:
    model = gpt()
    model.token_embedding.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with guarded(model, optimizer):
        train(model, optimizer)


def test_gradual_unfreezing(guarded: Guarded) -> None:
    model = gpt()
    model.blocks.requires_grad_(False)
    optimizer = adamw(model)
    with guarded(model, optimizer):
        train(model, optimizer, steps=30)
        model.blocks.requires_grad_(True)
        optimizer.add_param_group({"params": list(model.blocks.parameters())})
        train(model, optimizer, steps=50)


def test_accumulation_with_an_empty_micro_batch(guarded: Guarded) -> None:
    model = gpt()
    optimizer = adamw(model)
    with guarded(model, optimizer) as guardian:
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(4):
                ids, targets = batch(4)
                if part == step % 4:
                    targets = torch.full_like(targets, -100)
                logits = model(ids)[0].flatten(0, 1)
                kept = max(1, int((targets != -100).sum()))
                loss = F.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=-100) / kept
                (loss / 4).backward()
            optimizer.step()
    assert guardian.step == STEPS


def test_zero_initialised_projections(guarded: Guarded) -> None:
    model = gpt(layers=4)
    for name, parameter in model.named_parameters():
        if name.endswith(("projection.weight", "down.weight", "head.weight")):
            nn.init.zeros_(parameter)
    optimizer = adamw(model)
    with guarded(model, optimizer):
        train(model, optimizer)


def test_an_average_of_the_weights_is_evaluated(guarded: Guarded) -> None:
    model = gpt(0.1)
    optimizer = adamw(model)
    average = copy.deepcopy(model).eval()
    swa = torch.optim.swa_utils.AveragedModel(model)
    with guarded(model, optimizer):
        for step in range(STEPS):
            train(model, optimizer, steps=1)
            with torch.no_grad():
                for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                    mine.lerp_(theirs, 0.1)
                swa.update_parameters(model)
                if step % 20 == 19:
                    average(*batch())
                    swa.eval()(*batch())


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(guarded: Guarded, reentrant: bool) -> None:
    class Checkpointed(MiniGPT):
        def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
            x = self.token_embedding(ids) + self.position_embedding(torch.arange(LENGTH))
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            logits = self.head(self.norm(x))
            assert targets is not None
            return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    model = Checkpointed(gpt(0.1).config)
    optimizer = adamw(model)
    with guarded(model, optimizer) as guardian:
        train(model, optimizer)
    assert guardian.latest.micro_batches == 1


def test_validation_and_generation_inside_training(guarded: Guarded) -> None:
    model = gpt(0.1)
    optimizer = adamw(model)
    with guarded(model, optimizer) as guardian:
        for _ in range(4):
            train(model, optimizer, steps=20)
            with guardian.evaluating():
                model(*batch())
            model.eval()
            with torch.no_grad():
                model(*batch())
            model.train()
            model.generate(batch()[0], 5, top_k=5)
