"""Language models of many kinds train under every default guard without a word."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .conftest import Guarded
from .programs import STEPS, characters, learned, windows
from .transformer import LENGTH, WIDTH, Transformer, rate


class Recurrent(nn.Module):
    """Time first, as nn.LSTM has it when it is told nothing; the output layer shares the table of tokens."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)
        self.encoder = nn.Embedding(vocabulary, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.1)
        self.decoder = nn.Linear(WIDTH, vocabulary)
        self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, ids: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        output, hidden = self.rnn(self.drop(self.encoder(ids)), hidden)
        return F.log_softmax(self.decoder(self.drop(output)).flatten(0, 1), dim=1), hidden

    def start(self, rows: int) -> tuple[Tensor, Tensor]:
        zeros = next(self.parameters()).new_zeros(2, rows, WIDTH)
        return zeros, zeros.clone()


def test_an_lstm_whose_state_goes_on_from_window_to_window(guarded: Guarded) -> None:
    ids, vocabulary = characters()
    rows = 8
    columns = ids[: len(ids) // rows * rows].view(rows, -1).T.contiguous()
    train, valid = columns[:1200], columns[1200:1400]
    model = Recurrent(vocabulary)
    optimizer = torch.optim.SGD(model.parameters(), lr=4.0)
    criterion = nn.NLLLoss()

    def evaluate() -> float:
        model.eval()
        total, hidden = 0.0, model.start(rows)
        with torch.no_grad():
            for place in range(0, len(valid) - 1, LENGTH):
                length = min(LENGTH, len(valid) - 1 - place)
                output, hidden = model(valid[place : place + length], hidden)
                total += length * criterion(output, valid[place + 1 : place + 1 + length].flatten()).item()
        return total / (len(valid) - 1)

    losses: list[float] = []
    hidden: Any
    with guarded(model, optimizer):
        while len(losses) < STEPS:
            model.train()
            hidden = model.start(rows)
            for place in range(0, len(train) - 1, LENGTH):
                length = min(LENGTH, len(train) - 1 - place)
                hidden = tuple(each.detach() for each in hidden)
                model.zero_grad()
                output, hidden = model(train[place : place + length], hidden)
                loss = criterion(output, train[place + 1 : place + 1 + length].flatten())
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.25)
                optimizer.step()
                losses.append(loss.item())
            if evaluate() > 10:
                for group in optimizer.param_groups:
                    group["lr"] /= 4.0
    learned(losses, 0.85)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay; biases and norms do not."""
    return [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
def test_a_transformer_with_all_that_belongs_to_it(guarded: Guarded, half: bool) -> None:
    """Warm-up, cosine by hand, accumulation, clipping, validation and samples; in bfloat16 by autocast as well."""
    ids, vocabulary = characters()
    train, valid = ids[:10000], ids[10000:]
    model = Transformer(vocabulary, dropout=0.1, layers=2)
    optimizer = torch.optim.AdamW(groups(model), lr=6e-3, betas=(0.9, 0.95))
    accumulated, losses = 2, []

    @torch.no_grad()
    def estimate() -> dict[str, float]:
        model.eval()
        found = {}
        for name, text in (("train", train), ("val", valid)):
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                measured = [model(*windows(text, 4, LENGTH)).loss for _ in range(2)]
            found[name] = float(torch.stack([each for each in measured if each is not None]).mean())
        model.train()
        return found

    with guarded(model, optimizer) as guardian:
        for step in range(STEPS):
            for group in optimizer.param_groups:
                group["lr"] = 6e-3 * rate(step)
            if step % 50 == 0:
                guardian.log(**estimate())
                model.eval()
                model.generate(valid[None, :4], 4)
                model.train()
            total = 0.0
            for _ in range(accumulated):
                with torch.autocast("cpu", torch.bfloat16, enabled=half):
                    loss = model(*windows(train, 8, LENGTH)).loss / accumulated
                loss.backward()
                total += loss.item()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(total)
    learned(losses)


def test_labels_that_the_model_shifts_itself(guarded: Guarded) -> None:
    """Activation checkpointing, GradScaler on the CPU, and labels that are the ids."""
    ids, vocabulary = characters()
    model = Transformer(vocabulary, checkpointed=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    scaler = torch.amp.GradScaler("cpu")
    losses = []
    with guarded(model, optimizer, scheduler=scheduler, scaler=scaler):
        for _ in range(STEPS):
            batch, _ = windows(ids, 8, LENGTH)
            with torch.autocast("cpu", torch.bfloat16):
                output = model(input_ids=batch, labels=batch)
            scaler.scale(output.loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(output.loss.item())
    learned(losses, 0.85)
