from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gpt_guard.callbacks.updates.guard import ParamDeltaProbe
from gpt_guard.callbacks.updates.ownership import only_scales
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding, Severity


class Net(nn.Module):
    """Two layers that are registered and, between them, whatever the test hides."""

    def __init__(self, hidden: Any) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(4, 8), nn.Linear(8, 1)
        self.hidden = hidden

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.hidden.values() if isinstance(self.hidden, dict) else self.hidden:
            x = layer(x).tanh()
        y: Tensor = self.out(x)
        return y


def regress(model: nn.Module, optimizer: torch.optim.Optimizer | None, steps: int) -> None:
    for _ in range(steps):
        x = torch.randn(16, 4)
        loss = functional.mse_loss(model(x), x.sum(1, keepdim=True))
        if optimizer is not None:
            optimizer.zero_grad()
        loss.backward()
        if optimizer is not None:
            optimizer.step()


def watched(model: nn.Module, optimizer: Any, loop: Callable[[], None], **options: Any) -> list[Finding]:
    guardian = Guardian(model, optimizer, guards=[ParamDeltaProbe(**options)], sinks=[])
    with guardian:
        loop()
    return list(guardian.findings)


def sgd(parameters: Any, lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr)


# GG303: not registered.


@pytest.mark.parametrize("container", [list, tuple, set, lambda layers: dict(enumerate(layers))])
def test_layers_in_a_plain_container_are_named(container: Any) -> None:
    model = Net(container([nn.Linear(8, 8) for _ in range(2)]))
    optimizer = sgd(model.parameters())
    (found,) = watched(model, optimizer, lambda: regress(model, optimizer, 5))
    assert found.code == "GG303"
    assert found.step == 0
    assert found.severity is Severity.ERROR
    assert found.parameter == "hidden"
    assert found.evidence["tensors"] == 4
    assert "8x8" in found.seen
    assert "of 2 nn.Linear" in found.seen
    assert "ModuleList" in found.fix


def test_the_path_names_the_module_that_hides_it() -> None:
    model = nn.Sequential(Net(nn.ModuleList()), nn.Linear(1, 4), Net([nn.Linear(8, 8)]))
    optimizer = sgd(model.parameters())
    (found,) = watched(model, optimizer, lambda: regress(model, optimizer, 5))
    assert (found.module, found.module_class, found.parameter) == ("2", "Net", "2.hidden")


def test_a_plain_tensor_is_named_as_one() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 1)
            self.scale = torch.ones(1, requires_grad=True)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x) * self.scale
            return y

    model = Scaled()
    optimizer = sgd(model.parameters())
    (found,) = watched(model, optimizer, lambda: regress(model, optimizer, 3))
    assert (found.code, found.parameter) == ("GG303", "scale")
    assert "nn.Parameter" in found.causes[0]
    # The same tensor in the optimizer does train.
    optimizer = sgd([*model.parameters(), model.scale])
    found = watched(model, optimizer, lambda: regress(model, optimizer, 5))[0]
    assert (found.code, found.severity) == ("GG307", Severity.INFO)


def test_registered_layers_are_quiet_also_when_listed_twice() -> None:
    model = Net(nn.ModuleList(nn.Linear(8, 8) for _ in range(2)))
    model.all_layers = [model.inp, *model.hidden]  # type: ignore[assignment]  # a plain list on purpose
    optimizer = sgd(model.parameters())
    assert watched(model, optimizer, lambda: regress(model, optimizer, 5)) == []


def test_inputs_that_require_gradients_are_quiet() -> None:
    model = nn.Linear(4, 1)
    optimizer = sgd(model.parameters())

    def loop() -> None:
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(8, 4, requires_grad=True)).pow(2).mean().backward()
            optimizer.step()

    assert watched(model, optimizer, loop) == []


def test_a_frozen_model_in_a_list_is_quiet() -> None:
    model = Net([nn.Linear(8, 8).requires_grad_(False)])
    optimizer = sgd(model.parameters())
    assert watched(model, optimizer, lambda: regress(model, optimizer, 5)) == []


def test_another_model_in_a_list_with_an_optimizer_of_its_own_is_quiet() -> None:
    other = nn.Linear(8, 8)
    model = Net([other])
    optimizer, own = sgd(model.parameters()), sgd(other.parameters())

    def loop() -> None:
        for _ in range(5):
            regress(model, optimizer, 1)
            own.step()
            own.zero_grad()

    assert watched(model, optimizer, loop) == []


# GG302: in no optimizer.


def test_a_part_that_no_optimizer_holds_is_named() -> None:
    model = Net(nn.ModuleList([nn.Linear(8, 8)]))
    optimizer = sgd([*model.inp.parameters(), *model.out.parameters()])
    (found,) = watched(model, optimizer, lambda: regress(model, optimizer, 5))
    assert found.code == "GG302"
    assert found.step == 0
    assert found.evidence["parameters"] == ["hidden.0.weight", "hidden.0.bias"]
    assert found.parameter == "hidden.0.weight"


def test_a_single_step_is_enough() -> None:
    model = Net(nn.ModuleList([nn.Linear(8, 8)]))
    optimizer = sgd(model.inp.parameters())
    (found,) = watched(model, optimizer, lambda: regress(model, optimizer, 1))
    assert found.code == "GG302"


def test_a_head_replaced_after_the_optimizer_was_built() -> None:
    model = Net(nn.ModuleList())
    optimizer = sgd(model.parameters())
    model.out = nn.Linear(8, 1)
    (first, second) = watched(model, optimizer, lambda: regress(model, optimizer, 5))
    assert first.code == "GG302"
    assert first.evidence["parameters"] == ["out.weight", "out.bias"]
    assert "added or replaced" in first.causes[0]
    # The other half of the same trouble is recorded, not said a second time.
    assert (second.code, second.severity) == ("GG307", Severity.INFO)


def test_a_head_replaced_during_the_run() -> None:
    model = Net(nn.ModuleList())
    optimizer = sgd(model.parameters())

    def loop() -> None:
        regress(model, optimizer, 10)
        model.out = nn.Linear(8, 1)
        regress(model, optimizer, 60)

    found = [each for each in watched(model, optimizer, loop) if each.code == "GG302"]
    assert [each.evidence["replaced"] for each in found] == [["out.weight", "out.bias"]]


def test_an_unfrozen_part_that_the_optimizer_was_built_without() -> None:
    model = Net(nn.ModuleList())
    model.inp.requires_grad_(False)
    optimizer = sgd([p for p in model.parameters() if p.requires_grad])

    def loop() -> None:
        regress(model, optimizer, 20)
        model.inp.requires_grad_(True)
        regress(model, optimizer, 60)

    (found,) = watched(model, optimizer, loop)
    assert (found.code, found.parameter) == ("GG302", "inp.weight")


def test_a_second_optimizer_that_guardian_was_not_given_is_quiet() -> None:
    model = Net(nn.ModuleList())
    optimizer, other = sgd(model.inp.parameters()), sgd(model.out.parameters())

    def loop() -> None:
        for _ in range(5):
            other.zero_grad()
            regress(model, optimizer, 1)
            other.step()

    assert watched(model, optimizer, loop) == []


def test_frozen_and_unused_parameters_are_quiet() -> None:
    model = Net(nn.ModuleList())
    model.unused = nn.Linear(3, 3)
    model.inp.requires_grad_(False)
    optimizer = sgd(model.out.parameters())
    assert watched(model, optimizer, lambda: regress(model, optimizer, 5)) == []


# GG307: not the model's.


def test_an_optimizer_of_an_earlier_model() -> None:
    optimizer = sgd(Net(nn.ModuleList()).parameters())
    model = Net(nn.ModuleList())
    (found,) = watched(model, optimizer, lambda: regress(model, optimizer, 10))
    assert found.code == "GG307"
    assert found.severity is Severity.ERROR
    assert found.step == 1
    assert "None of the 4 tensors" in found.seen


def test_parameters_of_a_criterion_are_only_worth_knowing() -> None:
    model, scale = Net(nn.ModuleList()), nn.Parameter(torch.ones(1))
    optimizer = sgd([*model.parameters(), scale])

    def loop() -> None:
        for _ in range(5):
            x = torch.randn(16, 4)
            optimizer.zero_grad()
            (functional.mse_loss(model(x), x.sum(1, keepdim=True)) * scale.square()).backward()
            optimizer.step()

    (found,) = watched(model, optimizer, loop)
    assert (found.code, found.severity) == ("GG307", Severity.INFO)


# GG310: nothing to train.


def test_a_frozen_model_is_named_before_torch_fails() -> None:
    model = Net(nn.ModuleList()).requires_grad_(False)
    optimizer = sgd(model.parameters())
    guardian = Guardian(model, optimizer, guards=[ParamDeltaProbe()], sinks=[])
    with pytest.raises(RuntimeError, match="does not require grad"), guardian:
        regress(model, optimizer, 1)
    assert [found.code for found in guardian.findings if found.code.startswith("GG3")] == ["GG310"]


def test_an_optimizer_that_holds_only_frozen_parameters() -> None:
    model = Net(nn.ModuleList())
    model.inp.requires_grad_(False)
    optimizer = sgd(model.inp.parameters())
    (found,) = watched(model, optimizer, lambda: regress(model, optimizer, 5))
    assert found.code == "GG310"
    assert "`out.weight`" in found.seen


def test_a_prompt_before_a_frozen_model_is_quiet() -> None:
    model, prompt = Net(nn.ModuleList()).requires_grad_(False), nn.Parameter(torch.zeros(4))
    optimizer = sgd([prompt])

    def loop() -> None:
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(8, 4) + prompt).pow(2).mean().backward()
            optimizer.step()

    assert [found.code for found in watched(model, optimizer, loop) if found.severity is not Severity.INFO] == []


def test_evaluation_of_a_frozen_model_is_quiet() -> None:
    model = Net(nn.ModuleList()).requires_grad_(False)
    guardian = Guardian(model, None, guards=[ParamDeltaProbe()], sinks=[])
    with guardian:
        model(torch.randn(8, 4))
    assert list(guardian.findings) == []


# One tensor in two places.


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Finding]:
    return watched(model, optimizer, lambda: regress(model, optimizer, 5))


def quartet() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1))


# GG320: twice in the optimizer.


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize("tied", [False, True])
def test_a_parameter_that_stands_twice_in_a_group(tied: bool) -> None:
    model = quartet()
    if tied:
        model[2].weight = model[0].weight
    optimizer = torch.optim.SGD([*model.parameters(), model.get_parameter("0.weight")], lr=0.01)
    (found,) = stepped(model, optimizer)
    assert (found.code, found.step, found.module, found.parameter) == ("GG320", 0, "0", "0.weight")
    assert ("Tied weights" in found.causes[0]) == tied


def test_groups_that_overlap_after_an_append() -> None:
    model = quartet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [model[3].weight]})
    (found,) = stepped(model, optimizer)
    assert (found.code, found.parameter) == ("GG320", "3.weight")
    assert "Two filters" in found.causes[0]


def test_tied_weights_given_once_are_quiet() -> None:
    model = quartet()
    model[2].weight = model[0].weight
    assert stepped(model, torch.optim.SGD(model.parameters(), lr=0.01)) == []


# GG306: frozen, on the storage of what is trained.


def teacher(copy: Any) -> nn.Module:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
            self.teacher.requires_grad_(False)
            self.teacher.weight.data = copy(self.student.weight.data)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.out(self.teacher(self.student(x)).tanh())
            return y

    return Pair()


def test_a_frozen_parameter_on_the_storage_of_a_trained_one() -> None:
    model = teacher(lambda values: values)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    (found,) = stepped(model, optimizer)
    assert (found.code, found.module, found.parameter) == ("GG306", "teacher", "teacher.weight")
    assert "`student.weight`" in found.seen
    assert found.causes[0].startswith("It shares its storage")


def test_a_frozen_copy_is_quiet() -> None:
    model = teacher(torch.clone)
    assert stepped(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)) == []


def test_views_of_one_storage_that_do_not_overlap_are_quiet() -> None:
    flat = torch.randn(2, 16)
    model = teacher(torch.clone)
    for name, values in zip(("student.weight", "teacher.weight"), flat, strict=True):
        model.get_parameter(name).data = values.view(4, 4)
    assert stepped(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)) == []


# A model of which biases and scales alone are trained: worth knowing, and told once.


def trained_alone(trains: Callable[[str], bool], guard: ParamDeltaProbe | None = None) -> list[Finding]:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains(name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Guardian(model, optimizer, guards=[guard or ParamDeltaProbe()], sinks=[]) as guardian:
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    return list(guardian.findings)


@pytest.mark.parametrize("trains", [lambda name: name.startswith("1"), lambda name: name.endswith("bias")])
def test_it_is_noted_once_with_what_is_frozen(trains: Callable[[str], bool]) -> None:
    guard = ParamDeltaProbe()
    (found,) = trained_alone(trains, guard)
    assert (found.code, found.severity, found.step, found.parameter) == ("GG310", Severity.INFO, 0, "2.weight")
    assert "All 2 weight matrices of the model are frozen" in found.seen
    assert "froze more than was meant" in found.causes[0]
    again = ParamDeltaProbe()
    again.load_state_dict(guard.state_dict())
    assert trained_alone(trains, again) == []


def test_one_matrix_is_said_in_the_singular() -> None:
    model = {"weight": torch.zeros(2, 2), "bias": torch.zeros(2, requires_grad=True)}
    (found,) = only_scales(model, 0)
    assert found.seen.endswith("Its only weight matrix is frozen (`weight`).")


@pytest.mark.parametrize(
    "trains", [lambda name: True, lambda name: name.startswith("2"), lambda name: name == "0.weight"]
)
def test_where_a_matrix_trains_nothing_is_said(trains: Callable[[str], bool]) -> None:
    assert trained_alone(trains) == []
