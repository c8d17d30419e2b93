"""One trouble is said once: what follows from a finding is told under it, as information."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard.catalogue import finding
from gpt_guard.errors import GuardError
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding, Severity
from gpt_guard.runtime.suppression import explained

VOCABULARY, WIDTH = 19, 16


class Reader(nn.Module):
    """One layer of attention with a mask of 'may be seen', `[T, T]`; None for no mask at all."""

    def __init__(self, mask: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.mask = mask

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        ones = torch.ones(ids.size(1), ids.size(1))
        mask = None if self.mask is None else self.mask(ones).bool()
        q, k, v = (layer(x)[:, None] for layer in (self.query, self.key, self.value))
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        logits: Tensor = self.head(x + seen[:, 0])
        return logits


def train(model: nn.Module, *, strict: bool = False) -> tuple[Finding, ...]:
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Guardian(model, optimizer, sinks=[], strict=strict) as guardian:
        for _ in range(4):
            ids = torch.randint(VOCABULARY, (8, 13))
            optimizer.zero_grad()
            F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()
    return guardian.findings


def test_an_inverted_mask_is_one_trouble() -> None:
    findings = train(Reader(torch.triu))
    (loud,) = (found for found in findings if found.severity is not Severity.INFO)
    (quiet,) = (found for found in findings if found.severity is Severity.INFO)
    assert (loud.code, quiet.code) == ("GG697", "GG660")
    assert quiet.causes[0].startswith("GG697 (An attention mask has the wrong sense), told at step 0.")
    assert quiet.seen.endswith("It follows from GG697.")


def test_without_a_mask_the_leak_is_told_as_it_is() -> None:
    (found,) = train(Reader(None))
    assert (found.code, found.severity) == ("GG660", Severity.ERROR)
    assert "GG697" not in found.causes[0]


def test_a_right_mask_is_silent() -> None:
    assert train(Reader(torch.tril)) == ()


def test_what_would_halt_still_halts() -> None:
    with pytest.raises(GuardError) as raised:
        train(Reader(torch.triu), strict=True)
    assert raised.value.finding.code == "GG660"


def test_a_leak_somewhere_else_is_not_explained() -> None:
    mask = finding("GG697", "seen", module="layers.0.attention")
    assert explained(finding("GG660", "seen", module="layers.1"), [mask]).severity is Severity.ERROR
    assert explained(finding("GG660", "seen", module="layers.0"), [mask]).severity is Severity.INFO
    assert explained(finding("GG660", "seen"), [mask]).severity is Severity.ERROR


def test_a_sum_is_named_where_steps_are_too_large_and_stays_a_warning() -> None:
    told = explained(finding("GG308", "seen"), [finding("GG655", "seen", step=0)])
    assert told.severity is Severity.WARNING
    assert told.causes[0].startswith("GG655")
    assert told.seen == "seen"
