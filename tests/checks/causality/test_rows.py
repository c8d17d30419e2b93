"""Rows of a batch: those that leak into each other are found, and blamed on the module that mixes them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpt_guard.checks.runner.report import PreflightReport
from gpt_guard.checks.runner.run import check

from ..small_gpt import GPT, Attention, C, Convolution, Recurrent, T, V, batch
from ..variants import Experts, MoE


class MeanOverRows(Attention):
    def join(self, mixed: Tensor) -> Tensor:
        return super().join(mixed - mixed.mean(0, keepdim=True))


class RowPositions(GPT):
    def positions(self, idx: Tensor) -> Tensor:
        return torch.arange(idx.size(0), device=idx.device)[:, None]


def ask(model: nn.Module) -> PreflightReport:
    return check(model, batch=batch(), vocab_size=V, block_size=T, only=["causality"])


ROWS: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "mean over rows": (lambda: GPT(MeanOverRows), "blocks.0.attn", "dimension 0"),
    "time and batch swapped": (lambda: Recurrent(batch_first=False), "rnn", "batch_first"),
    "batch norm without statistics": (
        lambda: Convolution(True, nn.BatchNorm1d(C, track_running_stats=False)),
        "norm",
        "BatchNorm",
    ),
    "positions by row": (RowPositions, "", "place in the batch"),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_leak_are_found_and_blamed_on_their_module(name: str) -> None:
    build, module, cause = ROWS[name]
    found = next(found for found in ask(build()).findings if found.code == "GG661")
    assert found.module == module
    assert cause in found.causes[0]


def test_every_row_is_looked_at_not_only_the_last() -> None:
    class FirstRowReadsTheSecond(GPT):
        def logits(self, idx: Tensor) -> Tensor:
            out = super().logits(idx)
            return torch.cat([out[:1] + 0.1 * out[1:2], out[1:]])

    found = ask(FirstRowReadsTheSecond()).findings[0]
    assert found.code == "GG661"
    assert "row 0 reacts to 1" in found.seen
    assert found.module == ""


def test_experts_with_a_capacity_are_told_the_truth() -> None:
    found = [found for found in ask(MoE(capacity=8)).findings if found.code == "GG661"]
    assert found
    assert found[0].module_class == Experts.__name__
    assert "capacity" in found[0].causes[0]
