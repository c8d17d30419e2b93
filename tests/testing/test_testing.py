"""The public test tools: faults go where they are told and leave no trace; reads are counted or refused."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from gpt_guard import FiniteGuard, Guard, Guardian, GuardUsageError
from gpt_guard.records import Finding, Observation
from gpt_guard.testing import HostReadError, Recorder, inject_nonfinite, refuse_host_reads


class Model(nn.Module):
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(4, 1)
        self.register_buffer("table", torch.ones(4))
        self.register_buffer("counts", torch.zeros(4, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.table)  # type: ignore[no-any-return]  # a module call is Any


def traces(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Everything an injection may touch, values apart."""
    hooks = [
        (sorted(vars(module)), list(module._forward_hooks), list(module._forward_pre_hooks))
        for module in model.modules()
    ]
    own = [list(optimizer._optimizer_step_pre_hooks), list(optimizer._optimizer_step_post_hooks)]
    everywhere = [list(torch_optimizer._global_optimizer_pre_hooks), list(torch_optimizer._global_optimizer_post_hooks)]
    return [hooks, own, everywhere, [parameter._backward_hooks or None for parameter in model.parameters()]]


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def optimizer(model: Model) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    optimizer.zero_grad()
    output: Tensor = model(torch.ones(2, 4))
    output.sum().backward()
    optimizer.step()
    return output


PLACES = [
    ("blocks.1", None),
    ("blocks.1", "input"),
    ("blocks.1", "gradient"),
    ("", "batch"),
    ("", "output"),
    ("blocks.0.0.weight", None),
    ("blocks.0.0.weight", "step"),
    ("blocks.0.0.weight", "gradient"),
    ("table", None),
]


@pytest.mark.parametrize(("path", "at"), PLACES)
def test_a_fault_comes_at_its_step_and_is_taken_away_exactly(
    model: Model, optimizer: torch.optim.Optimizer, path: str, at: str | None
) -> None:
    before = traces(model, optimizer)
    with inject_nonfinite(model, path, at=at, step=2) as injection:
        fired = []
        for _ in range(4):
            step(model, optimizer)
            fired.append(injection.fired)
        assert traces(model, optimizer) != before
    assert traces(model, optimizer) == before
    # What is planted between steps 1 and 2 is there when step 1 has ended.
    assert fired == ([0, 1, 1, 1] if at is None and path != "blocks.1" else [0, 0, 1, 1])


@pytest.mark.parametrize("path", ["blocks.0.0.weight", "table"])
def test_what_was_planted_is_put_back(model: Model, path: str) -> None:
    before = copy.deepcopy(model.state_dict())
    injection = inject_nonfinite(model, path, value=math.inf)
    assert model.state_dict()[path].flatten()[0] == math.inf
    assert int((~torch.isfinite(model.state_dict()[path])).sum()) == 1
    injection.remove()
    injection.remove()
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())


def test_what_was_overwritten_since_is_left_alone(model: Model) -> None:
    with inject_nonfinite(model, "table"), torch.no_grad():
        model.table.fill_(5.0)
    assert model.table.tolist() == [5.0] * 4


def test_a_forward_replaced_on_the_instance_is_put_back(model: Model) -> None:
    def own(x: Tensor) -> Tensor:
        return x + 1

    model.head.forward = own  # type: ignore[method-assign,assignment]  # as people do
    with inject_nonfinite(model, "head"):
        assert torch.isnan(model(torch.ones(2, 4))[0, 0])
    assert model.head.forward is own


def test_one_number_is_put_in_and_gradients_still_flow(model: Model) -> None:
    with inject_nonfinite(model, "blocks.0"):
        output = model(torch.ones(2, 4))
        output.sum().backward()
    assert torch.isnan(output).flatten().tolist() == [True, False]
    assert model.blocks[0][0].weight.grad is not None  # type: ignore[index]  # a Sequential


@pytest.mark.parametrize("call", [0, 2])
def test_one_of_several_calls_in_a_step_can_be_chosen(
    model: Model, optimizer: torch.optim.Optimizer, call: int
) -> None:
    bad = []
    with inject_nonfinite(model, "head", step=1, call=call):
        step(model, optimizer)
        for _ in range(4):
            bad.append(bool(torch.isnan(model(torch.ones(2, 4))).any()))
    assert bad == [place == call for place in range(4)]


def test_only_steps_of_the_optimizers_that_hold_the_model_count(model: Model, optimizer: torch.optim.Optimizer) -> None:
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    second = torch.optim.SGD(model.head.parameters(), lr=0.1)
    with (
        inject_nonfinite(model, "head", step=1) as any_of_them,
        inject_nonfinite(model, "blocks.0", step=1, optimizer=[second]) as only_second,
    ):
        other.step()
        model(torch.ones(2, 4))
        assert not any_of_them.fired
        optimizer.step()
        model(torch.ones(2, 4))
        assert (any_of_them.fired, only_second.fired) == (1, 0)
        second.step()
        model(torch.ones(2, 4))
        assert (any_of_them.fired, only_second.fired) == (1, 1)


@dataclass
class Output:
    loss: None
    logits: Tensor


Pair = namedtuple("Pair", "ids hidden")


@pytest.mark.parametrize(
    "make",
    [
        lambda x: (None, [x]),
        lambda x: {"ids": torch.zeros(2, dtype=torch.long), "x": x},
        lambda x: OrderedDict(x=x),
        lambda x: Output(None, x),
        lambda x: Pair(torch.zeros(2, dtype=torch.long), x),
    ],
)
def test_the_first_float_tensor_of_a_structure_is_broken(make: Any) -> None:
    class Made(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return make(x)

    model = Made()
    kind = type(model(torch.ones(2)))
    with inject_nonfinite(model):
        broken = model(torch.ones(2))
    assert type(broken) is kind
    assert "nan" in str(broken)


@pytest.mark.parametrize(
    ("path", "at", "words"),
    [
        ("block.1", None, "did you mean blocks.1"),
        ("blocks.1.9", None, "blocks.1"),
        ("blocks.0.0.wieght", None, "blocks.0.0.weight"),
        ("head", "parameter", "it holds head.weight, head.bias"),
        ("head", "batch", "output, input, gradient"),
        ("table", "step", "can be broken at buffer"),
        ("counts", None, "torch.int64, which has no NaN"),
    ],
)
def test_a_place_that_cannot_be_is_refused_with_what_was_meant(
    model: Model, path: str, at: str | None, words: str
) -> None:
    with pytest.raises(GuardUsageError, match=words.replace("(", r"\(")):
        inject_nonfinite(model, path, at=at)


def test_a_finite_value_is_refused(model: Model) -> None:
    with pytest.raises(GuardUsageError, match="which is finite"):
        inject_nonfinite(model, value=1.0)


def test_a_batch_without_floats_is_refused_when_it_comes() -> None:
    model = nn.Embedding(3, 2)
    with (
        inject_nonfinite(model, at="batch"),
        pytest.raises(GuardUsageError, match=r"input of the model \(Embedding\) holds no float"),
    ):
        model(torch.zeros(2, dtype=torch.long))


# Recorder.


def test_a_recorder_keeps_everything(model: Model, optimizer: torch.optim.Optimizer) -> None:
    recorder = Recorder()
    with Guardian(model, optimizer, guards=[FiniteGuard()], sinks=[recorder], policy={"GG1xx": "warn"}) as guardian:
        step(model, optimizer)
        guardian.log(accuracy=0.5)
        with inject_nonfinite(model, "head"):
            step(model, optimizer)
    assert recorder.header["model"] == "Model"
    assert recorder.series("step") == [0, 1]
    assert recorder.series("lr") == [(0.1,), (0.1,)]
    assert "GG101" in recorder.codes()
    assert recorder.actions[0] == "warn"
    assert recorder.metrics == [(0, {"accuracy": 0.5})]
    assert recorder.report is not None
    assert recorder.report.steps == 2


# Host reads.


class Reader(Guard):
    """A guard with a hidden read, as a user might write one."""

    def after_backward(self) -> None:
        self.watch.ledger.put("largest", largest(self.watch.model))

    def judge(self, seen: Observation) -> list[Finding]:
        return []


def largest(model: nn.Module) -> float:
    return max(float(parameter.detach().abs().max()) for parameter in model.parameters())


def test_a_hidden_read_of_ones_own_guard_is_refused(model: Model, optimizer: torch.optim.Optimizer) -> None:
    with Guardian(model, optimizer, guards=[Reader()], sinks=[], reads="per_step") as guardian, refuse_host_reads():
        step(model, optimizer)
    (found, *_) = guardian.findings
    assert found.code == "GG906"
    assert "HostReadError: __float__ reads a tensor's value" in found.seen
    assert "in after_backward: self.watch.ledger.put" in found.seen


READS = {
    "item": lambda t: t.sum().item(),
    "bool": lambda t: bool(t.sum() > 0),
    "float": lambda t: float(t.sum()),
    "int": lambda t: int(t.sum()),
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "cpu": lambda t: t.cpu(),
    "to": lambda t: t.to("cpu"),
    "nonzero": lambda t: t.nonzero(),
    "where": lambda t: torch.where(t > 0),
    "mask": lambda t: t[t > 0],
    "equal": lambda t: torch.equal(t, t),
    "allclose": lambda t: torch.allclose(t, t),
    "masked_select": lambda t: t.masked_select(t > 0),
    "unique": lambda t: t.unique(),
    "print": lambda t: str(t),
    "format": lambda t: f"{t.sum():.2f}",
    "contains": lambda t: 1.0 in t,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_read_by_ones_own_code_is_allowed(read: Any) -> None:
    with refuse_host_reads() as reads:
        read(torch.ones(3))
    assert reads.ledger == 0


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_read_by_gpt_guard_is_refused_with_its_line(read: Any) -> None:
    """The code is compiled as if it stood in a file of gpt_guard."""
    import gpt_guard

    file = str(gpt_guard.__file__).replace("__init__", "hidden")
    namespace: dict[str, Any] = {"read": read}
    exec(compile("def measure(tensor):\n    return read(tensor)\n", file, "exec"), namespace)
    inner = read.__code__.replace(co_filename=file)
    namespace["read"] = type(read)(inner, globals())
    with refuse_host_reads(), pytest.raises(HostReadError, match=r"hidden\.py:\d+ in <lambda>"):
        namespace["measure"](torch.ones(3))


def test_shapes_arithmetic_and_device_work_are_no_reads() -> None:
    import gpt_guard

    file = str(gpt_guard.__file__).replace("__init__", "hidden")
    code = compile(
        "def measure(t):\n    return t.shape, t.sum() + t[0], len(t), t.to(torch.float64), t.where(t > 0, 0)\n",
        file,
        "exec",
    )
    namespace: dict[str, Any] = {"torch": torch}
    exec(code, namespace)
    with refuse_host_reads() as reads:
        namespace["measure"](torch.ones(3))
    assert reads.ledger == 0


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_default_guards_read_once_per_step(
    model: Model, optimizer: torch.optim.Optimizer, micro_batches: int
) -> None:
    counts = []
    with Guardian(model, optimizer, sinks=[], reads="per_step") as guardian, refuse_host_reads() as reads:
        for _ in range(4):
            optimizer.zero_grad()
            for _ in range(micro_batches):
                model(torch.randn(2, 4)).square().sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            guardian.log(mean=model.head.weight.detach().mean())
            counts.append(reads.ledger)
    assert counts == [1, 2, 3, 4]
