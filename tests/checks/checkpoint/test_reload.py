"""Stage 13, save and load: healthy models come back bit for bit; what would be lost is found and named."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpt_guard.checks.checkpoint.reload import unsaved_tensors
from gpt_guard.checks.runner.run import check

from ..variants import HEALTHY, asked
from .mini_project import Base, C, Rope, ask, ask_about, line, mini

# --- healthy models


class Tied(Base):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.tokens.weight


class Normed(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(C)
        self.calls = 0

    def middle(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return out


class Experts(Base):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(C, 3), nn.ModuleList(nn.Linear(C, C) for _ in range(3))

    def middle(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(dim=-1)
        mixed = [weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts)]
        return x + torch.stack(mixed).sum(0)


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
    phases: Tensor

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
        self.shift: Callable[[Tensor], Tensor] = lambda x: x + offset

    def middle(self, x: Tensor) -> Tensor:
        return self.shift(x)


@pytest.mark.parametrize(
    ("kind", "name", "cause"),
    [
        (InAList, "blocks (a list of 2 nn.Linear)", "Layers are in a Python list"),
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
    hidden = [tensor for tensors in unsaved_tensors(model).values() for tensor in tensors]
    before = [tensor.clone() for tensor in hidden]
    (finding,) = line(ask(model), "save and load").findings
    assert finding.code == "GG720"
    assert hidden
    assert all(map(torch.equal, hidden, before))


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


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_variants_come_back_bit_for_bit(name: str) -> None:
    build, options = HEALTHY[name]
    report = check(build(), only=["checkpoint"], make_model=build, **asked(options))
    assert report.failed == ()
    assert line(report, "save and load").status == "passed"
