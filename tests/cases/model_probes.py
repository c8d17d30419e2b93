"""Loops with a bug in the model that a look at its first steps shows, and their healthy twins, as data.

Each case is a function that makes a model and a loop for it; `Case.code` is the finding, None for a healthy twin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .probe_models import (
    LENGTH,
    VOCABULARY,
    Cached,
    Convolution,
    Encoder,
    Hidden,
    Incremental,
    Language,
    Pooled,
    Recurrent,
    Series,
)

ROWS = 6
Loop = Callable[[nn.Module, torch.optim.Optimizer, int], None]


class Case(NamedTuple):
    """A loop to run; `module` is the path that the finding must name, `line` a part of the line, None for any."""

    name: str
    make: Callable[[], nn.Module]
    loop: Loop
    code: str | None
    module: str | None = None
    line: str | None = None


def text(rows: int = ROWS, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Random tokens `[B, T]` from 1 on, and the ones that follow."""
    ids = torch.randint(1, VOCABULARY, (rows, length + 1))
    return ids[:, :-1], ids[:, 1:]


def padded(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Rows that end in padding (id 0), the first one full; and a class for each."""
    ids = torch.randint(1, VOCABULARY, (rows, LENGTH))
    for row in range(1, rows):
        ids[row, LENGTH - 1 - row % 5 :] = 0
    return ids, ids[:, 0] % 2


def language(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Predict the next token."""
    for _ in range(steps):
        x, y = text()
        optimizer.zero_grad()
        logits = model(x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()


def classes(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """One class for each padded row."""
    for _ in range(steps):
        x, y = padded()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def validated(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """The same as `language`, with a validation after each step."""
    for _ in range(steps):
        language(model, optimizer, 1)
        model.eval()
        with torch.no_grad():
            model(text()[0])
        model.train()


def series(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        F.mse_loss(model(torch.randn(ROWS, LENGTH, 3)), torch.randn(ROWS, 2)).backward()
        optimizer.step()


def lookups(make: Callable[[], Tensor]) -> Loop:
    """Train on ids that `make` gives; a lookup that fails ends the loop, as it would end the user's."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            try:
                model(make()).pow(2).mean().backward()
            except IndexError:
                return
            optimizer.step()

    return loop


def ids_up_to(highest: int, length: int = LENGTH) -> Callable[[], Tensor]:
    def make() -> Tensor:
        ids = torch.randint(1, VOCABULARY, (ROWS, length))
        ids[1, 3] = highest
        return ids

    return make


def gaps() -> Tensor:
    ids = torch.randint(1, VOCABULARY, (ROWS, LENGTH))
    ids[:, 4] = 0
    return ids


def cases() -> Iterator[Case]:
    """All cases, each bug before its twin."""
    yield from _futures()
    yield from _rows()
    yield from _masks()
    yield from _modes()
    yield from _lookups()


def _futures() -> Iterator[Case]:
    yield Case("attention without a mask", lambda: Language("bare"), language, "GG660", "blocks.0", "is_causal")
    yield Case("attention by hand without a mask", lambda: Language("hand_none"), language, "GG660", "blocks.0")
    yield Case("heads by view", lambda: Language("heads_viewed"), language, "GG660", "blocks.0")
    yield Case("mean over time", lambda: Language(after="mean_over_time"), language, "GG660", "")
    yield Case("bidirectional LSTM", lambda: Recurrent(batch_first=True, bidirectional=True), language, "GG660", "cell")
    yield Case("convolution padded on both sides", lambda: Convolution(left=False), language, "GG660", "conv")
    yield Case("is_causal", Language, language, None)
    yield Case("causal by hand", lambda: Language("hand"), language, None)
    yield Case("causal by hand, low scores", lambda: Language("hand_low"), language, None)
    yield Case("LSTM", lambda: Recurrent(batch_first=True), language, None)
    yield Case("convolution padded on the left", lambda: Convolution(left=True), language, None)


def _rows() -> Iterator[Case]:
    yield Case("mean over rows", lambda: Language(after="mean_over_rows"), language, "GG661", "")
    yield Case("rows by view", lambda: Language(after="rows_viewed", pooled=2), classes, "GG661", "")
    yield Case("batch_first forgotten, ids", lambda: Recurrent(batch_first=False), language, "GG661", "cell")
    yield Case("batch_first forgotten, numbers", lambda: Series(batch_first=False), series, "GG661", "cell")
    yield Case("batch_first forgotten, encoder", lambda: Pooled(batch_first=False), classes, "GG661", "layer.self_attn")
    yield Case("batch_first, encoder", lambda: Pooled(batch_first=True), classes, None)
    yield Case("batch_first, numbers", lambda: Series(batch_first=True), series, None)


def _masks() -> Iterator[Case]:
    call = "scaled_dot_product_attention"
    yield Case("mask of the future", lambda: Language("future_bool"), language, "GG697", "blocks.0", call)
    yield Case("future by masked_fill", lambda: Language("hand_future"), language, "GG697", "blocks.0", "softmax")
    yield Case("future and itself", lambda: Language("future_and_itself"), language, "GG697", "blocks.0", call)
    yield Case("padding shown", lambda: Language("padding_shown", pooled=2), classes, "GG697", "blocks.0", call)
    yield Case("padding mask inverted", lambda: Encoder("inverted"), classes, "GG697", "encoder.layers.0.self_attn")
    yield Case("0 and 1 added, causal", lambda: Language("zero_one"), language, "GG669", "blocks.0", call)
    yield Case("0 and 1 added, padding", lambda: Language("zero_one_padding", pooled=2), classes, "GG669", "blocks.0")
    yield Case("diagonal hidden", lambda: Language("hand_diagonal"), language, "GG699", "blocks.0", "softmax")
    yield Case("window without keys", lambda: Language("hand_window"), language, "GG699", "blocks.0", "softmax")
    yield Case("padding without a mask", lambda: Encoder("none"), classes, "GG662", "encoder.layers.0.self_attn")
    yield Case(
        "padding without a mask, by call", lambda: Language("bare", pooled=2, padding=0), classes, "GG662", "blocks.0"
    )
    yield Case("heads first", lambda: Language("heads_first"), language, "GG698", "blocks.0", call)
    yield Case("softmax over queries", lambda: Language("hand_queries"), language, "GG698", "blocks.0", "softmax")
    yield Case("causal flag behind a cache", lambda: Incremental(flag=True), language, "GG668", "", call)
    yield Case("no flag behind a cache", lambda: Incremental(flag=False), language, None)
    yield Case("padding hidden", lambda: Language("padding_hidden", pooled=2, padding=0), classes, None)
    yield Case("encoder with its mask", lambda: Encoder("right"), classes, None)
    yield Case("past as bool", lambda: Language("past_bool"), language, None)
    yield Case("past as -inf", lambda: Language("past_inf"), language, None)
    yield Case("past and padding", lambda: Language("past_and_real", pooled=2, padding=0), classes, None)


def _modes() -> Iterator[Case]:
    yield Case("functional dropout", lambda: Language(after="dropout"), language, "GG505", "", "F.dropout(x, 0.2)")
    yield Case("functional dropout, validated", lambda: Language(after="dropout"), validated, "GG505", "", "F.dropout")
    yield Case("dropout_p", lambda: Language("dropout_always"), language, "GG505", "blocks.0", "dropout_p")
    yield Case("dropout in a plain list", lambda: Hidden(registered=False), language, "GG505", None, "self.drops[0]")
    yield Case("dropout by mode", lambda: Language(after="dropout_by_mode"), validated, None)
    yield Case("dropout_p by mode", lambda: Language("dropout_by_mode"), validated, None)
    yield Case("dropout in a ModuleList", lambda: Hidden(registered=True), validated, None)
    yield Case("cache that grows", lambda: Cached(cleared=False), language, "GG667", "")
    yield Case("cache that is cleared", lambda: Cached(cleared=True), language, None)


def _lookups() -> Iterator[Case]:
    yield Case("id out of range", Language, lookups(ids_up_to(VOCABULARY)), "GG631", "embed", "self.embed(ids)")
    yield Case("negative id", Language, lookups(ids_up_to(-100)), "GG631", "embed", "self.embed(ids)")
    yield Case("rows too long", Language, lookups(ids_up_to(3, LENGTH + 2)), "GG695", "place", "self.place(")
    yield Case("padding in use", lambda: Language(padding=0), lookups(gaps), "GG696", "embed", "self.embed(ids)")
    yield Case("ids in range", Language, lookups(ids_up_to(VOCABULARY - 1)), None)
