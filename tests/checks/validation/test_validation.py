"""Evaluation: one answer, nothing written, every module in eval mode; and the mode changes what it should."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard.checks.runner.run import check
from gpt_guard.records import Severity

from ..small_gpt import GPT, Attention, C, V, ask_stage, line
from ..variants import HEALTHY, asked

ask = partial(ask_stage, "validation")


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_models_pass(name: str) -> None:
    build, options = HEALTHY[name]
    report = check(build(), **asked(options), only=["validation"])
    assert report.passed, report
    assert not report.findings


class FunctionalDropout(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.2)


class AttentionDropout(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2)


class Noise(Attention):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out + 0.01 * torch.randn_like(out)


class Unregistered(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.drops = [nn.Dropout(0.2)]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.drops[0](super().forward(x))
        return out


class Counting(Attention):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (FunctionalDropout, "Functional dropout"),
        (AttentionDropout, "Functional dropout"),
        (Noise, "Noise or sampling"),
        (Unregistered, "not registered"),
        (Counting, "from call to call"),
    ],
)
def test_two_passes_that_differ_name_the_module(kind: Callable[[], nn.Module], cause: str) -> None:
    report = ask(GPT(kind))
    assert [found.code for found in report.findings] == ["GG663"], report
    found = report.findings[0]
    assert found.module == "blocks.0.attn"
    assert cause in found.causes[0]
    assert found.where is not None
    assert line(report, "training mode").status == "skipped"


def test_the_first_module_that_differs_is_named_and_no_later_one() -> None:
    model = GPT()
    model.blocks[1].attn = FunctionalDropout()
    assert ask(model).findings[0].module == "blocks.1.attn"


class WritesMean(Attention):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(C))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        return super().forward(x)


class UnsavedCache(Attention):
    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(C), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.detach()[0, 0]
        return super().forward(x)


def test_a_buffer_that_an_eval_pass_writes() -> None:
    report = ask(GPT(WritesMean))
    assert [found.code for found in report.findings] == ["GG664"]
    found = report.findings[0]
    assert (found.module, found.parameter) == ("blocks.0.attn", "blocks.0.attn.mean")
    assert "moving average" in found.causes[0]


def test_a_cache_that_is_not_saved_is_a_note() -> None:
    report = ask(GPT(UnsavedCache))
    assert report.passed
    assert [(found.code, found.severity) for found in report.findings] == [("GG664", Severity.INFO)]


class Trains(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        self.train()
        out: Tensor = self.drop(super().forward(x))
        return out


class KeepsMode(GPT):
    def train(self, mode: bool = True) -> KeepsMode:
        return self


class FrozenNorm(nn.BatchNorm1d):
    """A norm that is never trained again, as in fine-tuning."""

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(False)
        return self


@pytest.mark.parametrize(
    ("build", "module", "cause"),
    [
        (lambda: GPT(Trains), "blocks.0.attn.drop", "forward calls .train()"),
        (lambda: KeepsMode(dropout=0.2), "blocks.0.mlp.3", "overrides train()"),
    ],
)
def test_eval_mode_that_does_not_arrive_or_stay(build: Callable[[], nn.Module], module: str, cause: str) -> None:
    report = ask(build())
    assert [found.code for found in report.findings] == ["GG665", "GG663"]
    assert report.findings[0].module == module
    assert cause in report.findings[0].causes[0]
    assert "back into training mode" in report.findings[1].causes[0]


class Norms(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.tok, self.norm, self.head = nn.Embedding(V, C), norm, nn.Linear(C, V)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.tok(x).transpose(1, 2)).transpose(1, 2))
        return out


def test_what_the_mode_changes_is_named() -> None:
    assert "nothing depends on it" in line(ask(GPT()), "training mode").measured
    assert "first at `blocks.0.mlp.3`: Dropout p=0.2" in line(ask(GPT(dropout=0.2)), "training mode").measured
    assert "BatchNorm1d" in line(ask(Norms(nn.BatchNorm1d(C))), "training mode").measured
    frozen = ask(Norms(FrozenNorm(C)))
    assert frozen.passed
    assert "the same logits" in line(frozen, "training mode").measured


def test_a_batch_norm_that_learned_from_the_check_forgets_it() -> None:
    model = Norms(nn.BatchNorm1d(C))
    ask(model)
    assert isinstance(model.norm, nn.BatchNorm1d)
    assert model.norm.running_mean is not None
    assert model.norm.running_mean.abs().sum() == 0
    assert model.training


class LiteralDropout(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.2, self.training)


class OuterMode(Attention):
    """Depends on a mode that is not its own."""

    def __init__(self) -> None:
        super().__init__()
        self.owner: list[nn.Module] = []

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if vars(self.owner[0])["training"] else 1.0)


def test_dropout_with_a_number_in_the_code_is_explained() -> None:
    report = ask(GPT(LiteralDropout))
    assert report.passed
    assert not report.findings
    assert "first at `blocks.0.attn`" in line(report, "training mode").measured


def test_a_difference_that_nothing_explains_is_a_note() -> None:
    model = GPT(OuterMode)
    for block in model.blocks:
        block.attn.owner.append(model.ln)
    report = ask(model)
    assert report.passed
    assert [found.code for found in report.findings] == ["GG666"]
    assert report.findings[0].module == "blocks.0.attn"
