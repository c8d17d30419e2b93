"""The first loss is held against log V and chance, and a trained model's against guessing."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from gpt_guard.checks.runner.run import check

from ..small_gpt import GPT, C, T, V, ask_stage, batch, line
from ..variants import HEALTHY, asked

ask = partial(ask_stage, "initial-loss")


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_models_pass(name: str) -> None:
    build, options = HEALTHY[name]
    report = check(build(), **asked(options), only=["initial-loss"])
    assert report.passed, report
    assert not report.findings
    assert report.facts["initial_loss"] == pytest.approx(math.log(V), abs=0.2)
    assert report.facts["expected_loss"] == pytest.approx(math.log(V))


class NoFinalNorm(GPT):
    def __init__(self) -> None:
        super().__init__(tie=False)
        self.ln = nn.Identity()  # type: ignore[assignment]  # the bug
        nn.init.normal_(self.tok.weight, std=8.0)
        nn.init.normal_(self.head.weight, std=0.25)


def large_head() -> GPT:
    model = GPT(tie=False)
    nn.init.normal_(model.head.weight, std=1.0)
    return model


def default_embedding() -> GPT:
    model = GPT()
    nn.init.normal_(model.tok.weight, std=1.0)
    return model


class Scaled(GPT):
    def logits(self, idx: Tensor) -> Tensor:
        return super().logits(idx) * 40


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (default_embedding, "are tied"),
        (large_head, "output layer is initialised too large"),
        (NoFinalNorm, "final LayerNorm"),
        (Scaled, "multiplied on the way out"),
    ],
)
def test_too_high_and_why(kind: Callable[[], GPT], cause: str) -> None:
    report = ask(kind())
    assert [found.code for found in report.findings] == ["GG650"]
    assert cause in report.findings[0].causes[0]
    assert float(str(report.facts["initial_loss"])) > 4


def test_too_low_weights_that_are_not_fresh() -> None:
    model, (x, y) = GPT(), batch()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        model(x, y)[1].backward()
        optimizer.step()
    report = ask(model, batch=(x, y))
    assert [found.code for found in report.findings] == ["GG651"]
    assert "not fresh" in report.findings[0].causes[0]
    trained = ask(model, batch=(x, y), trained=True)
    assert trained.passed
    assert line(trained, "loss of the trained model").status == "passed"
    assert line(trained, "loss before training").status == "skipped"
    fresh = ask(model, batch=(x, y), trained=True, make_model=GPT)
    assert line(fresh, "loss before training").status == "passed"
    assert fresh.facts["initial_loss"] == pytest.approx(math.log(V), abs=0.2)


def test_a_trained_model_that_guesses() -> None:
    report = ask(trained=True)
    assert [found.code for found in report.findings] == ["GG658"]
    assert "strict=False" in report.findings[0].causes[0]


def test_a_bias_that_knows_frequencies_is_no_leak() -> None:
    x, y = batch()
    x[:, : T - 2] = y[:, : T - 2] = 3
    model = GPT(tie=False)
    model.head = nn.Linear(C, V)
    counts = torch.bincount(y.flatten(), minlength=V) + 1.0
    model.head.bias.data = (counts / counts.sum()).log()
    report = ask(model, batch=(x, y))
    assert line(report, "loss before training").status == "passed"
    assert "bias of the output layer" in line(report, "loss before training").measured


def test_masked_rows_of_a_padded_vocabulary() -> None:
    class Padded(GPT):
        def logits(self, idx: Tensor) -> Tensor:
            return torch.cat([super().logits(idx), torch.full((*idx.shape, 9), -1e9)], -1)

    assert ask(Padded()).passed


def test_the_model_is_as_it_was() -> None:
    model, (x, y) = GPT(dropout=0.1), batch()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes, random = [module.training for module in model.modules()], torch.get_rng_state()
    ask(model, batch=(x, y))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)


def test_without_a_batch_nothing_is_asked() -> None:
    report = check(GPT(), vocab_size=V, only=["initial-loss"])
    assert [result.status for result in report.checks] == ["skipped"]
