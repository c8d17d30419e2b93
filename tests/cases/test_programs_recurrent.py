"""Recurrent programs train under every default guard without a word."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, TensorDataset

from .conftest import Guarded
from .programs import STEPS, learned, phrases

PAD, VOCABULARY = 0, 12


def test_packed_sequences(guarded: Guarded) -> None:
    """Tags for each word; what pads is ignored by the loss."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, 16, padding_idx=PAD)
            self.rnn = nn.GRU(16, 16, batch_first=True, bidirectional=True)
            self.head = nn.Linear(32, 3)

        def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
            packed = pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
            output, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
            tags: Tensor = self.head(output)
            return tags

    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    with guarded(model, optimizer):
        for _ in range(STEPS):
            ids, lengths = phrases(16)
            tags = (ids % 3).masked_fill(ids == PAD, -100)
            logits = model(ids, lengths)
            loss = F.cross_entropy(logits.transpose(1, 2), tags[:, : logits.size(1)])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    learned(losses)


def heard(ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Each id held for two to four frames of noise: `[T, B, features]` and how many frames each row has."""
    rows = []
    for row, length in zip(ids, lengths.tolist(), strict=True):
        said = row[:length] - 2
        frames = F.one_hot(said.repeat_interleave(torch.randint(2, 5, (length,))), 10).float()
        rows.append(frames + 0.1 * torch.randn_like(frames))
    return pad_sequence(rows), torch.tensor([len(row) for row in rows])


def test_connectionist_temporal_classification(guarded: Guarded) -> None:
    class Listener(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.LSTM(10, 24, bidirectional=True), nn.Linear(48, 10)

        def forward(self, frames: Tensor) -> Tensor:
            return F.log_softmax(self.head(self.rnn(frames)[0]), dim=-1)

    model = Listener()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.CTCLoss(blank=0, zero_infinity=True)
    losses = []
    with guarded(model, optimizer):
        for _ in range(STEPS):
            ids, lengths = phrases(8, longest=5)
            frames, frame_lengths = heard(ids, lengths)
            said = (ids - 2).clamp(min=0)
            loss = criterion(model(frames), said, frame_lengths, lengths)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            losses.append(loss.item())
    learned(losses)


def test_accumulation_whose_last_part_is_smaller(guarded: Guarded) -> None:
    """Three batches to a step; at the end of an epoch what is left makes a step of its own."""
    x = torch.rand(54, 6, 1)
    data = DataLoader(TensorDataset(x, x.sum(1)), batch_size=16, shuffle=True)
    rnn, head = nn.GRU(1, 16, batch_first=True), nn.Linear(16, 1)
    whole = nn.ModuleDict({"rnn": rnn, "head": head})
    optimizer = torch.optim.Adam(whole.parameters(), lr=1e-2)
    losses = []
    with guarded(whole, optimizer):
        for _ in range(STEPS // 2):
            for number, (x, y) in enumerate(data):
                loss = F.mse_loss(head(rnn(x)[0][:, -1]), y)
                together = min(3, len(data) - number // 3 * 3)
                (loss / together).backward()
                if number % 3 == 2 or number == len(data) - 1:
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(loss.item())
    learned(losses)
