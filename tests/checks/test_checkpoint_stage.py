"""Stage 13: healthy models come back bit for bit; what is lost, changed or of another model is found and named."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpt_guard.checkpoint import save_checkpoint
from gpt_guard.checks.base import Subject
from gpt_guard.checks.checkpoint import CheckpointStage
from gpt_guard.checks.load import read_checkpoint
from gpt_guard.checks.report import PreflightReport
from gpt_guard.checks.run import check, preflight
from gpt_guard.checks.tokenizers import adapt
from gpt_guard.records import CheckResult
from mini_gpt import MiniGPT, MiniGPTConfig

V, T, C = 11, 6, 8
CONFIG = MiniGPTConfig(V, block_size=T, embedding_dim=C, num_heads=2, dropout=0.1)


def mini(**changes: Any) -> MiniGPT:
    return MiniGPT(replace(CONFIG, **changes))


def batch() -> tuple[Tensor, Tensor]:
    rows = torch.randint(V, (3, T + 1))
    return rows[:, :-1], rows[:, 1:]


def ask(model: nn.Module | None, **given: Any) -> PreflightReport:
    return check(model, only=["checkpoint"], **{"batch": batch(), **given})


def ask_about(build: Callable[[], nn.Module], **given: Any) -> PreflightReport:
    return ask(build(), make_model=build, **given)


def line(report: PreflightReport, title: str) -> CheckResult:
    return next(result for result in report.checks if result.title == title)


class Base(nn.Module):
    """Embedding, something in the middle that a subclass adds, head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(V, C), nn.Linear(C, V)

    def middle(self, x: Tensor) -> Tensor:
        return x

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.middle(self.tokens(ids)))
        return logits


# --- healthy models


class Tied(Base):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.tokens.weight


class Rope(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.outer(torch.arange(T), torch.arange(C)).cos(), persistent=False)
        self.register_buffer("mask", torch.full((T, T), -torch.inf).triu(1))

    def middle(self, x: Tensor) -> Tensor:
        return x * self.angles[: x.size(1)]


class Normed(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(C)
        self.calls = 0

    def middle(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Experts(Base):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(C, 3), nn.ModuleList(nn.Linear(C, C) for _ in range(3))

    def middle(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(dim=-1)
        return x + sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class Lora(Base):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(C, C).requires_grad_(False)
        self.lora_a, self.lora_b = nn.Parameter(torch.randn(C, 2)), nn.Parameter(torch.zeros(2, C))

    def middle(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + x @ self.lora_a @ self.lora_b
        return out


class Counted(Base):
    """Keeps a number in extra state, as modules are meant to."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def get_extra_state(self) -> dict[str, float]:
        return {"scale": self.scale}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]

    def middle(self, x: Tensor) -> Tensor:
        return x * self.scale


def half() -> nn.Module:
    return mini().to(torch.bfloat16)


def scaled() -> Counted:
    model = Counted()
    model.scale = 3.0
    return model


@pytest.mark.parametrize("build", [mini, Tied, Rope, Normed, Experts, Lora, half, scaled, lambda: Rope().bfloat16()])
def test_healthy_models_come_back_bit_for_bit(build: Callable[[], nn.Module]) -> None:
    report = ask_about(build)
    result = line(report, "save and load")
    assert (result.status, result.findings) == ("passed", ())
    assert result.measured.endswith("equal logits")


def test_a_cast_model_is_compared_with_one_that_is_cast_alike() -> None:
    report = ask(Rope().bfloat16(), make_model=Rope)
    assert line(report, "save and load").status == "passed"


def test_a_teacher_that_the_forward_does_not_use_is_not_missed() -> None:
    class Student(Base):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = [Base()]

    assert line(ask_about(Student), "save and load").status == "passed"
    without_factory = line(ask(Student()), "save and load")
    assert without_factory.status == "skipped"


def test_a_factory_that_gives_the_same_object_is_no_factory() -> None:
    model = Base()
    assert line(ask(model, make_model=lambda: model), "save and load").status == "skipped"


# --- what is lost


class InAList(Base):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = [nn.Linear(C, C), nn.Linear(C, C)]

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class PlainTensor(Base):
    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.randn(C)

    def middle(self, x: Tensor) -> Tensor:
        return x * self.gain


class RandomBuffer(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("phases", torch.randn(C), persistent=False)

    def middle(self, x: Tensor) -> Tensor:
        return x + self.phases


class Window(Base):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def middle(self, x: Tensor) -> Tensor:
        return x * self.scale


def changed_scale() -> Window:
    model = Window()
    model.scale = 0.5
    return model


class Forgetful(Base):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        return OrderedDict((name, torch.zeros_like(v) if name == "head.bias" else v) for name, v in state.items())


class Closure(Base):
    def __init__(self) -> None:
        super().__init__()
        offset = torch.randn(C)
        self.shift = lambda x: x + offset

    def middle(self, x: Tensor) -> Tensor:
        return self.shift(x)


@pytest.mark.parametrize(
    ("kind", "name", "cause"),
    [
        (InAList, "blocks (a list of 2 Linear)", "Layers are in a Python list"),
        (PlainTensor, "gain (a plain tensor)", "A tensor is a plain attribute"),
        (RandomBuffer, "phases (a buffer [8] with persistent=False)", "A buffer has persistent=False"),
    ],
)
def test_what_is_not_saved_is_found_and_named(kind: type[Base], name: str, cause: str) -> None:
    result = line(ask_about(kind), "save and load")
    assert result.status == "failed"
    (finding,) = result.findings
    assert finding.code == "GG720"
    assert name in finding.seen
    assert finding.causes[0].startswith(cause)


@pytest.mark.parametrize("kind", [InAList, PlainTensor])
def test_without_a_way_to_build_the_model_unsaved_tensors_are_found_all_the_same(kind: type[Base]) -> None:
    model = kind()
    before = [value.clone() for value in (model.blocks[0].weight,)] if isinstance(model, InAList) else []
    (finding,) = line(ask(model), "save and load").findings
    assert finding.code == "GG720"
    assert all(torch.equal(old, model.blocks[0].weight) for old in before)


def test_a_setting_that_is_not_in_the_config_is_found() -> None:
    (finding,) = line(ask(changed_scale(), make_model=Window), "save and load").findings
    assert "scale (0.5, after the reload 1.0)" in finding.seen
    assert finding.causes[0].startswith("A setting was changed")


def test_layers_in_a_list_inside_the_example_are_found() -> None:
    model = mini()
    blocks = list(model.blocks)
    del model.blocks
    object.__setattr__(model, "blocks", blocks)

    def build() -> nn.Module:
        fresh = mini()
        listed = list(fresh.blocks)
        del fresh.blocks
        object.__setattr__(fresh, "blocks", listed)
        return fresh

    (finding,) = line(ask(model, make_model=build), "save and load").findings
    assert "blocks (a list of 2 Block)" in finding.seen


def test_a_state_dict_that_changes_values_is_found() -> None:
    (finding,) = line(ask_about(Forgetful), "save and load").findings
    assert finding.parameter == "head.bias"
    assert finding.causes[0].startswith("state_dict or load_state_dict")


def test_what_lies_outside_of_the_modules_is_said_to() -> None:
    (finding,) = line(ask_about(Closure), "save and load").findings
    assert finding.causes[0].startswith("The forward depends on something outside")


def test_extra_state_that_is_no_plain_data_is_found() -> None:
    class Strange(Base):
        def get_extra_state(self) -> Any:
            return SimpleNamespace(scale=1.0)

        def set_extra_state(self, state: Any) -> None:
            del state

    (finding,) = line(ask_about(Strange), "save and load").findings
    assert finding.causes[0].startswith("The state holds something other")


def test_a_model_that_disagrees_with_itself_is_left_to_another_stage() -> None:
    class Noisy(Base):
        generator = torch.Generator()

        def middle(self, x: Tensor) -> Tensor:
            return x + torch.randn(x.shape, generator=self.generator)

    assert line(ask_about(Noisy), "save and load").status == "skipped"


# --- a file against the model


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


# --- optimizer state


class Hoarder(torch.optim.SGD):
    """Keeps its momentum where state_dict does not look."""

    def state_dict(self) -> Any:
        state = super().state_dict()
        return {**state, "state": {}}


class Rounding(torch.optim.AdamW):
    def load_state_dict(self, state: Any) -> None:
        for entry in state["state"].values():
            entry["exp_avg"] = entry["exp_avg"].bfloat16()
        super().load_state_dict(state)


def stepped(kind: Callable[..., torch.optim.Optimizer], **settings: Any) -> tuple[MiniGPT, torch.optim.Optimizer]:
    model = mini()
    optimizer = kind(model.parameters(), lr=1e-2, **settings)
    model(*batch())[1].backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {"centered": True}),
    ],
)
def test_torchs_optimizers_come_back_equal(kind: Any, settings: dict[str, Any]) -> None:
    model, optimizer = stepped(kind, **settings)
    result = line(ask(model, optimizer=optimizer), "optimizer save and load")
    assert (result.status, result.findings) == ("passed", ())


def test_an_optimizer_without_state_makes_a_step_first() -> None:
    model = mini()
    optimizer = torch.optim.AdamW(model.parameters())
    assert line(ask(model, optimizer=optimizer), "optimizer save and load").status == "passed"
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    assert line(ask(model, optimizer=plain), "optimizer save and load").status == "skipped"


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [(Hoarder, {"momentum": 0.9}, "is gone"), (Rounding, {}, "has other values")],
)
def test_optimizer_state_that_is_lost_or_rounded_is_found(kind: Any, settings: dict[str, Any], words: str) -> None:
    model, optimizer = stepped(kind, **settings)
    (finding,) = line(ask(model, optimizer=optimizer), "optimizer save and load").findings
    assert finding.code == "GG721"
    assert words in finding.seen


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
