"""Stage 14, the text: a model that writes like its corpus passes; loops and chaos are found, young ones not judged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpt_guard.checks.runner.report import PreflightReport
from gpt_guard.checks.tokenizer.tokenizers import adapt
from gpt_guard.records import Severity
from mini_gpt import MiniGPT, MiniGPTConfig

from .planted import V, ask, draw, failures, line

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "old", "dogs", "run", "home", "again"]
CHARS = sorted({char for word in WORDS for char in word} | {" ", "."})
NOISE = torch.randint(len(CHARS), (20_000,), generator=torch.Generator().manual_seed(0))


class Chars:
    chars = CHARS

    def encode(self, text: str) -> list[int]:
        return [CHARS.index(char) for char in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(CHARS[index] for index in ids)


def prose(count: int = 3000) -> Tensor:
    drawn = torch.randint(len(WORDS), (count,), generator=torch.Generator().manual_seed(5)).tolist()
    return torch.tensor(Chars().encode(" ".join(WORDS[index] for index in drawn)))


class Knows(nn.Module):
    """Predicts the next character from the last three, as counted in a text; `distort` changes its own samples."""

    def __init__(self, text: Tensor, distort: str = "") -> None:
        super().__init__()
        size = len(CHARS)
        # A context that the text never has gets a distribution of its own.
        counts = 0.001 * torch.rand((size,) * 4, generator=torch.Generator().manual_seed(2)) ** 4
        counts.index_put_(tuple(text[i : len(text) - 3 + i] for i in range(4)), torch.tensor(1.0), accumulate=True)
        self.logits = nn.Parameter((counts / counts.sum(-1, keepdim=True)).log())
        self.distort = distort

    def forward(self, ids: Tensor) -> Tensor:
        padded = torch.cat([ids.new_zeros(ids.size(0), 2), ids], dim=1)
        logits = self.logits[padded[:, :-2], padded[:, 1:-1], padded[:, 2:]].clone()
        # What it does to a row that is generated it does not do to the rows its loss is measured on.
        if ids.size(0) > 4 and ids.size(0) != 64 and self.distort == "loops":
            logits[:, -1] = -20.0
            logits[:, -1].scatter_(1, ids[:, -4:-3], 20.0)
        if ids.size(0) > 4 and ids.size(0) != 64 and self.distort == "chaos":
            logits[:, -1] = 0.0
        return logits


def judged(model: nn.Module, **given: Any) -> PreflightReport:
    ids = prose()
    settings = {
        "vocab_size": len(CHARS),
        "block_size": 32,
        "data": {"train": ids},
        "tokenizer": adapt(Chars()),
        "trained": True,
        **given,
    }
    return ask(model, **settings)


def test_a_model_that_writes_like_its_corpus_passes() -> None:
    report = judged(Knows(prose()))
    assert failures(report) == []
    assert line(report, "repetition").status == line(report, "chaos").status == "passed"


def test_loops_under_every_setting_are_the_models_fault() -> None:
    report = judged(Knows(prose(), "loops"))
    assert ("repetition", "GG687") in failures(report)
    finding = line(report, "repetition").findings[0]
    assert "survive all 5 settings" in finding.seen
    assert finding.causes[0].startswith("The model:")


def test_chaos_is_found() -> None:
    report = judged(Knows(prose(), "chaos"))
    assert failures(report) == [("chaos", "GG688")]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"trained": False}, "not trained"),
        ({"data": {}}, "at least 5,000 ids"),
        ({"data": {"train": prose(200)}}, "at least 5,000 ids"),
        ({"data": {"train": NOISE}}, "has not learned enough"),
    ],
)
def test_what_cannot_be_judged_is_not(given: dict[str, Any], why: str) -> None:
    report = judged(Knows(prose(), "loops"), **given)
    assert failures(report) == []
    assert why in line(report, "repetition and chaos").measured


def test_a_model_of_a_corpus_that_repeats_itself_may_repeat_itself() -> None:
    torch.manual_seed(0)
    ids = torch.tensor(Chars().encode("the cat sat on a mat. " * 700))
    report = judged(Knows(ids), data={"train": ids})
    assert failures(report) == []


def test_a_fault_in_the_sampling_loop_alone_is_told_apart_from_the_model() -> None:
    class Hot(Knows):
        def generate(self, idx: Tensor, max_new_tokens: int, temperature: float = 50.0) -> Tensor:
            for _ in range(max_new_tokens):
                idx = torch.cat([idx, draw(self(idx[:, -32:])[:, -1] / max(temperature, 1e-6))], dim=1)
            return idx

    report = judged(Hot(prose()))
    assert failures(report) == [("chaos with generate's defaults", "GG688")]
    assert line(report, "chaos").status == "passed"
    assert report.findings[0].causes[0].startswith("The sampling loop")


@pytest.mark.parametrize("steps", [60, 300])
def test_a_model_that_has_trained_little_fails_nothing(steps: int) -> None:
    torch.manual_seed(0)
    ids = prose()
    model = MiniGPT(MiniGPTConfig(len(CHARS), block_size=32, embedding_dim=32, num_heads=2, num_layers=1, dropout=0.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        rows = ids[torch.randint(len(ids) - 33, (16, 1)) + torch.arange(33)]
        _, loss = model(rows[:, :-1], rows[:, 1:])
        assert loss is not None
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    report = judged(model)
    assert failures(report) == []
    judged_lines = {result.title for result in report.checks} & {"repetition", "repetition and chaos"}
    assert judged_lines == {"repetition and chaos" if steps == 60 else "repetition"}


class Sure(nn.Module):
    """Certain of the token `ahead` places further on (0: the one it was just given), as far as the row goes."""

    def __init__(self, ahead: int) -> None:
        super().__init__()
        self.scale, self.ahead = nn.Parameter(torch.tensor(12.0)), ahead

    def forward(self, ids: Tensor) -> Tensor:
        known = torch.nn.functional.one_hot(ids, len(CHARS)).float() * self.scale
        missing = known.new_zeros(ids.size(0), self.ahead, len(CHARS))
        return torch.cat([known[:, self.ahead :], missing], dim=1)[:, -ids.size(1) :]


def test_a_model_that_copies_its_input_loops_and_the_shift_is_the_first_cause() -> None:
    report = judged(Sure(0))
    assert ("repetition", "GG687") in failures(report)
    assert line(report, "repetition").findings[0].causes[0].startswith("The targets are not shifted")


def test_a_model_that_sees_the_next_token_fails_at_the_end_of_the_row() -> None:
    report = judged(Sure(1))
    result = line(report, "last position")
    assert (result.status, result.findings[0].code) == ("failed", "GG689")
    assert "no causal mask" in result.findings[0].causes[0]
    assert line(judged(Knows(prose())), "last position").status == "passed"


class Constant(nn.Module):
    """Predicts frequencies, whatever it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(V))

    def forward(self, ids: Tensor) -> Tensor:
        return self.table.expand(*ids.shape, V)


class Bigram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(V, V)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.table(ids)
        return logits


def test_a_model_that_ignores_its_prompt_is_found_once_it_is_trained() -> None:
    assert failures(ask(Constant(), trained=True)) == [("different prompts", "GG686")]
    assert failures(ask(Constant())) == []


def test_a_model_that_knows_the_last_token_only_is_a_note() -> None:
    report = ask(Bigram(), trained=True)
    assert failures(report) == []
    (note,) = report.findings
    assert (note.code, note.severity) == ("GG686", Severity.WARNING)
