"""Programs on sequences with padding train under every default guard without a word."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from .conftest import Guarded
from .programs import STEPS, learned, phrases

PAD, START, END = 0, 1, 2
VOCABULARY, WIDTH = 12, 32


class Positions(nn.Module):
    """Sines, added to what comes in; time first or batch first."""

    table: Tensor

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        place = torch.arange(32)[:, None]
        speed = torch.exp(torch.arange(0, WIDTH, 2) * (-math.log(10000.0) / WIDTH))
        table = torch.zeros(32, WIDTH)
        table[:, 0::2], table[:, 1::2] = torch.sin(place * speed), torch.cos(place * speed)
        self.register_buffer("table", table)
        self.dropout = nn.Dropout(0.1)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        added = self.table[: x.size(1)] if self.batch_first else self.table[: x.size(0), None]
        output: Tensor = self.dropout(x + added)
        return output


class Translator(nn.Module):
    """An encoder and a decoder, both with masks for padding; time first where not said otherwise."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 64, batch_first=batch_first)
        encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.transformer = nn.Transformer(
            WIDTH, 2, num_decoder_layers=1, dim_feedforward=64, custom_encoder=encoder, batch_first=batch_first
        )
        self.source, self.target = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.positions, self.generator = Positions(batch_first), nn.Linear(WIDTH, VOCABULARY)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        time = 1 if self.transformer.batch_first else 0
        ahead = nn.Transformer.generate_square_subsequent_mask(target.size(time)) < 0
        here, there = (source == PAD, target == PAD) if time else ((source == PAD).T, (target == PAD).T)
        output = self.transformer(
            self.positions(self.source(source) * math.sqrt(WIDTH)),
            self.positions(self.target(target) * math.sqrt(WIDTH)),
            tgt_mask=ahead,
            src_key_padding_mask=here,
            tgt_key_padding_mask=there,
            memory_key_padding_mask=here,
        )
        logits: Tensor = self.generator(output)
        return logits


def translated(ids: Tensor, lengths: Tensor) -> Tensor:
    """Each id becomes the next one, in a frame of start and end: `[B, T + 2]`."""
    start, end = torch.tensor([START]), torch.tensor([END])
    pairs = zip(ids, lengths.tolist(), strict=True)
    rows = [torch.cat([start, (row[:length] - 2) % 9 + 3, end]) for row, length in pairs]
    return pad_sequence(rows, batch_first=True, padding_value=PAD)


@pytest.mark.parametrize("batch_first", [False, True], ids=["time first", "batch first"])
def test_translation(guarded: Guarded, batch_first: bool) -> None:
    model = Translator(batch_first)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.98), eps=1e-9)
    criterion = nn.CrossEntropyLoss(ignore_index=PAD)
    losses = []

    def batch() -> tuple[Tensor, Tensor]:
        ids, lengths = phrases(16, VOCABULARY)
        target = translated(ids, lengths)
        return (ids, target) if batch_first else (ids.T, target.T)

    with guarded(model, optimizer):
        for step in range(STEPS):
            source, target = batch()
            given, wanted = (target[:, :-1], target[:, 1:]) if batch_first else (target[:-1], target[1:])
            logits = model(source, given)
            loss = criterion(logits.reshape(-1, VOCABULARY), wanted.reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if step % 100 == 99:
                model.eval()
                with torch.no_grad():
                    source, target = batch()
                    said = target[:, :1] if batch_first else target[:1]
                    for _ in range(3):
                        logits = model(source, said)
                        best = (logits[:, -1:] if batch_first else logits[-1:]).argmax(-1)
                        said = torch.cat([said, best], 1 if batch_first else 0)
                model.train()
    learned(losses)


def test_masked_tokens(guarded: Guarded) -> None:
    """Fifteen per cent are to be guessed: most are replaced by a mask, some by another token, some by nothing."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.positions = nn.Embedding(VOCABULARY + 1, WIDTH, padding_idx=PAD), Positions(True)
            layer = nn.TransformerEncoderLayer(
                WIDTH, 2, 64, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
            )
            self.encoder = nn.TransformerEncoder(layer, 1, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
            self.head = nn.Linear(WIDTH, VOCABULARY + 1)

        def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            x = self.encoder(self.positions(self.embed(ids)), src_key_padding_mask=ids == PAD)
            logits = self.head(x)
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100), logits

    model = Masked()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    losses = []
    with guarded(model, optimizer):
        for _ in range(STEPS):
            lengths = torch.randint(8, 17, (16, 1))
            ids = 3 + (torch.randint(9, (16, 1)) + torch.arange(16)) % 9
            ids = ids.masked_fill(torch.arange(16) >= lengths, PAD)
            guessed = (torch.rand(ids.shape) < 0.15) & (ids != PAD)
            labels = ids.masked_fill(~guessed, -100)
            given = ids.clone()
            given[guessed & (torch.rand(ids.shape) < 0.8)] = VOCABULARY
            swapped = guessed & (given != VOCABULARY) & (torch.rand(ids.shape) < 0.5)
            given[swapped] = torch.randint(3, VOCABULARY, (int(swapped.sum()),))
            loss, _ = model(given, labels)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    learned(losses, 0.85)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("nested", [False, True])
def test_a_class_of_a_sequence(guarded: Guarded, nested: bool) -> None:
    """Whether a phrase has a certain word; the mean over what is no padding, in validation through the fused path."""

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.positions = nn.Embedding(VOCABULARY, WIDTH, padding_idx=PAD), Positions(True)
            layer = nn.TransformerEncoderLayer(WIDTH, 2, 64, dropout=0.1, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=nested)
            self.head = nn.Linear(WIDTH, 1)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.encoder(self.positions(self.embed(ids)), src_key_padding_mask=ids == PAD)
            real = (ids != PAD)[:, : x.size(1), None].float()
            logits: Tensor = self.head((x * real).sum(1) / real.sum(1)).squeeze(-1)
            return logits

    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    with guarded(model, optimizer):
        for step in range(STEPS):
            ids, _ = phrases(16)
            loss = F.binary_cross_entropy_with_logits(model(ids), (ids == 5).any(1).float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if step % 50 == 49:
                model.eval()
                with torch.no_grad():
                    ids, _ = phrases(16)
                    (model(ids).sigmoid() > 0.5).float().mean()
                model.train()
    learned(losses)
