"""Dropout that is active in eval mode: which calls are told, and which are somebody's wish."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard.callbacks.modes.guard import EvalModeAssert
from gpt_guard.callbacks.probes.guard import ModelProbe
from gpt_guard.callbacks.updates.guard import ParamDeltaProbe
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding, Severity

Drop = Callable[[nn.Module, Tensor], Tensor]


class Net(nn.Module):
    """A part that drops in whatever way, in a model with a dropout layer of its own."""

    def __init__(self, drop: Drop) -> None:
        super().__init__()
        self.part, self.layer, self.head = Part(drop), nn.Dropout(0.1), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layer(self.part(x)))
        return logits


class Part(nn.Module):
    def __init__(self, drop: Drop) -> None:
        super().__init__()
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self, x)


def attention(module: nn.Module, x: Tensor, *, training: bool) -> Tensor:
    """Multi-head attention called as a function."""
    weight, bias = torch.eye(4).repeat(3, 1), torch.zeros(12)
    rows = x[:, None]
    out, _ = F.multi_head_attention_forward(
        rows, rows, rows, 4, 2, weight, bias, None, None, False, 0.3, torch.eye(4), torch.zeros(4), training=training
    )
    return out[:, 0]


def run(drop: Drop, *, inspect: int = 3, evaluate: Callable[[nn.Module], object] | None = None) -> Sequence[Finding]:
    torch.manual_seed(0)
    model = Net(drop)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guards = [ModelProbe(), EvalModeAssert()]
    with Guardian(model, optimizer, guards=guards, sinks=[], inspect_steps=inspect) as guardian:
        for _ in range(4):
            optimizer.zero_grad()
            F.cross_entropy(F.dropout(model(torch.randn(6, 4)), 0.1), torch.zeros(6, dtype=torch.long)).backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                if evaluate is not None:
                    evaluate(model)
                # Dropout that belongs to no module is not the model's.
                F.dropout(model(torch.randn(6, 4)), 0.1)
            model.train()
    return guardian.findings


@pytest.mark.parametrize(
    ("drop", "name"),
    [
        (lambda module, x: F.dropout(x, 0.2), "dropout(p=0.2)"),
        (lambda module, x: F.dropout1d(x[None], 0.4)[0], "dropout1d(p=0.4)"),
        (lambda module, x: torch.dropout(x, 0.3, True), "dropout(p=0.3)"),
        (lambda module, x: attention(module, x, training=True), "multi_head_attention_forward(p=0.3)"),
    ],
    ids=["F.dropout", "F.dropout1d", "torch.dropout", "attention"],
)
def test_a_call_that_knows_no_mode(drop: Drop, name: str) -> None:
    (found,) = run(drop)
    assert (found.code, found.module, found.step) == ("GG505", "part", 0)
    assert found.seen.startswith(f"{name} in `part` drops values in eval mode.")
    assert found.where is not None
    assert found.where.file == __file__
    # The probe measured it, before any evaluation came.
    assert "Two eval passes of one batch differ by" in found.seen


def test_attention_in_a_list_is_missed_by_eval_first_of_all() -> None:
    """It asks for its own mode, as it should, and that never changes."""

    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            rows = x[None]
            return F.scaled_dot_product_attention(rows, rows, rows, dropout_p=0.3 if self.training else 0.0)[0]

    hidden = [Attention()]
    (found,) = run(lambda module, x: hidden[0](x))
    start = "scaled_dot_product_attention(p=0.3) in a module (Attention) that eval() misses drops values in eval mode."
    assert found.seen.startswith(start)
    assert found.causes[0].startswith("The module that drops is in a plain list")
    assert "nn.ModuleList" in found.fix


class Block(nn.Module):
    """Drops on two lines."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(4, 4), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.linear(x))
        return self.drop(x)  # type: ignore[no-any-return]  # a module call is Any


class Holder(nn.Module):
    """Keeps blocks in whatever way, and calls them one after the other."""

    def __init__(self, keep: Callable[[list[nn.Module]], Any], blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks, self.head = keep(blocks), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.blocks.values() if isinstance(self.blocks, dict) else self.blocks
        for each in kept:
            for block in each if isinstance(each, list) else [each]:
                x = block(x)
        return self.head(x)  # type: ignore[no-any-return]  # a module call is Any


def held(keep: Callable[[list[nn.Module]], Any], make: Callable[[], nn.Module] = Block, *, all_of: bool = False) -> Any:
    """The findings of a model that holds two blocks, of whose tensors the optimizer gets all or the model's own."""
    torch.manual_seed(0)
    blocks = [make(), make()]
    model = nn.Sequential(nn.Linear(4, 4), Holder(keep, blocks))
    theirs = [tensor for block in blocks for tensor in block.parameters()]
    optimizer = torch.optim.SGD([*model.parameters(), *(theirs if all_of else [])], lr=0.1)
    guards = [ModelProbe(), EvalModeAssert(), ParamDeltaProbe()]
    with Guardian(model, optimizer, guards=guards, sinks=[]) as guardian:
        for _ in range(4):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(6, 4)), torch.zeros(6, dtype=torch.long)).backward()
            optimizer.step()
    return guardian.findings


@pytest.mark.parametrize(
    ("keep", "kind"),
    [
        (lambda blocks: blocks, "a list of 2 Block"),
        (lambda blocks: dict(enumerate(blocks)), "a dict of 2 Block"),
        (lambda blocks: [blocks], "a list of 1 list"),
    ],
    ids=["list", "dict", "nested"],
)
def test_blocks_that_eval_misses_are_one_cause_with_the_attribute_that_holds_them(keep: Any, kind: str) -> None:
    dropout, hidden = held(keep)
    assert (dropout.code, hidden.code) == ("GG505", "GG303")
    assert f" It is in attribute `1.blocks` ({kind}) of Holder, which does not register it." in dropout.seen
    assert "No optimizer holds the 4 trainable tensors in there (GG303)" in dropout.seen
    assert dropout.where is not None
    assert dropout.where.text == "x = self.drop(self.linear(x))"


def test_blocks_that_the_optimizer_was_given_are_only_missed_by_eval() -> None:
    dropout, extra = held(lambda blocks: blocks, all_of=True)
    assert (dropout.code, extra.code) == ("GG505", "GG307")
    assert "(a list of 2 Block) of Holder, which does not register it. Two eval passes" in dropout.seen


def test_a_list_of_dropout_layers_alone_holds_nothing_that_trains() -> None:
    (dropout,) = held(lambda blocks: blocks, lambda: nn.Dropout(0.2))
    assert " It is in attribute `1.blocks` (a list) of Holder, which does not register it. Two" in dropout.seen


def test_training_written_out_may_be_meant() -> None:
    (found,) = run(lambda module, x: F.dropout(x, 0.2, training=True))
    assert (found.code, found.severity) == ("GG505", Severity.INFO)
    assert found.causes[0].startswith("Monte Carlo dropout")


@pytest.mark.parametrize(
    "drop",
    [
        lambda module, x: F.dropout(x, 0.2, training=module.training),
        lambda module, x: F.dropout(x, 0.0),
        lambda module, x: F.alpha_dropout(x, 0.2),
        lambda module, x: torch.dropout(x, 0.3, module.training),
        lambda module, x: attention(module, x, training=module.training),
    ],
    ids=["by mode", "p is 0", "off by default", "torch.dropout by mode", "attention by mode"],
)
def test_a_call_that_drops_nothing_in_eval_mode_is_silent(drop: Drop) -> None:
    assert run(drop) == ()


def test_layers_put_back_into_training_mode_are_judged_as_modes() -> None:
    def one_by_one(model: nn.Module) -> None:
        model.get_submodule("layer").train()

    found = run(lambda module, x: x, evaluate=one_by_one)
    assert [(each.code, each.severity) for each in found] == [("GG501", Severity.INFO)]


def test_without_inspected_steps_nothing_is_seen() -> None:
    assert run(lambda module, x: F.dropout(x, 0.2), inspect=0) == ()
