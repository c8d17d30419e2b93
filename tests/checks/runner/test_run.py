"""The runner: what is given is asked, what is not is said, an exception is a line, and nothing is left changed."""

from __future__ import annotations

import io
import math
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gpt_guard import catalogue
from gpt_guard.checks.runner import base as registry
from gpt_guard.checks.runner.base import Need, Stage, Subject
from gpt_guard.checks.runner.gather import complete, each_batch, pair, was_trained
from gpt_guard.checks.runner.report import FACTS, PreflightReport
from gpt_guard.checks.runner.run import check, preflight
from gpt_guard.errors import GuardError, GuardUsageError, PreflightError
from gpt_guard.records import CheckResult, Severity
from mini_gpt import MiniGPT, MiniGPTConfig

V, T = 11, 6
Lines = Callable[[Stage, Subject], Iterator[CheckResult]]
FINDING = catalogue.finding("GG616", "three ids")


def stage(lines: Lines, name: str = "files", needs: str | None = None, after: tuple[str, ...] = ()) -> Stage:
    class Scripted(Stage):
        number = 2
        title = "Scripted"

        def run(self, subject: Subject) -> Iterator[CheckResult]:
            return lines(self, subject)

    Scripted.name, Scripted.after = name, after
    Scripted.needs = (Need(lambda subject: None, needs),) if needs else ()
    return Scripted()


def gpt(dropout: float = 0.0) -> MiniGPT:
    return MiniGPT(MiniGPTConfig(V, block_size=T, embedding_dim=8, num_heads=2, dropout=dropout))


def ticks(this: Stage, subject: Subject) -> Iterator[CheckResult]:
    yield this.line("one", 1, 1, initial_loss=2.5)
    yield this.line("two", 2, 2, token_max=9)


def cross(this: Stage, subject: Subject) -> Iterator[CheckResult]:
    yield this.line("three", 3, 4, FINDING, grad_norm=math.nan)


def test_facts_of_all_lines_are_in_the_report() -> None:
    subject = Subject(vocab_size=V)
    subject.facts["batch_shape"] = [2, 3]
    report = preflight(subject, [stage(ticks), stage(cross)])
    facts = report.facts
    assert list(facts)[: len(FACTS)] == list(FACTS)
    assert (facts["initial_loss"], facts["token_max"], facts["batch_shape"]) == (2.5, 9, [2, 3])
    assert facts["vocab_size"] == V
    assert facts["overfit_loss"] is None
    assert [result.title for result in report.failed] == ["three"]
    assert report.findings == (FINDING,)
    assert report.counts == {"GG616": 1}
    assert not report.passed


def test_what_a_stage_lacks_is_a_skipped_line_and_no_failure() -> None:
    report = preflight(Subject(), [stage(cross, needs="no tokenizer was given")])
    assert [(line.status, line.measured) for line in report.checks] == [("skipped", "no tokenizer was given")]
    assert report.passed


def test_a_stage_after_a_failed_one_is_skipped_but_not_after_a_skipped_one() -> None:
    failed = preflight(Subject(), [stage(cross, "shapes"), stage(ticks, "gradients", after=("shapes",))])
    assert failed.checks[-1].status == "skipped"
    assert "shapes" in failed.checks[-1].measured
    skipped = preflight(Subject(), [stage(cross, "shapes", "nothing"), stage(ticks, "gradients", after=("shapes",))])
    assert skipped.checks[-1].status == "passed"


def test_an_exception_in_the_users_code_is_a_line_with_its_place() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ones(2, 3) @ torch.ones(2, 3)  # the line to name

    def ask(this: Stage, subject: Subject) -> Iterator[CheckResult]:
        yield this.line("before", 1)
        assert subject.model is not None
        subject.model(torch.zeros(1))

    report = preflight(Subject(model=Broken()), [stage(ask), stage(ticks, "shapes")])
    assert [line.status for line in report.checks] == ["passed", "failed", "passed", "passed"]
    (finding,) = report.findings
    assert finding.code == "GG610"
    assert finding.where is not None
    assert finding.where.file == __file__
    assert "the line to name" in finding.where.text
    assert "RuntimeError" in finding.seen
    assert "shape does not fit" in finding.causes[0]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("row has 9 positions"), "refuses this input on purpose"),
        (RuntimeError("CUDA out of memory. Tried to allocate"), "memory of the device is full"),
        (RuntimeError("Expected all tensors to be on the same device, but found cuda:0 and cpu"), "another device"),
        (IndexError("index out of range in self"), "outside of its embedding table"),
        (TypeError("forward() missing 1 required positional argument: 'mask'"), "takes other arguments"),
        (RuntimeError("element 0 of tensors does not require grad and does not have a grad_fn"), "no graph"),
    ],
)
def test_the_first_cause_fits_the_exception(error: Exception, words: str) -> None:
    def ask(this: Stage, subject: Subject) -> Iterator[CheckResult]:
        raise error
        yield

    (finding,) = preflight(Subject(), [stage(ask)]).findings
    assert words in finding.causes[0]


def test_a_need_that_raises_is_a_line_too() -> None:
    broken = stage(ticks)
    type(broken).needs = (Need(lambda subject: 1 / 0, "nothing"),)
    assert [line.status for line in preflight(Subject(), [broken]).checks] == ["failed"]


def test_a_need_gives_what_is_there_or_says_why_not() -> None:
    need = Need[int](lambda subject: subject.vocab_size, lambda subject: f"no size for {subject.seed}")
    assert (need(Subject(vocab_size=V)), need.missing(Subject(vocab_size=V))) == (V, None)
    assert need.missing(Subject(seed=7)) == "no size for 7"
    with pytest.raises(ValueError, match="no size for 7"):
        need(Subject(seed=7))


def test_an_error_makes_a_cross_and_what_is_milder_a_note() -> None:
    line, milder = stage(ticks).line, FINDING.model_copy(update={"severity": Severity.WARNING})
    assert [line("title", 1, 2, found).status for found in (None, [], milder, FINDING, [milder, None, FINDING])] == [
        "passed",
        "passed",
        "passed",
        "failed",
        "failed",
    ]
    assert line("title", 1, 2, [milder, None, FINDING]).findings == (milder, FINDING)
    assert line("title", 1, 2, milder, fails=Severity.WARNING).status == "failed"


def changing(error: BaseException | None) -> Lines:
    def ask(this: Stage, subject: Subject) -> Iterator[CheckResult]:
        model, optimizer = subject.model, subject.optimizer
        assert model is not None
        assert optimizer is not None
        assert subject.batch is not None
        model.train()
        model(*subject.batch)[1].backward()
        optimizer.step()
        subject.batch[0].zero_()
        subject.data["train"].zero_()
        random.random()
        torch.rand(1)
        np.random.rand()
        yield this.line("half-way", 1)
        if error is not None:
            raise error

    return ask


@pytest.mark.parametrize("error", [None, RuntimeError("x"), KeyboardInterrupt()])
def test_all_state_is_put_back(error: BaseException | None) -> None:
    model, x = gpt(0.5).eval(), torch.randint(V, (2, T))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    data = torch.randint(V, (50,))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    given, ids = x.clone(), data.clone()
    drawn = torch.get_rng_state(), random.getstate(), pickle.dumps(np.random.get_state())
    subject = Subject(model=model, optimizer=optimizer, batch=(x, x.clone()), data={"train": data})
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            preflight(subject, [stage(changing(error))])
    else:
        preflight(subject, [stage(changing(error))])
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not optimizer.state
    assert not model.training
    assert torch.equal(x, given)
    assert torch.equal(data, ids)
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert random.getstate() == drawn[1]
    assert pickle.dumps(np.random.get_state()) == drawn[2]


def test_each_stage_starts_from_the_seed() -> None:
    drawn: list[float] = []

    def draw(this: Stage, subject: Subject) -> Iterator[CheckResult]:
        drawn.append(torch.rand(()).item())
        yield this.line("drawn", 1)

    preflight(Subject(seed=3), [stage(draw), stage(draw)])
    preflight(Subject(seed=4), [stage(draw)])
    assert drawn[0] == drawn[1] != drawn[2]


def test_an_exception_of_whoever_is_told_passes_through() -> None:
    def tell(result: CheckResult) -> None:
        raise OSError("the pipe is closed")

    with pytest.raises(OSError, match="pipe"):
        preflight(Subject(), [stage(ticks)], tell)


def test_sizes_and_a_fresh_model_come_from_the_config() -> None:
    subject = Subject(model=gpt(), data={"train": torch.randint(V, (100,), dtype=torch.uint8)})
    complete(subject)
    assert (subject.vocab_size, subject.block_size) == (V, T)
    assert subject.make_model is not None
    assert isinstance(subject.make_model(), MiniGPT)
    assert subject.batch is not None
    x, y = subject.batch
    assert x.shape == (8, T)
    assert x.dtype == torch.int64
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert set(subject.sources) == {"vocab_size", "block_size", "make_model", "batch"}


def test_sizes_come_from_the_tables_where_there_is_no_config() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.wpe = nn.Embedding(9, 4), nn.Embedding(13, 4)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.wte(x) @ self.wte.weight.T
            return logits

    subject = Subject(model=Bare())
    complete(subject)
    assert (subject.vocab_size, subject.block_size) == (9, 13)
    assert subject.make_model is None
    assert subject.batch is None


def test_a_batch_gives_a_row_length_where_nothing_else_does() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    subject = Subject(model=model, batch=pair((torch.zeros(2, 5).long(), torch.zeros(2, 5).long())))
    complete(subject)
    assert (subject.vocab_size, subject.block_size) == (9, 5)
    assert "rows" in subject.sources["block_size"]


def test_data_for_a_model_that_shifts_inside_is_not_shifted_twice() -> None:
    class Shifting(MiniGPT):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
            logits, _ = super().forward(input_ids)
            if labels is None:
                return logits
            return logits, nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    subject = Subject(model=Shifting(MiniGPTConfig(V, T, 8, 2)), data={"train": torch.randint(V, (100,))})
    complete(subject)
    assert subject.shifts_inside
    assert subject.batch is not None
    assert torch.equal(*subject.batch)


def test_a_model_that_cannot_be_called_is_left_to_the_stages() -> None:
    model = nn.Linear(3, 3)
    subject = Subject(model=model, vocab_size=4, batch=pair((torch.zeros(2, 5).long(), torch.zeros(2, 5).long())))
    complete(subject)
    assert not subject.shifts_inside


def ignoring(kind: type[MiniGPT] = MiniGPT) -> MiniGPT:
    class IgnoresPadding(kind):  # type: ignore[valid-type, misc] # a class that is made for the test
        def forward(self, token_ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
            logits, _ = super().forward(token_ids)
            if targets is None:
                return logits, None
            return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0)

    return IgnoresPadding(MiniGPTConfig(V, T, 8, 2))


def test_padding_that_the_loss_ignores_is_no_shift_inside() -> None:
    x = torch.zeros(4, T, dtype=torch.int64)
    x[:, :3] = torch.randint(1, V, (4, 3))
    subject = Subject(model=ignoring(), batch=(x, x.roll(-1, 1)))
    complete(subject)
    assert not subject.shifts_inside


def unusable(how: str) -> tuple[Tensor, Tensor]:
    x = torch.randint(V, (2, T))
    y = x.roll(-1, 1)
    if how == "no values":
        return x.to("meta"), y.to("meta")
    if how == "no values in y":
        return x, y.to("meta")
    if how == "x out of range":
        return x + V, y
    return (x.float(), y) if how == "float" else (x, y + V)


UNUSABLE = {
    "no values": ("device", "GG602"),
    "no values in y": ("device", "GG602"),
    "x out of range": ("range", "GG631"),
    "y out of range": ("range", "GG604"),
    "float": ("dtype", "GG601"),
}


@pytest.mark.parametrize("how", UNUSABLE)
def test_a_batch_that_no_model_takes_is_said_once(how: str) -> None:
    model, asked = gpt(), ("batches", "shapes", "initial-loss", "gradients")
    seen: list[Tensor] = []
    model.token_embedding.register_forward_pre_hook(lambda module, given: seen.extend(given))
    title, code = UNUSABLE[how]
    report = check(model, batch=unusable(how), only=asked)
    assert title in [line.title for line in report.failed]
    assert {line.stage for line in report.failed} == {"batches"}
    assert code in report.counts
    skipped = [line.measured for line in report.checks if line.stage in ("initial-loss", "gradients")]
    assert len(skipped) == 2
    assert all("the given one cannot be used" in why for why in skipped)
    # The model is still asked, with ids that it has: those of the batch would end all work on a CUDA device.
    assert [line.status for line in report.checks if line.stage == "shapes"].count("passed") >= 5
    asked_with = [ids for ids in seen if type(ids) is Tensor and not ids.is_floating_point()]
    assert asked_with
    assert all(0 <= int(ids.min()) <= int(ids.max()) < V for ids in asked_with)


def test_it_is_said_also_where_its_stage_is_left_out() -> None:
    report = check(gpt(), batch=unusable("x out of range"), only=("shapes", "gradients"))
    assert [(line.stage, line.title) for line in report.failed] == [("batches", "range")]
    healthy = check(gpt(), batch=(torch.zeros(2, T).long(), torch.zeros(2, T).long()), only=("shapes",))
    assert {line.stage for line in healthy.checks} == {"shapes"}


def test_data_without_values_is_a_line() -> None:
    report = check(gpt(), data=torch.randint(V, (100,)).to("meta"), only=("token-ids", "batches"))
    assert {line.stage: line.status for line in report.checks} == {"token-ids": "failed", "batches": "skipped"}


def test_batches_of_any_make() -> None:
    x, y = torch.zeros(4, 3).long(), torch.ones(4, 3).long()
    loader = DataLoader(TensorDataset(x, y), batch_size=2)
    for given, count in ((loader, 2), ([(x, y)], 1), (lambda: iter([(x, y)] * 3), 3), (lambda: loader, 2)):
        start = each_batch(given)
        assert len(list(start())) == len(list(start())) == count
    endless = each_batch(lambda: (x, y))()
    assert [torch.equal(next(endless)[1], y) for _ in range(3)] == [True] * 3
    assert torch.equal(pair({"input_ids": x, "attention_mask": y})[1], x)
    assert torch.equal(pair({"input_ids": x, "labels": y})[1], y)
    with pytest.raises(GuardUsageError, match="only once"):
        each_batch(iter([(x, y)]))
    for wrong in ((x,), 3, {"a": x}, (x, "y")):
        with pytest.raises(GuardUsageError, match=r"\[B, T\]"):
            pair(wrong)


ONLY = ("environment", "files")


def test_the_function_takes_objects_and_leaves_files_out() -> None:
    model = gpt()
    report = check(model, batch=(torch.zeros(2, T).long(), torch.zeros(2, T).long()), only=ONLY)
    assert report.passed
    assert report.model == "MiniGPT"
    assert report.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert report.environment["seed"] == "42"
    assert {line.stage: line.status for line in report.checks}["files"] == "skipped"


def test_paths_are_read_and_what_cannot_be_is_a_failed_line(tmp_path: Path) -> None:
    torch.save(torch.randint(V, (100,)), tmp_path / "train.pt")
    (tmp_path / "tokenizer.json").write_text('{"chars": ["a", "b"]}')
    (tmp_path / "model.pt").write_bytes(b"")
    report = check(
        data=tmp_path / "train.pt",
        tokenizer=str(tmp_path / "tokenizer.json"),
        checkpoint=tmp_path / "model.pt",
        only=ONLY,
    )
    assert {line.title: line.status for line in report.checks if line.stage == "files"} == {
        "train": "passed",
        "tokenizer": "passed",
        "checkpoint": "failed",
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "nothing to check"),
        ({"model": lambda: None}, "nn.Module"),
        ({"model": nn.LazyLinear(2)}, "lazy"),
        ({"data": {"train": object()}}, "token ids"),
        ({"data": torch.ones(3), "only": ["nonsense"]}, "14 generation"),
        ({"data": torch.ones(3), "skip": [15]}, "3 tokenizer"),
    ],
)
def test_arguments_that_cannot_be_used(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(GuardUsageError, match=words):
        check(**arguments)


def test_trained_is_found_out() -> None:
    seen: dict[str, bool] = {}
    model, x = gpt(), torch.randint(V, (2, T))
    state = {"model": {name: value.clone() for name, value in model.state_dict().items()}, "step": 3}
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    seen["fresh"] = was_trained(model, optimizer, None)
    seen["of the checkpoint"] = was_trained(model, None, state)
    seen["not of the checkpoint"] = was_trained(gpt(), None, state)
    model(x, x)[1].backward()
    optimizer.step()
    seen["stepped"] = was_trained(model, optimizer, None)
    assert seen == {"fresh": False, "of the checkpoint": True, "not of the checkpoint": False, "stepped": True}


def test_stages_are_chosen_by_name_and_number_in_their_order() -> None:
    there = registry.NAMES
    assert [each.name for each in registry.select()] == list(there)
    assert [each.number for each in registry.select()] == list(range(1, 15))
    assert [each.name for each in registry.select(["2", "Environment"])] == ["environment", "files"]
    assert [each.name for each in registry.select(skip=[1])] == list(there[1:])
    for each in registry.select():
        assert registry.NAMES[each.number - 1] == each.name
        assert each.title


def both() -> PreflightReport:
    return preflight(Subject(), [stage(ticks, "environment"), stage(cross)])


def test_a_saved_report_comes_back_as_it_was(tmp_path: Path) -> None:
    report = both()
    assert report.save(tmp_path / "new" / "report.json") == tmp_path / "new" / "report.json"
    again = PreflightReport.load(tmp_path / "new" / "report.json")
    assert again.checks[0] == report.checks[0]
    assert again.findings == report.findings
    assert str(again.facts["grad_norm"]).lower() == "nan"
    assert (again.passed, len(again.failed)) == (False, 1)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema_version": "other/1"}', '{"checks": 3}'])
def test_what_is_no_report_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "report.json").write_text(content)
    with pytest.raises(GuardUsageError, match=r"report\.json"):
        PreflightReport.load(tmp_path / "report.json")


def test_failures_can_be_raised() -> None:
    preflight(Subject(), [stage(ticks)]).raise_for_failures()
    with pytest.raises(PreflightError, match="1 check failed") as caught:
        both().raise_for_failures()
    assert isinstance(caught.value, GuardError)
    assert caught.value.finding == FINDING
    text = str(caught.value)
    assert "three: 3 | expected 4" in text
    assert "GG616" in text
    assert str(pickle.loads(pickle.dumps(caught.value))) == text


def test_every_rendering_shows_the_same_lines() -> None:
    report = both()
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(report)
    for text in (str(report), console.export_text(), report._repr_html_()):
        for part in ("Environment", "one", "three", "✗", "GG616", "2 passed, 1 failed"):
            assert part in text
    assert max(map(len, str(report).split("\n"))) <= 100
    assert "three: 3 | expected 4" in str(report)


def test_text_from_files_is_escaped_everywhere() -> None:
    def ask(this: Stage, subject: Subject) -> Iterator[CheckResult]:
        yield this.line("sample", "<b>\x1b[31m", "plain")

    report = preflight(Subject(), [stage(ask)])
    assert "\x1b" not in str(report)
    assert "<b>" not in report._repr_html_()


def noted(this: Stage, subject: Subject) -> Iterator[CheckResult]:
    yield this.line("four", 4, 4, catalogue.finding("GG613", "five threads"))


def test_a_line_names_its_findings_and_failures_are_told_first() -> None:
    report = preflight(Subject(), [stage(noted, "environment"), stage(cross)])
    text = str(report)
    assert "four: 4 | expected 4 | see GG613" in text
    assert "three: 3 | expected 4 | see GG616" in text
    assert "1 passed, 1 failed, 1 note" in text
    assert text.index("\nGG616") < text.index("\nGG613")
