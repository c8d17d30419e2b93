"""Healthy projects of many kinds pass every stage that applies: a false alarm is as bad as a miss."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard.checks.runner.forward import shifts_inside
from gpt_guard.checks.runner.report import PreflightReport
from gpt_guard.records import Severity
from mini_gpt import MiniGPT

from . import variants, wholes
from .project import BLOCK, CONFIG, TEXT, TOKENIZER, Project, encode, healthy, payload, train, trained_weights

EVERY_MODEL = {"shapes", "initial-loss", "causality", "gradients", "optimizer", "overfit", "validation", "checkpoint"}
DECODER = EVERY_MODEL | {"environment", "tokenizer", "token-ids", "batches", "generation"}

Prepare = Callable[[Project], Any]


def fine(report: PreflightReport, ran: set[str]) -> None:
    """No cross, no finding that is an error, and these stages were really asked."""
    assert report.passed, report
    assert [finding.code for finding in report.findings if finding.severity is Severity.ERROR] == []
    assert {line.stage for line in report.checks if line.status == "passed"} >= ran, report


def of_class(kind: Callable[[Any], nn.Module], **settings: Any) -> Prepare:
    def prepare(project: Project) -> None:
        project.config = replace(CONFIG, **settings)
        project.model_class = kind

    return prepare


def bfloat16(project: Project) -> None:
    project.model = MiniGPT(CONFIG).to(torch.bfloat16)


def partly_frozen(project: Project) -> None:
    project.model.get_submodule("token_embedding").requires_grad_(False)
    project.model.get_submodule("blocks.0").requires_grad_(False)


def padded_vocabulary(project: Project) -> None:
    project.config = replace(CONFIG, vocab_size=64)


def loss_of_its_own(project: Project) -> None:
    project.given["loss_fn"] = variants.cross_entropy


def label_smoothing(project: Project) -> None:
    project.given["loss_fn"] = lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten(), label_smoothing=0.1)


def two_groups(project: Project) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        matrices: dict[str, Any] = {"params": [p for p in model.parameters() if p.dim() == 2]}
        others: dict[str, Any] = {"params": [p for p in model.parameters() if p.dim() != 2], "weight_decay": 0.0}
        return torch.optim.AdamW([matrices, others], lr=1e-3)

    project.make_optimizer = make


def momentum(project: Project) -> None:
    project.make_optimizer = lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def answers_only(project: Project) -> None:
    """The prompt, half of each row, is left out of the loss."""

    def get_batch() -> tuple[Tensor, Tensor]:
        x, y = project.healthy_batch()
        y = y.clone()
        y[:, : BLOCK // 2] = -100
        return x, y

    project.get_batch = get_batch


def recurrent(project: Project) -> None:
    project.model_class = wholes.Recurrent
    project.given |= {"loss_fn": variants.cross_entropy, "overfit_steps": 300}


def lora(project: Project) -> None:
    project.model_class = wholes.Adapted
    project.model = wholes.Adapted(CONFIG, trained_weights())


def labels_are_the_inputs(project: Project) -> None:
    def get_batch() -> tuple[Tensor, Tensor]:
        x, _ = project.healthy_batch()
        return x, x.clone()

    project.model_class, project.get_batch = wholes.ShiftingInside, get_batch


def int32_rows(project: Project) -> None:
    project.data = {name: ids.to(torch.int32) for name, ids in project.data.items()}


DECODERS: dict[str, Prepare] = {
    "as it is": lambda project: None,
    "tied weights": of_class(variants.TiedGPT),
    "rotary positions in buffers": of_class(variants.Decoder),
    "sliding window": of_class(variants.SlidingWindow),
    "mixture of experts": of_class(variants.Mixture),
    "activation checkpointing": of_class(variants.Recomputing),
    "causal convolution": of_class(variants.Convolutional),
    "recurrent": recurrent,
    "torch's own layers": of_class(wholes.TorchDecoder),
    "shifts inside": labels_are_the_inputs,
    "bfloat16": bfloat16,
    "partly frozen": partly_frozen,
    "LoRA": lora,
    "no dropout": of_class(MiniGPT, dropout=0.0),
    "strong dropout": of_class(MiniGPT, dropout=0.4),
    "one head, one layer": of_class(MiniGPT, num_heads=1, num_layers=1),
    "six layers": of_class(MiniGPT, num_layers=6),
    "padded vocabulary": padded_vocabulary,
    "a loss function": loss_of_its_own,
    "label smoothing": label_smoothing,
    "two groups": two_groups,
    "SGD with momentum": momentum,
    "answers only": answers_only,
    "int32 ids": int32_rows,
}


@pytest.mark.parametrize("prepare", DECODERS.values(), ids=DECODERS.keys())
def test_a_healthy_decoder_passes(prepare: Prepare, tmp_path: Path) -> None:
    project = healthy(tmp_path)
    prepare(project)
    fine(project.check(), DECODER)


def test_a_trained_project_passes_with_its_files(tmp_path: Path) -> None:
    project = healthy(tmp_path, trained=True)
    project.write_files()
    report = project.check()
    fine(report, DECODER | {"files"})
    titles = {(line.stage, line.title) for line in report.checks if line.status == "passed"}
    assert titles >= {("generation", "repetition"), ("generation", "chaos"), ("checkpoint", "fits the model")}


def test_a_trained_model_of_another_kind_passes(tmp_path: Path) -> None:
    project = healthy(tmp_path)
    project.config = replace(CONFIG)
    project.model_class = variants.Decoder
    project.weights = train(variants.Decoder)
    project.checkpoint = {**payload(project), "config": asdict(CONFIG)}
    fine(project.check(trained=True), DECODER)


def test_an_encoder_with_padding_passes(tmp_path: Path) -> None:
    config = wholes.EncoderConfig(len(TOKENIZER) + 2)
    mask = len(TOKENIZER) + 1

    def get_batch() -> tuple[Tensor, Tensor]:
        ids = encode(TEXT) + 1
        rows = ids[torch.randint(len(ids) - BLOCK, (8, 1)) + torch.arange(BLOCK)]
        rows[0, 12:] = config.pad_id
        hidden = (torch.rand(rows.shape) < 0.3) & (rows != config.pad_id)
        hidden[:, 2] = True
        return rows.masked_fill(hidden, mask), rows.masked_fill(~hidden, -100)

    project = Project(tmp_path, config=config, model_class=wholes.Encoder, tokenizer=None, get_batch=get_batch)
    fine(project.check(causal=False, pad_id=config.pad_id), EVERY_MODEL)


def test_a_hugging_face_gpt2_passes(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=len(TOKENIZER), n_positions=BLOCK, n_embd=32, n_head=2, n_layer=2, bos_token_id=0, eos_token_id=0
    )

    def get_batch() -> tuple[Tensor, Tensor]:
        x, _ = healthy(tmp_path).healthy_batch()
        return x, x.clone()

    project = healthy(tmp_path)
    project.config, project.get_batch = config, get_batch
    project.model_class = transformers.GPT2LMHeadModel
    fine(project.check(), DECODER)


def in_bits(logits: Tensor, y: Tensor) -> Tensor:
    return variants.cross_entropy(logits, y) / math.log(2)


def squared(logits: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(logits, F.one_hot(y, logits.size(-1)).to(logits.dtype))


@pytest.mark.parametrize(("loss_fn", "code"), [(in_bits, "GG659"), (squared, "GG656")])
def test_an_unusual_loss_is_noted_and_fails_nothing(
    tmp_path: Path, loss_fn: Callable[[Tensor, Tensor], Tensor], code: str
) -> None:
    report = healthy(tmp_path).check(only=["shapes", "initial-loss"], loss_fn=loss_fn)
    assert report.passed, report
    assert code in {finding.code for finding in report.findings}


def test_one_that_learns_slowly_and_surely_is_warned_of(tmp_path: Path) -> None:
    project = healthy(tmp_path)
    recurrent(project)
    report = project.check(only=["overfit"])
    assert report.passed, report
    assert {(finding.code, finding.severity) for finding in report.findings} == {("GG672", Severity.WARNING)}


def test_weights_from_training_need_not_be_called_trained(tmp_path: Path) -> None:
    project = healthy(tmp_path)
    project.weights = trained_weights()
    report = project.check(only=["initial-loss"])
    assert report.passed, report
    (line,) = (line for line in report.checks if line.title == "loss before training")
    assert "come from training" in line.measured


def test_no_fresh_model_is_taken_for_one_that_shifts_inside() -> None:
    config = replace(CONFIG, embedding_dim=16, num_layers=1)
    x = torch.randint(config.vocab_size, (4, BLOCK))
    for seed in range(200):
        torch.manual_seed(seed)
        assert not shifts_inside(MiniGPT(config), x, config.vocab_size), seed
        assert shifts_inside(wholes.ShiftingInside(config), x, config.vocab_size), seed
