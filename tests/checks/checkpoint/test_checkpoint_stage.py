"""Stage 13, the file: what it holds, whether it fits the model, whether it belongs to it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from gpt_guard.checkpoint import save_checkpoint
from gpt_guard.checks.checkpoint.stage import CheckpointStage
from gpt_guard.checks.files.stage import read_checkpoint
from gpt_guard.checks.runner.base import Subject
from gpt_guard.checks.runner.run import preflight
from gpt_guard.checks.tokenizer.tokenizers import adapt

from .mini_project import CONFIG, Base, C, Rope, T, V, ask, batch, line, mini


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = mini()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(*batch())[1].backward()
    optimizer.step()
    return save_checkpoint(tmp_path / "c.pt", model, optimizer, step=7, tokenizer=list("abcdefghijk"))


def test_a_checkpoint_of_this_model_passes_every_line(saved: Path) -> None:
    model = mini()
    model.load_state_dict(torch.load(saved)["model_state_dict"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    report = ask(model, checkpoint=saved, optimizer=optimizer, tokenizer=list("abcdefghijk"))
    assert {result.status for result in report.checks} == {"passed"}
    assert report.findings == ()
    assert report.facts["checkpoint_step"] == 7
    assert line(report, "fingerprint").measured.startswith("tokenizer, weights, optimizer agree")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"vocab_size": V + 3}, "vocabulary"),
        ({"embedding_dim": 2 * C}, "width"),
        ({"num_layers": 3}, "layers"),
        ({"block_size": 2 * T}, "context"),
    ],
)
def test_another_architecture_is_named(saved: Path, changes: dict[str, int], word: str) -> None:
    report = ask(mini(**changes), checkpoint=saved)
    assert [result.title for result in report.failed] == ["fits the model"]
    (finding,) = report.failed[0].findings
    assert finding.code == "GG705"
    assert word in finding.causes[0]


def test_another_number_of_heads_loads_without_an_error_and_is_found_by_its_answers(saved: Path) -> None:
    report = ask(mini(num_heads=4), checkpoint=saved)
    assert [(result.title, result.findings[0].code) for result in report.failed] == [("config", "GG702")]
    assert "num_heads was 2, is 4" in report.failed[0].measured


def test_another_dropout_changes_no_answer(saved: Path) -> None:
    report = ask(mini(dropout=0.5), checkpoint=saved)
    assert report.passed
    assert "the same logits" in line(report, "config").measured


def test_another_tokenizer_is_found_and_none_is_a_note(saved: Path) -> None:
    report = ask(mini(), checkpoint=saved, tokenizer=list("bacdefghijk"))
    assert [(result.title, result.findings[0].code) for result in report.failed] == [("fingerprint", "GG701")]
    plain = {"model": mini().state_dict()}
    report = ask(mini(), checkpoint=plain)
    assert report.passed
    assert "GG704" in [finding.code for finding in report.findings]


def test_weights_that_were_changed_after_saving_are_found(saved: Path) -> None:
    payload = dict(read_checkpoint(saved))
    payload["model_state_dict"]["head.weight"][0, 0] += 1.0
    report = ask(mini(), checkpoint=payload)
    assert [(result.title, result.findings[0].code) for result in report.failed] == [("fingerprint", "GG703")]


def test_weights_that_are_not_finite_are_found_and_masks_are_not() -> None:
    state = mini().state_dict()
    state["head.weight"] = state["head.weight"].clone()
    state["head.weight"][0, 0] = torch.nan
    report = ask(mini(), checkpoint={"model_state_dict": state, "step": 3})
    assert [(result.title, result.findings[0].code) for result in report.failed] == [("finite", "GG706")]
    assert ask(Rope(), make_model=Rope, checkpoint={"model": Rope().state_dict()}).passed


def test_a_file_alone_is_looked_at_too(saved: Path) -> None:
    report = ask(None, checkpoint=saved, batch=None)
    assert [result.title for result in report.checks] == ["file", "finite", "fingerprint"]
    assert report.passed
    nothing = ask(None, checkpoint={"what": 1}, batch=None)
    assert [result.findings[0].code for result in nothing.failed] == ["GG707"]


def test_nothing_is_changed(saved: Path) -> None:
    model = mini(num_heads=4).train()
    optimizer = torch.optim.AdamW(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ask(model, checkpoint=saved, optimizer=optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_state_of_another_optimizer_in_the_file_is_found(saved: Path) -> None:
    model = mini()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    report = ask(model, checkpoint=saved, optimizer=optimizer)
    assert [(result.title, result.findings[0].code) for result in report.failed] == [
        ("optimizer state in the file", "GG708")
    ]


def test_what_is_missing_is_said() -> None:
    assert CheckpointStage().missing(Subject()) == "neither a model nor a checkpoint was given"
    report = preflight(Subject(model=Base(), tokenizer=adapt(["a", "b"])), [CheckpointStage()])
    assert report.passed


def test_the_saved_config_is_what_the_example_writes() -> None:
    payload = {"model_state_dict": mini().state_dict(), "config": asdict(CONFIG), "step": 3}
    report = ask(mini(), checkpoint=payload)
    assert report.passed
    assert line(report, "config").measured == "as saved"
