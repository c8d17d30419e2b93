"""Masks and calls of attention one by one: what is told, and the many healthy ones that are not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard.callbacks.attention.guard import AttentionCalls
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding, Severity

ROWS, LENGTH, WIDTH, PAD = 3, 6, 8, 0
Call = Callable[[Tensor, Tensor], Tensor]
ONES = torch.ones(LENGTH, LENGTH, dtype=torch.bool)


class Net(nn.Module):
    """An embedding, one call of attention in whatever way, and a head."""

    def __init__(self, call: Call, *, padding: int | None = PAD) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(13, WIDTH, padding_idx=padding), nn.Linear(WIDTH, 2)
        self.call = call

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.call(self.embed(ids), ids != PAD).mean(1))
        return logits


def ids(*, left: bool = False) -> Tensor:
    """A full row, and two that end (or begin) with padding."""
    found = torch.randint(1, 13, (ROWS, LENGTH))
    found[1, :2] = found[2, :4] = PAD
    return found if left else found.flip(1)


def run(call: Call | nn.Module, *, left: bool = False, padding: int | None = PAD) -> Sequence[Finding]:
    model = call if isinstance(call, nn.Module) else Net(call, padding=padding)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Guardian(model, optimizer, guards=[AttentionCalls()], sinks=[]) as guardian:
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(ids(left=left)), torch.zeros(ROWS, dtype=torch.long)).backward()
            optimizer.step()
    return guardian.findings


def attend(mask: Callable[[Tensor], Tensor | None], *, is_causal: bool = False) -> Call:
    """The call with a mask that is made from which tokens are real."""

    def call(x: Tensor, real: Tensor) -> Tensor:
        x = x[:, None]
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask(real), is_causal=is_causal)[:, 0]

    return call


def by_hand(mask: Callable[[Tensor], Tensor], low: float = -1e9, dim: int = -1) -> Call:
    """Scores that are masked where `mask` is False."""

    def call(x: Tensor, real: Tensor) -> Tensor:
        scores = (x @ x.mT / math.sqrt(WIDTH))[:, None].expand(-1, 2, -1, -1)
        weights = torch.softmax(scores.masked_fill(~mask(real), low), dim=dim)
        return weights.mean(1) @ x

    return call


def keys(real: Tensor) -> Tensor:
    return real[:, None, None]


def both(real: Tensor) -> Tensor:
    """Padded queries see nothing."""
    return keys(real) & real[:, None, :, None]


def left_to_right(x: Tensor, real: Tensor) -> Tensor:
    ahead = attend(lambda real: ONES.tril() & keys(real))(x, real)
    return ahead + attend(lambda real: ONES.triu() & keys(real) | ONES.tril(0).triu(0))(x, real)


def in_turn(x: Tensor, real: Tensor) -> Tensor:
    """Softmax over keys and over queries, as co-attention does."""
    return by_hand(keys)(x, real) + by_hand(keys, dim=-2)(x, real)


def slots(x: Tensor, real: Tensor) -> Tensor:
    """Softmax over four slots that compete for the tokens."""
    scores = torch.randn(4, WIDTH) @ x.mT
    return (scores.softmax(1) * real[:, None]) @ x


def bias(x: Tensor, real: Tensor) -> Tensor:
    learned = torch.eye(LENGTH).requires_grad_()
    x = x[:, None]
    return F.scaled_dot_product_attention(x, x, x, attn_mask=learned + torch.zeros(()))[:, 0]


HEALTHY: dict[str, tuple[Call, bool]] = {
    "keys": (attend(keys), False),
    "padded queries that see nothing": (attend(both), False),
    "padded queries, low scores": (by_hand(both), False),
    "causal, padding at the end": (attend(lambda real: None, is_causal=True), False),
    "causal, padding at the front": (attend(lambda real: ONES.tril() & keys(real) | torch.eye(LENGTH).bool()), True),
    "both directions": (left_to_right, False),
    "window": (by_hand(lambda real: (ONES.tril() & ONES.triu(-2))[None, None] & keys(real)), False),
    "both dimensions": (in_turn, False),
    "slots": (slots, False),
    "minus infinity": (attend(lambda real: torch.zeros(ROWS, 1, 1, LENGTH).masked_fill(~keys(real), -math.inf)), False),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_calls_are_silent(name: str) -> None:
    call, left = HEALTHY[name]
    assert run(call, left=left) == ()


def test_a_learned_bias_is_silent() -> None:
    assert run(bias, padding=None) == ()


def test_documents_in_one_row_are_silent() -> None:
    blocks = torch.block_diag(torch.ones(2, 2), torch.ones(4, 4)).bool()
    assert run(attend(lambda real: blocks.tril()), padding=None) == ()
    assert run(by_hand(lambda real: blocks), padding=None) == ()


BUGS: dict[str, tuple[Call, bool, str, str]] = {
    "padding shown": (attend(lambda real: ~keys(real)), False, "GG697", "alone, and hides all others"),
    "padding shown, at the front": (by_hand(lambda real: ~keys(real)), True, "GG697", "alone, and hides all others"),
    "front padding behind a causal flag": (attend(lambda real: None, is_causal=True), True, "GG662", "has no mask"),
    "causal mask leaves front padding": (attend(lambda real: ONES.tril()), True, "GG662", "leaves them visible"),
    "two masks combined by or": (
        by_hand(lambda real: (ONES.tril() & keys(real)).index_fill(2, torch.tensor([1]), False)),
        False,
        "GG699",
        "see no key",
    ),
    "0/1 as float": (attend(lambda real: keys(real).float()), False, "GG669", "hides nothing"),
    "softmax over the queries": (by_hand(keys, dim=-2), False, "GG698", "over the queries"),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_told(name: str) -> None:
    call, left, code, words = BUGS[name]
    found = {each.code: each for each in run(call, left=left)}
    assert code in found
    assert words in found[code].seen
    assert found[code].step == 0
    assert found[code].where is not None


def test_edges_of_a_graph_as_a_bias_are_a_warning_and_a_triangle_is_an_error() -> None:
    links = torch.tensor([[1, 0, 1, 0, 0, 1], [0, 1, 0, 1, 0, 0]] * 3)
    (graph,) = run(attend(lambda real: links.float()), padding=None)
    (triangle,) = run(attend(lambda real: ONES.tril().float()), padding=None)
    assert (graph.code, graph.severity) == ("GG669", Severity.WARNING)
    assert (triangle.code, triangle.severity) == ("GG669", Severity.ERROR)


def test_a_strict_triangle_is_only_worth_a_note_where_it_is_left_out() -> None:
    (note,) = run(attend(lambda real: ONES.tril(-1)), padding=None)
    (told,) = run(by_hand(lambda real: ONES.tril(-1)), padding=None)
    assert (note.code, note.severity) == ("GG699", Severity.INFO)
    assert (told.code, told.severity) == ("GG699", Severity.WARNING)
    assert "1 of 6 queries" in note.seen


def test_one_line_of_many_layers_is_told_once() -> None:
    class Deep(Net):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for _ in range(4):
                x = x + self.call(x, ids != PAD)
            logits: Tensor = self.head(x.mean(1))
            return logits

    assert [found.code for found in run(Deep(attend(lambda real: ~keys(real))))] == ["GG697", "GG662"]


def test_padding_that_is_not_declared_is_nobodys_business() -> None:
    assert run(attend(lambda real: None), padding=None) == ()
    assert [found.code for found in run(attend(lambda real: None))] == ["GG662"]
