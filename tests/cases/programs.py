"""What the programs share: data made by a formula, text of the standard library, and what counts as having learned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

STEPS = 200


def learned(losses: Sequence[float], share: float = 0.7) -> None:
    """Fails unless the last losses are below this share of the first."""
    first, last = sum(losses[:5]) / 5, sum(losses[-20:]) / 20
    assert last < share * first, f"from {first:.3f} to {last:.3f}"


def endless(loader: DataLoader[Any], steps: int = STEPS) -> Iterator[Any]:
    """Batches of one epoch after the other."""
    done = 0
    while True:
        for batch in loader:
            if done == steps:
                return
            yield batch
            done += 1


def pictures(count: int, size: int = 8) -> tuple[Tensor, Tensor]:
    """A bright row, a bright column or a bright square, somewhere in the noise: `[N, 1, size, size]` and classes."""
    images, kinds = 0.3 * torch.randn(count, 1, size, size), torch.randint(3, (count,))
    places = torch.randint(1, size - 2, (count, 2))
    for image, kind, (row, column) in zip(images, kinds.tolist(), places.tolist(), strict=True):
        if kind == 0:
            image[0, row, :] += 1.5
        elif kind == 1:
            image[0, :, column] += 1.5
        else:
            image[0, row : row + 2, column : column + 2] += 2.0
    return images, kinds


def picture_loaders(train: int = 232, valid: int = 48, rows: int = 16) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Loaders for training (shuffled, with a smaller last batch) and validation."""
    shuffled = DataLoader(TensorDataset(*pictures(train)), batch_size=rows, shuffle=True)
    return shuffled, DataLoader(TensorDataset(*pictures(valid)), batch_size=rows)


def characters(count: int = 12000) -> tuple[Tensor, int]:
    """The first characters of Python's own help texts as ids `[count]`, and the size of the vocabulary."""
    text = "".join(topics[name] for name in sorted(topics))[:count]
    known = {character: place for place, character in enumerate(sorted(set(text)))}
    return torch.tensor([known[character] for character in text]), len(known)


def windows(ids: Tensor, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Windows of a text and the same ones, a character later: `[rows, length]` each."""
    starts = torch.randint(len(ids) - length, (rows, 1)) + torch.arange(length + 1)
    return ids[starts[:, :-1]], ids[starts[:, 1:]]


def phrases(rows: int, vocabulary: int = 12, longest: int = 8) -> tuple[Tensor, Tensor]:
    """Rows of ids from 3 on, of their own lengths, filled up with 0; and the lengths."""
    lengths = torch.randint(3, longest + 1, (rows,))
    ids = torch.randint(3, vocabulary, (rows, longest))
    return ids.masked_fill(torch.arange(longest) >= lengths[:, None], 0), lengths
