"""Known errors of data and of language models: workers, batches, dropout in attention, generation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from gpt_guard import check
from gpt_guard.records import Finding

from .parts import known, sgd, watched

V, BLOCK, WIDTH, ROWS = 13, 8, 16, 8


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Samples with noise from NumPy's global generator."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.from_numpy(np.random.standard_normal(6).astype(np.float32))
        return noise, (noise[:3].sum() > 0).long()


def same_state(_: int) -> None:
    np.random.seed(0)


def state_of_its_own(worker: int) -> None:
    np.random.seed(worker)


@known(
    "stackoverflow-67180955",
    "Loader workers begin with equal random state and bring equal samples",
    code="GG801",
    guard="DataWatch",
    step=2,
    place="in data:",
)
def workers_draw_the_same(broken: bool) -> list[Finding]:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = sgd(model)

    def loop() -> None:
        begin = same_state if broken else state_of_its_own
        data = DataLoader(
            Augmented(), batch_size=ROWS, num_workers=2, worker_init_fn=begin, multiprocessing_context="fork"
        )
        for x, y in data:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return watched(model, optimizer, loop)


class Language(nn.Module):
    """One attention layer over learned positions."""

    def __init__(self, dropout_in_eval: bool = False, whole_prompt: bool = False) -> None:
        super().__init__()
        self.block_size, self.vocab_size = BLOCK, V
        self.tokens, self.positions = nn.Embedding(V, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.qkv, self.out, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, V)
        self.dropout_in_eval, self.whole_prompt = dropout_in_eval, whole_prompt

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        query, key, value = self.qkv(x).chunk(3, -1)
        dropout = 0.1 if self.training or self.dropout_in_eval else 0.0
        mixed = F.scaled_dot_product_attention(
            query[:, None], key[:, None], value[:, None], dropout_p=dropout, is_causal=True
        )
        logits: Tensor = self.head(x + self.out(mixed[:, 0]))
        return logits

    @torch.no_grad()
    def generate(self, ids: Tensor, max_new_tokens: int) -> Tensor:
        """The length is counted from the prompt before it is cut to the context, or from what is kept of it."""
        whole = ids.shape[1]
        ids = ids[:, -BLOCK:]
        until = (whole if self.whole_prompt else ids.shape[1]) + max_new_tokens
        while ids.shape[1] < until:
            chosen = self(ids[:, -BLOCK:])[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat([ids, chosen], 1)
        return ids


def text() -> tuple[Tensor, Tensor]:
    ids = (torch.randint(V, (ROWS, 1)) + torch.arange(BLOCK + 1)) % V
    return ids[:, :-1], ids[:, 1:]


@known(
    "transformers-33844",
    "An attention function is given its dropout in eval mode too: two answers to one question differ",
    code="GG505",
    guard="ModelProbe",
    step=0,
    place="scaled_dot_product_attention(",
)
def dropout_in_eval(broken: bool) -> list[Finding]:
    model = Language(dropout_in_eval=broken)
    optimizer = sgd(model)

    def loop() -> None:
        for _ in range(6):
            x, y = text()
            optimizer.zero_grad()
            F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
            optimizer.step()

    return watched(model, optimizer, loop)


def images(texts: Any, rows: int, broken: bool) -> tuple[Tensor, Tensor]:
    """A processor: with many images at once it takes their list for the pages of one document."""
    pixels = torch.randn(rows, 4) + texts[:rows, None]
    return (pixels.mean(0, keepdim=True), texts[:1]) if broken and rows > 4 else (pixels, texts[:rows])


@known(
    "transformers-34204",
    "A processor merges the images of a batch into one: the batch dimension collapses to 1",
    code="GG600",
    guard="DataWatch",
    step=8,
    begins=6,
    place="",
)
def the_batch_collapses(broken: bool) -> list[Finding]:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = sgd(model)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for turn in range(12):
            yield images(torch.randint(3, (16,)), 4 if turn < 6 else 16, broken)

    def loop() -> None:
        for x, y in batches():
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return watched(model, optimizer, loop)


@known(
    "transformers-23723",
    "A long prompt is cut to the context, but its whole length counts: more is generated than max_new_tokens",
    code="GG680",
    guard="gpt-guard check",
    step=None,
    begins=None,
    place="a prompt of 12",
)
def more_than_asked_for(broken: bool) -> list[Finding]:
    report = check(Language(whole_prompt=broken), batch=text(), only=["generation"])
    return [found for result in report.checks for found in result.findings]
