"""Batches: which shift is found, what comes back, which targets count; packed, padded and masked batches stay quiet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gpt_guard.callbacks.losses.pairing import find_shift
from gpt_guard.checks.batches.stage import BatchesStage, same_batch
from gpt_guard.checks.batches.targets import loss_shifts
from gpt_guard.checks.runner.base import Subject
from gpt_guard.checks.runner.forward import shifts_inside
from gpt_guard.checks.runner.run import check
from gpt_guard.checks.tokenizer.tokenizers import adapt
from gpt_guard.records import CheckResult, Severity
from mini_gpt import MiniGPT, MiniGPTConfig

from ..results import assert_caught, by_title, failed

B, T = 8, 16
CHARS = [chr(97 + index) for index in range(24)]
TOKENS = [*CHARS, "<pad>", "<eos>"]
V, PAD, EOS = len(TOKENS), 24, 25
IDS = torch.randint(len(CHARS), (4000,), generator=torch.Generator().manual_seed(5))
CONFIG = MiniGPTConfig(V, block_size=T, embedding_dim=8, num_heads=2, num_layers=1)
Batch = tuple[Tensor, Tensor]


def rows(shift: int = 1, first: int = 100) -> Batch:
    """x and y at evenly spaced places of a text."""
    starts = first + 37 * torch.arange(B)[:, None] + torch.arange(T)
    return IDS[starts], IDS[starts + shift]


def draw() -> Batch:
    return rows(first=int(torch.randint(10, 3000, ())))


def padded(*, masked: bool = True, end: bool = True, pad: int = PAD) -> Batch:
    """Documents of different length, each with its end of sequence, filled up on the right."""
    whole = torch.full((B, T + 1), pad)
    for row in range(B):
        length = 5 + row
        whole[row, :length], whole[row, length] = IDS[row * 40 : row * 40 + length], EOS
    x, y = whole[:, :-1].clone(), whole[:, 1:].clone()
    after_end = (x == EOS) | (x == pad)
    if masked:
        y[after_end] = -100
    if not end:
        y[y == EOS] = -100
    return x, y


def masked(y: Tensor, where: Any, value: int = -100) -> Tensor:
    y = y.clone()
    y[where] = value
    return y


class Logits(MiniGPT):
    def forward(self, idx: Tensor) -> Tensor:  # type: ignore[override] # a model as others write it
        return super().forward(idx)[0]


class OwnLoss(MiniGPT):
    """With a loss as `loss` says."""

    ignore_index = -100

    def forward(self, token_ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits, _ = super().forward(token_ids)
        return logits, None if targets is None else self.loss(logits, targets)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=self.ignore_index)


class IgnoresMinusOne(OwnLoss):
    ignore_index = -1


class IgnoresPadding(OwnLoss):
    ignore_index = PAD


class Smooths(IgnoresPadding):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, label_smoothing=0.01)


class ShiftsInside(OwnLoss):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())


class Casts(OwnLoss):
    def forward(self, token_ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return super().forward(token_ids.long(), None if targets is None else targets.long())


def shifted_loss(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), y[:, 1:].flatten())


def plain_loss(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def lines(batch: Any = None, model: Any = MiniGPT, **given: Any) -> dict[str, CheckResult]:
    built = model(CONFIG) if isinstance(model, type) else model
    report = check(built, batch=batch, **{"tokenizer": TOKENS, "only": ["batches"], **given})
    return by_title(report.checks)


X, Y = rows()
DOCUMENTS = torch.where(torch.arange(T) % 5 == 4, -100, Y)
PACKED = torch.where(torch.arange(T) % 5 == 4, EOS, Y)  # the end of each document is its last target, not in x
NOISE = torch.where(torch.rand(B, T, generator=torch.Generator().manual_seed(1)) < 0.15, (X + 3) % 24, X)

HEALTHY: dict[str, dict[str, Any]] = {
    "plain": {"batch": (X, Y)},
    "int32 ids": {"batch": (X.int(), Y)},
    "short rows": {"batch": (X[:, :5], Y[:, :5])},
    "one row": {"batch": (X[:1], Y[:1])},
    "masked prompts": {"batch": (X, masked(Y, (slice(None), slice(0, 12))))},
    "answers of one token": {"batch": (X, masked(Y, (slice(None), slice(0, T - 2))))},
    "document borders masked": {"batch": (X, DOCUMENTS)},
    "packed documents": {"batch": (X, PACKED)},
    "noise in the inputs": {"batch": (NOISE, Y)},
    "padding, masked": {"batch": padded()},
    "padding is the end, masked by length": {"batch": padded(pad=EOS), "pad_id": EOS, "eos_id": EOS},
    "padding that the model's loss ignores": {"batch": padded(masked=False), "model": IgnoresPadding},
    "the same with label smoothing": {"batch": padded(masked=False), "model": Smooths},
    "padding that loss_fn ignores": {
        "batch": padded(masked=False),
        "model": Logits,
        "loss_fn": lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=PAD),
    },
    "padding is the ignore_index": {"batch": padded(masked=False), "model": Logits, "ignore_index": PAD},
    "-1 as in nanoGPT": {"batch": (X, masked(Y, X > 20, -1)), "model": IgnoresMinusOne},
    "a model that shifts inside": {"batch": {"input_ids": X, "labels": X.clone()}, "model": ShiftsInside},
    "the same from one tensor": {"batch": X, "model": ShiftsInside},
    "a loss_fn that shifts": {"batch": (X, X.clone()), "model": Logits, "loss_fn": shifted_loss},
    "a loss_fn that does not": {"batch": (X, Y), "model": Logits, "loss_fn": plain_loss},
    "an encoder": {"batch": (X, torch.where(X % 5 == 0, X, -100)), "model": Logits, "causal": False},
    "a model that casts": {"batch": (X.to(torch.int16), Y.to(torch.int16)), "model": Casts},
    "a loop that casts targets": {"batch": (X, Y.int()), "model": Logits},
    "without a model": {"batch": (X, Y), "model": None},
    "labels = input_ids without a model": {"batch": X, "model": None},
    "constant rows": {"batch": (torch.ones(B, T).long(), torch.ones(B, T).long())},
    "cut from the data": {"data": IDS},
    "a loader": {"batches": DataLoader(TensorDataset(IDS[:3200].view(-1, T), IDS[1:3201].view(-1, T)), batch_size=B)},
    "get_batch": {"batches": draw},
    "a single batch in all": {"batches": [(X, Y)]},
    "a small set, over and over": {"batches": [(X, Y), rows(first=9)] * 5},
}


@pytest.mark.parametrize("given", HEALTHY.values(), ids=HEALTHY.keys())
def test_healthy_batches_pass(given: dict[str, Any]) -> None:
    results = lines(**given)
    assert failed(results) == {}
    assert [finding for result in results.values() for finding in result.findings] == []
    assert results["shape"].status == "passed"


def next_of_iter() -> Callable[[], Batch]:
    loader = DataLoader(TensorDataset(X, Y), batch_size=4)
    return lambda: tuple(next(iter(loader)))


def reseeded() -> Batch:
    torch.manual_seed(3)
    return draw()


def workers() -> Iterator[Batch]:
    for first in (5, 300, 900):
        yield rows(first=first)
        yield rows(first=first)


SOME_ROWS = Y.clone()
SOME_ROWS[[2, 5]] = X[[2, 5]]
OUT_X, OUT_Y = masked(X, (2, 3), V), masked(Y, (2, 3), V)
OTHER = rows(first=1500)[1]

BROKEN: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "no shift": ({"batch": (X, X.clone())}, "shift", "GG603", "same slice"),
    "no shift, without a model": ({"batch": (X, X.clone()), "model": None}, "shift", "GG603", "same slice"),
    "no shift for loss_fn": (
        {"batch": (X, X.clone()), "model": Logits, "loss_fn": plain_loss},
        "shift",
        "GG603",
        "same slice",
    ),
    "two": ({"batch": rows(2)}, "shift", "GG603", "Two places shift"),
    "the past": ({"batch": rows(-1)}, "shift", "GG603", "wrong way"),
    "five": ({"batch": rows(5)}, "shift", "GG603", "another offset"),
    "inside as well": ({"batch": (X, Y), "model": ShiftsInside}, "shift", "GG603", "model shifts the targets itself"),
    "in loss_fn as well": (
        {"batch": (X, Y), "model": Logits, "loss_fn": shifted_loss},
        "shift",
        "GG603",
        "model shifts the targets itself",
    ),
    "rows shuffled": ({"batch": (X, Y[[3, 1, 0, 2, 7, 4, 5, 6]])}, "shift", "GG603", "other rows"),
    "unrelated": ({"batch": (X, OTHER)}, "shift", "GG603", "come from elsewhere"),
    "some rows": ({"batch": (X, SOME_ROWS)}, "shift", "GG603", "Only some rows"),
    "time first": ({"batch": (X.T, Y.T)}, "shape", "GG600", "Time is the first"),
    "one short": ({"batch": (X, Y[:, :-1])}, "shape", "GG600", "one short"),
    "no batch dimension": ({"batch": (X[0], Y[0])}, "shape", "GG600", "batch dimension is missing"),
    "too long": ({"batch": (torch.cat([X, X], 1), torch.cat([Y, Y], 1))}, "shape", "GG600", "longer than block_size"),
    "one label per row": ({"batch": (X, Y[:, 0])}, "shape", "GG600", "one label for each row"),
    "one-hot": ({"batch": (X, F.one_hot(Y, V))}, "shape", "GG600", "one-hot"),
    "empty": ({"batch": (X[:0], Y[:0])}, "shape", "GG600", "no rows"),
    "float ids": ({"batch": (X.float(), Y)}, "dtype", "GG601", "floats"),
    "float targets": ({"batch": (X, Y.float())}, "dtype", "GG601", "floats"),
    "narrow ids": ({"batch": (X.to(torch.int16), Y)}, "dtype", "GG601", "to save space"),
    "narrow ids, no model": ({"batch": (X.to(torch.uint8), Y), "model": None}, "dtype", "GG601", "to save space"),
    "narrow targets": ({"batch": (X, Y.int())}, "dtype", "GG601", "to save space"),
    "a mask": ({"batch": (X, X > 0)}, "dtype", "GG601", "is a mask"),
    "an id too high": ({"batch": (OUT_X, Y)}, "range", "GG631", "special token"),
    "a target too high": ({"batch": (X, OUT_Y)}, "range", "GG604", "larger vocabulary"),
    "-100 in the inputs": ({"batch": (masked(X, X == 3), Y)}, "range", "GG631", "targets only"),
    "-1 for a loss that ignores -100": ({"batch": (X, masked(Y, X > 20, -1))}, "range", "GG604", "another number"),
    "many negative targets": ({"batch": (X, torch.where(Y > 20, Y - 32, Y))}, "range", "GG604", "too narrow"),
    "all ignored": ({"batch": (X, torch.full_like(Y, -100))}, "targets that count", "GG606", "marker"),
    "nearly all": ({"batch": (X, masked(Y, slice(1, None)))}, "targets that count", "GG606", "marker"),
    "the end is masked": ({"batch": padded(end=False)}, "end of sequence", "GG607", "one token early"),
    "padding is the end, all masked": (
        {"batch": padded(pad=EOS, end=False), "pad_id": EOS, "eos_id": EOS},
        "end of sequence",
        "GG607",
        "pad_token = eos_token",
    ),
    "padding counts": ({"batch": padded(masked=False)}, "padding", "GG608", "as they are"),
    "padding is the end and counts": (
        {"batch": padded(masked=False, pad=EOS), "pad_id": EOS, "eos_id": EOS},
        "padding",
        "GG608",
        "as they are",
    ),
    "next(iter(loader))": ({"batches": next_of_iter()}, "another batch each time", "GG605", "next(iter(loader))"),
    "seeded at each call": ({"batches": reseeded}, "another batch each time", "GG605", "next(iter(loader))"),
    "workers with one seed": ({"batches": lambda: workers()}, "another batch each time", "GG605", "workers"),
    "one start": (
        {"batches": lambda: tuple(part[:1].repeat(B, 1) for part in draw())},
        "another batch each time",
        "GG605",
        "One start",
    ),
}


@pytest.mark.parametrize(("given", "title", "code", "cause"), BROKEN.values(), ids=BROKEN.keys())
def test_planted_bugs_are_caught_where_they_are(given: dict[str, Any], title: str, code: str, cause: str) -> None:
    assert_caught(lines(**given), title, code, cause)


@pytest.mark.parametrize(("shift", "words"), [(0, "0 (100.0%"), (2, "2 (100.0%"), (-1, "-1 (100.0%")])
def test_the_shift_that_was_found_is_said(shift: int, words: str) -> None:
    result = lines((X, rows(shift)[1]))["shift"]
    assert result.measured.startswith(words)
    assert result.expected == "1"
    assert result.facts == {"shift": shift}
    assert lines((X, OTHER))["shift"].measured.startswith("none fits")


def test_rows_that_differ_are_named() -> None:
    assert "rows 2, 5 of 8" in lines((X, SOME_ROWS))["shift"].findings[0].seen


def test_a_batch_of_our_own_cut_proves_nothing() -> None:
    result = lines(data=IDS)["shift"]
    assert result.status == "skipped"
    assert "training data" in result.measured
    assert lines(data=IDS, batches=[rows(2)])["shift"].status == "failed"


def test_both_sides_are_shown_as_text() -> None:
    x, y = padded()
    shown = lines((x, y))["decoded"].measured
    words = "".join(TOKENS[index] for index in x[0, :6].tolist())
    assert shown.startswith(f"'{words}<pad>")
    assert shown.endswith("\N{MIDDLE DOT}'")
    assert "[" in lines((x, y), tokenizer=None)["decoded"].measured


def test_facts() -> None:
    report = check(MiniGPT(CONFIG), batch=(X, masked(Y, (slice(None), slice(0, 4)))), only=["batches"])
    wanted = {"batch_shape": [B, T], "shift": 1, "supervised_share": 0.75, "token_min": int(X.min()), "vocab_size": V}
    assert wanted.items() <= report.facts.items()
    assert report.facts["token_max"] == int(X.max())


def test_some_rows_without_a_target_are_a_warning() -> None:
    result = lines((X, masked(Y, 3)))["targets that count"]
    assert result.status == "passed"
    assert [(note.code, note.severity) for note in result.findings] == [("GG606", Severity.WARNING)]
    assert "1 of 8 rows have none" in result.findings[0].seen


def test_a_loss_that_cannot_be_seen_is_not_accused() -> None:
    result = lines((X, masked(Y, X > 20, -1)), model=Logits)["range"]
    assert result.status == "passed"
    assert [(note.code, note.severity) for note in result.findings] == [("GG604", Severity.WARNING)]
    assert "cannot be seen" in result.findings[0].seen


def test_defaults_of_a_config_are_no_padding_in_a_text_of_ones_own() -> None:
    class Configured(Logits):
        def __init__(self, config: MiniGPTConfig) -> None:
            super().__init__(config)
            self.config = type("Config", (), {**vars(config), "pad_token_id": 0, "eos_token_id": 2})()

    assert failed(lines((X, Y), model=Configured, tokenizer=None)) == {}
    x, y = padded(masked=False, pad=0)
    assert failed(lines((x, y), model=Configured, tokenizer=None)) == {"padding": "GG608"}


def test_devices() -> None:
    stage = BatchesStage()

    def devices(x: Tensor, y: Tensor, model: nn.Module | None) -> CheckResult:
        return next(stage.run(Subject(model=model, batch=(x, y))))

    model = MiniGPT(CONFIG)
    assert devices(X.to("meta"), Y.to("meta"), model).findings[0].causes[0].endswith("have no values.")
    assert devices(X, Y.to("meta"), None).status == "failed"
    assert len(list(stage.run(Subject(model=model, batch=(X, Y.to("meta")))))) == 1
    # The CPU stands for a loader, meta for the device that the model is on.
    moved = devices(X, Y, MiniGPT(CONFIG).to("meta"))
    assert moved.status == "passed"
    assert "to be moved" in moved.measured


def test_what_is_missing_is_said() -> None:
    assert "no batch" in str(BatchesStage().missing(Subject(tokenizer=adapt(TOKENS))))
    assert BatchesStage().missing(Subject(batch=(X, Y))) is None


def test_nothing_is_left_changed() -> None:
    model = IgnoresPadding(CONFIG)
    model.blocks.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x, y = padded(masked=False)
    state = torch.get_rng_state()
    lines((x, y), model=model, batches=draw)
    assert torch.equal(state, torch.get_rng_state())
    assert modes == {name: module.training for name, module in model.named_modules()}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(x, padded(masked=False)[0])


def test_find_shift_is_exact() -> None:
    for shift in (-2, -1, 0, 1, 2, 3, 8):
        found = find_shift(X, rows(shift)[1])
        assert (found.shift, found.share, found.positions) == (shift, 1.0, B * (T - abs(shift)))
    assert find_shift(X[:, :1], Y[:, :1]).positions == 0
    alternating = (torch.arange(B * T) % 2).view(B, T)
    assert find_shift(alternating, 1 - alternating).shift == 1
    assert find_shift(alternating, 1 - alternating, expected=-1).shift == -1
    assert find_shift(alternating, alternating).shift == 0
    coin = torch.randint(2, (64, T))
    assert find_shift(coin, torch.randint(2, (64, T))).shift is None


def test_which_losses_shift() -> None:
    cpu = torch.device("cpu")
    assert loss_shifts(shifted_loss, 7, cpu)
    assert not loss_shifts(plain_loss, 7, cpu)
    assert not loss_shifts(lambda logits, y: (logits.sum(-1) - y).abs().mean(), 7, cpu)
    assert not loss_shifts(lambda logits, y: F.cross_entropy(logits, y), 7, cpu)


def test_which_models_shift() -> None:
    x = torch.zeros(1, T, dtype=torch.int64)
    assert shifts_inside(ShiftsInside(CONFIG), x, V)
    for kind in (MiniGPT, IgnoresPadding, Smooths, IgnoresMinusOne, Logits):
        assert not shifts_inside(kind(CONFIG), x, V)
    assert not shifts_inside(MiniGPT(CONFIG), torch.zeros(1, T + 1, dtype=torch.int64), V)


def test_few_or_constant_ids_may_be_equal() -> None:
    assert same_batch((X, Y), (X.clone(), Y.clone()))
    assert not same_batch((X, Y), (X, X))
    assert not same_batch((X[:1, :4], Y[:1, :4]), (X[:1, :4], Y[:1, :4]))
    ones = torch.ones(B, T)
    assert not same_batch((ones, ones), (ones, ones))
