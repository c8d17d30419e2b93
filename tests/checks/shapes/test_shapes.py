"""Forward shapes: every wrong layout is named, limits are tried out, and foreign devices are found without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpt_guard.checks.runner.report import PreflightReport
from gpt_guard.checks.runner.run import check
from gpt_guard.checks.shapes.foreign_device import stays_behind
from gpt_guard.checks.shapes.stage import distinct_sizes, layout_of
from gpt_guard.checks.tokenizer.tokenizers import adapt

from ..small_gpt import GPT, Attention, C, T, V, batch
from ..variants import HEALTHY, MoE, asked


class Changed(GPT):
    """A GPT whose logits are changed before they are returned."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        return self.change(super().logits(idx))


def ask(model: nn.Module, **options: Any) -> PreflightReport:
    return check(model, **{"batch": batch(), "vocab_size": V, "block_size": T, **options}, only=["shapes"])


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_models_pass(name: str) -> None:
    build, options = HEALTHY[name]
    report = check(build(), **asked(options), only=["shapes"])
    assert report.passed, report
    assert not report.findings


def test_the_lines_tell_measured_and_expected() -> None:
    lines = {line.title: line for line in ask(GPT()).checks}
    assert lines["logits"].measured == f"[3, {T}, {V}] is [B, T, V] for ids [3, {T}]"
    assert lines["block_size"].measured == f"{T} tokens give {T} positions"
    assert lines["one token more"].measured == "refused with IndexError"
    assert lines["one row of one token"].measured == f"[1, 1, {V}]"
    assert lines["tensors made inside"].measured == "all move with the model"
    assert lines["loss"].expected == "one finite number"


@pytest.mark.parametrize(
    ("change", "letters", "cause"),
    [
        (lambda logits: logits.transpose(1, 2), "[B, V, T]", "Classes come before positions"),
        (lambda logits: logits.transpose(0, 1), "[T, B, V]", "Time comes before the batch"),
        (lambda logits: logits.flatten(0, 1), "[B * T, V]", "flattened"),
        (lambda logits: logits[:, -1:], "[B, 1, V]", "Only the last position"),
        (lambda logits: logits[:, -1], "[B, V]", "Only the last position"),
        (lambda logits: logits[:, 1:], "with T 12", "dropped or added"),
        (lambda logits: logits[..., :C], "[B, T, C]", "missing or not called"),
        (lambda logits: logits.mean(-1), "[B, T]", "something other than scores"),
    ],
)
def test_each_wrong_layout_is_named(change: Callable[[Tensor], Tensor], letters: str, cause: str) -> None:
    report = ask(Changed(change))
    assert [found.code for found in report.findings] == ["GG640"]
    assert letters in report.findings[0].seen
    assert cause in report.findings[0].causes[0]


def test_layouts_are_told_apart_by_sizes_that_differ() -> None:
    assert distinct_sizes(12, 12, {11, 3}) == (2, 10)
    assert distinct_sizes(3, None, set()) == (2, 3)
    assert layout_of(torch.zeros(3, 5, 7), 3, 5, 7, set())[1] == ""
    assert layout_of(torch.zeros(3, 9, 5), 3, 5, None, set())[1] == "class_first"


def test_ids_in_place_of_scores() -> None:
    found = ask(Changed(lambda logits: logits.argmax(-1, keepdim=True).expand_as(logits))).findings
    assert [each.code for each in found] == ["GG646"]
    assert "argmax" in found[0].causes[0]


def test_a_vocabulary_that_is_too_small_or_padded() -> None:
    found = ask(GPT(), vocab_size=V + 40).findings
    assert [each.code for each in found] == ["GG641"]
    assert f"{V} scores" in found[0].seen
    lines = {line.title: line for line in ask(GPT(), vocab_size=V - 2).checks}
    assert "2 more than needed (padding)" in lines["vocabulary"].measured


def test_a_tokenizer_with_more_ids_than_scores() -> None:
    class Chars:
        def __init__(self) -> None:
            self.chars = [chr(ord("a") + number) for number in range(V + 2)]

        def encode(self, text: str) -> list[int]:
            return [self.chars.index(char) for char in text]

        def decode(self, ids: list[int]) -> str:
            return "".join(self.chars[index] for index in ids)

    assert adapt(Chars()).size == V + 2
    found = ask(GPT(), tokenizer=Chars()).findings
    assert [each.code for each in found] == ["GG641"]
    assert "Special tokens" in found[0].causes[0]


def losses(change: Callable[[Tensor, Tensor], Tensor]) -> Any:
    return lambda logits, targets: change(
        nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none"), targets
    )


@pytest.mark.parametrize(
    ("loss_fn", "cause"),
    [
        (losses(lambda loss, y: loss), "reduction='none'"),
        (losses(lambda loss, y: loss.view_as(y).mean(1)), "reduction='none'"),
        (losses(lambda loss, y: (loss * 0).log().mean()), "probability that rounds to 0"),
    ],
)
def test_a_loss_that_is_not_one_finite_number(loss_fn: Any, cause: str) -> None:
    found = ask(GPT(), loss_fn=loss_fn).findings
    assert [each.code for each in found] == ["GG642"]
    assert cause in found[0].causes[0]


def test_a_batch_whose_labels_are_all_ignored() -> None:
    x, y = batch()
    found = ask(GPT(), batch=(x, torch.full_like(y, -100))).findings
    assert [each.code for each in found] == ["GG642"]
    assert "Every label is ignored" in found[0].causes[0]


def test_a_position_table_that_is_too_short() -> None:
    model = GPT()
    model.pos = nn.Embedding(T - 3, C)
    report = ask(model)
    assert [found.code for found in report.findings] == ["GG643"]
    assert "table of positions" in report.findings[0].causes[0]
    assert report.findings[0].where is not None


def test_a_mask_that_is_too_short() -> None:
    class ShortMask(Attention):
        def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            mask = torch.ones(8, 8, dtype=torch.bool).tril()[: q.size(2), : q.size(2)]
            return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    found = ask(GPT(ShortMask)).findings
    assert found[0].code == "GG643"
    assert "mask" in found[0].causes[0]


def test_a_model_that_crops_says_so_and_passes_beyond_block_size() -> None:
    lines = {line.title: line for line in ask(Changed(lambda logits: logits), block_size=T - 4).checks}
    assert lines["one token more"].measured == "handled: positions have no table of this size"

    class Cropping(GPT):
        def logits(self, idx: Tensor) -> Tensor:
            return super().logits(idx[:, -8:])

    found = ask(Cropping()).findings
    assert {each.code for each in found} <= {"GG640", "GG643"}
    assert found


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda logits: logits.squeeze(0), "squeeze()"),
        (lambda logits: logits.expand(-1, max(T, logits.size(1)), -1), "full length"),
        (
            lambda logits: logits / logits.std(1, keepdim=True, correction=1) if logits.size(1) > 1 else logits / 0,
            "NaN",
        ),
    ],
)
def test_a_single_token_must_work(change: Callable[[Tensor], Tensor], cause: str) -> None:
    report = ask(Changed(change))
    assert [found.code for found in report.findings] == ["GG644"], report
    assert cause in report.findings[0].causes[0]


def test_an_error_of_the_model_is_told_with_its_line() -> None:
    class Broken(GPT):
        def logits(self, idx: Tensor) -> Tensor:
            return self.head(self.tok(idx) + torch.zeros(7, 5))  # type: ignore[no-any-return]  # it raises

    found = ask(Broken()).findings
    assert [each.code for each in found] == ["GG610"]
    assert found[0].where is not None
    assert "torch.zeros(7, 5)" in found[0].where.text


class NoDevice(GPT):
    def positions(self, idx: Tensor) -> Tensor:
        return torch.arange(idx.size(1))


class PlainAttribute(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(C)

    def logits(self, idx: Tensor) -> Tensor:
        out: Tensor = self.head(self.tok(idx) * self.scale)
        return out


class HardCoded(GPT):
    def logits(self, idx: Tensor) -> Tensor:
        out: Tensor = self.head(self.tok(idx) + self.tok(idx).cpu())
        return out


@pytest.mark.parametrize(
    ("kind", "line", "cause"),
    [
        (NoDevice, "self.pos(", "without device="),
        (PlainAttribute, "self.scale", "plain attribute"),
        (HardCoded, ".cpu()", "written down"),
    ],
)
def test_tensors_that_stay_on_the_cpu_are_a_note_with_their_line(kind: Any, line: str, cause: str) -> None:
    report = ask(kind())
    assert report.passed
    assert [found.code for found in report.findings] == ["GG645"]
    found = report.findings[0]
    assert cause in found.causes[0]
    assert found.where is not None
    assert line in found.where.text


def test_cpu_scalars_move_as_torch_lets_them() -> None:
    class Scalars(GPT):
        def logits(self, idx: Tensor) -> Tensor:
            return super().logits(idx) * torch.tensor(2.0)

    assert stays_behind(Scalars().eval(), batch()[0]) is None


def test_a_forward_that_reads_values_is_not_asked() -> None:
    lines = {line.title: line for line in ask(MoE()).checks}
    assert lines["tensors made inside"].status == "skipped"
    assert "not asked" in lines["tensors made inside"].measured


def test_without_a_batch_ids_are_drawn() -> None:
    assert check(GPT(), vocab_size=V, block_size=T, only=["shapes"]).passed
    assert check(nn.Linear(2, 2), only=["shapes"]).checks[0].status == "skipped"
