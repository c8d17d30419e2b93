"""Each planted leak, of the future or between rows, is found and blamed on its module; every healthy model passes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard.checks.runner.perturb import other_ids
from gpt_guard.checks.runner.run import check
from gpt_guard.hooks.isolation.compare import difference

from ..small_gpt import GPT, Attention, C, Convolution, Recurrent, T, V, ask_stage, batch
from ..variants import HEALTHY, Encoder, Experts, MoE, asked, masked_batch


class NoMask(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class OffByOne(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = torch.ones(q.size(2), q.size(2), dtype=torch.bool).tril(1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


class SoftMask(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.full((q.size(2), q.size(2)), -10.0, dtype=q.dtype).triu(1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class NoTranspose(Attention):
    def join(self, mixed: Tensor) -> Tensor:
        return mixed.reshape(mixed.size(0), mixed.size(2), C)


class ArgmaxLeak(Attention):
    """Sees the future through an argmax, which has no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.1 * x.argmax(1, keepdim=True).to(x.dtype)


def zero_at_first() -> GPT:
    model = GPT(NoMask)
    for block in model.blocks:
        nn.init.zeros_(block.attn.proj.weight)
    return model


class TimeNorm(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.ln = nn.LayerNorm((T, C))


ask = partial(ask_stage, "causality")


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_models_pass(name: str) -> None:
    build, options = HEALTHY[name]
    report = check(build(), **asked(options), only=["causality"])
    assert report.passed, report
    assert not report.findings
    assert any(line.status == "passed" for line in report.checks)


LEAKS: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "no mask": (lambda: GPT(NoMask), "blocks.0.attn", "no causal mask"),
    "off by one": (lambda: GPT(OffByOne), "blocks.0.attn", "off by one"),
    "soft mask": (lambda: GPT(SoftMask), "blocks.0.attn", "not low enough"),
    "soft mask in bfloat16": (lambda: GPT(SoftMask).bfloat16(), "blocks.0.attn", "not low enough"),
    "no transpose": (lambda: GPT(NoTranspose), "blocks.0.attn", "transpose belongs"),
    "argmax": (lambda: GPT(ArgmaxLeak), "blocks.0.attn", ""),
    "norm over time": (TimeNorm, "ln", "over positions"),
    "padded convolution": (lambda: Convolution(causal=False), "conv", "padded on both sides"),
    "norm of a convolution": (lambda: Convolution(True, nn.GroupNorm(1, C)), "norm", "over positions"),
    "bidirectional": (lambda: Recurrent(bidirectional=True), "rnn", "bidirectional"),
    "batch norm": (lambda: Convolution(True, nn.BatchNorm1d(C)), "norm", "BatchNorm"),
    "zero at first": (zero_at_first, "blocks.0.attn", "begins at zero"),
}


@pytest.mark.parametrize("name", LEAKS)
def test_each_leak_is_found_and_blamed_on_its_module(name: str) -> None:
    build, module, cause = LEAKS[name]
    report = ask(build())
    codes = {found.code for found in report.findings}
    assert codes == {"GG660"}, report
    found = report.findings[0]
    assert found.module == module
    assert cause in found.causes[0]
    assert found.origin


def test_the_line_of_the_users_forward_is_named() -> None:
    found = ask(GPT(NoMask)).findings[0]
    assert found.where is not None
    assert found.where.file.endswith(("small_gpt.py", "test_causality.py"))
    assert found.module_class == "NoMask"
    assert "before `blocks.0.attn.proj` and after `blocks.0.attn.qkv`" in str(found.origin)


def test_distances_tell_how_far_ahead_a_position_sees() -> None:
    everything, one_layer = ask(GPT(NoMask)).findings[0], GPT(Attention)
    one_layer.blocks[0].attn = OffByOne()
    assert "every distance" in everything.seen
    assert everything.evidence["offsets"] == list(range(1, T))
    near = ask(one_layer).findings[0]
    assert "the next token (+1) only" in near.seen
    assert near.evidence["offsets"] == [1]


def test_gradient_and_suffix_each_see_what_the_other_cannot() -> None:
    lines = {line.title: line.status for line in ask(GPT(ArgmaxLeak)).checks}
    assert lines["suffix change"] == "failed"
    assert lines["gradient to the embedded inputs"] == "passed"


def test_a_model_without_an_embedding_says_that_no_gradient_can_be_asked() -> None:
    class OneHot(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(V, V)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(F.one_hot(x, V).float())
            return out

    lines = {line.title: line for line in ask(OneHot()).checks}
    assert lines["suffix change"].status == "passed"
    assert lines["gradient to the embedded inputs"].status == "skipped"
    assert "no nn.Embedding" in lines["gradient to the embedded inputs"].measured


def test_an_encoder_is_asked_about_padding_only() -> None:
    options = {"causal": False, "pad_id": 0, "batch": masked_batch()}
    lines = {line.title: line.status for line in ask(Encoder(), **options).checks}
    assert lines == {"suffix change": "skipped", "padding is masked": "passed", "rows are independent": "passed"}
    report = ask(Encoder(masked=False), **options)
    assert [found.code for found in report.findings] == ["GG662"]
    without = {line.title: line for line in ask(Encoder(), causal=False, batch=masked_batch()).checks}
    assert without["padding is masked"].status == "skipped"


def test_dropout_that_is_always_on_is_left_to_another_stage() -> None:
    class Dropped(Attention):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), 0.3)

    assert ask(GPT(Dropped)).passed


def test_a_model_that_remembers_cannot_be_compared_and_says_so() -> None:
    class Counter(GPT):
        calls = 0

        def logits(self, idx: Tensor) -> Tensor:
            self.calls += 1
            return super().logits(idx) * self.calls

    lines = ask(Counter()).checks
    assert {line.status for line in lines} == {"skipped"}
    assert "at every call" in lines[0].measured


def test_the_model_is_as_it_was() -> None:
    model = GPT(NoMask, dropout=0.1).bfloat16()
    model.blocks[0].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    x, y = batch()
    random = torch.get_rng_state()
    ask(model, batch=(x, y))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_other_ids_are_all_others_and_never_the_one_to_avoid() -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, (50, 9), generator=generator)
    changed = other_ids(ids, 3, generator, avoid=0)
    assert bool((changed != ids).all())
    assert bool((changed[ids != 0] != 0).all())
    assert set(changed.unique().tolist()) <= {1, 2}
    assert bool((other_ids(ids, 3, generator) != ids).all())


def test_infinities_and_nan_on_both_sides_are_no_difference() -> None:
    inf, nan = float("inf"), float("nan")
    apart = difference(torch.tensor([inf, nan, nan, 1.0]), torch.tensor([inf, nan, 1.0, 3.0]))
    assert apart.tolist() == [0.0, 0.0, inf, 2.0]


class MeanOverRows(Attention):
    def join(self, mixed: Tensor) -> Tensor:
        return super().join(mixed - mixed.mean(0, keepdim=True))


class RowPositions(GPT):
    def positions(self, idx: Tensor) -> Tensor:
        return torch.arange(idx.size(0), device=idx.device)[:, None]


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
