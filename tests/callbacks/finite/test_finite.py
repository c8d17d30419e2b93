"""FiniteGuard in the loops people write: accumulation, clipping, scalers, closures, compiled and odd models."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard import Finding, FiniteGuard, Guardian, GuardUsageError, NonFiniteError
from gpt_guard.testing import Recorder, inject_nonfinite, refuse_host_reads

Reads = Literal["immediate", "per_step"]
both = pytest.mark.parametrize("reads", ["immediate", "per_step"])


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def x() -> Tensor:
    return torch.randn(3, 4)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor | None = None) -> None:
    optimizer.zero_grad()
    model(x() if batch is None else batch).square().mean().backward()
    optimizer.step()


def guarded(model: nn.Module, optimizer: Any, reads: Reads = "immediate", **options: Any) -> Guardian:
    return Guardian(model, optimizer, guards=[FiniteGuard(**options)], sinks=[], reads=reads, replay=False)


@dataclass
class Halt:
    """What halted, once it has."""

    guardian: Guardian
    finding: Finding = field(init=False)


@contextmanager
def halting(model: nn.Module, optimizer: Any, reads: Reads = "immediate", **options: Any) -> Iterator[Halt]:
    """A guarded loop that must be halted."""
    halt = Halt(guarded(model, optimizer, reads, **options))
    with pytest.raises(NonFiniteError) as caught, halt.guardian:
        yield halt
    halt.finding = caught.value.finding


def quiet(model: nn.Module, batch: Any = None, *, reads: Reads, steps: int = 3, **options: Any) -> list[Finding]:
    """The findings of a few steps that nothing may halt."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with guarded(model, optimizer, reads, **options) as guardian:
        for _ in range(steps):
            step(model, optimizer, batch)
    return list(guardian.findings)


# Healthy values.


class Scaled(nn.Module):
    """A parameter that keeps gradients finite, and an output of the caller's choice."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.inner = nn.Linear(4, 4), Made(make)

    def forward(self, x: Tensor) -> Tensor:
        self.inner(x)
        return self.layer(x)  # type: ignore[no-any-return]  # a module call is Any


class Made(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x)


HEALTHY: dict[str, Callable[[Tensor], Any]] = {
    "float32 near its limit": lambda x: torch.full((64, 64), 3e38),
    "float16 near its limit": lambda x: torch.full((64, 64), 60000.0, dtype=torch.float16),
    "bfloat16 near its limit": lambda x: torch.full((64, 64), 3e38, dtype=torch.bfloat16),
    "float64 beyond float32": lambda x: torch.full((64, 64), 1e300, dtype=torch.float64),
    "integers": lambda x: torch.full((8,), 2**62),
    "booleans": lambda x: x > 0,
    "empty": lambda x: x[:0],
    "complex": lambda x: torch.complex(x, x),
    "sparse": lambda x: x.to_sparse(),
    "sparse rows": lambda x: x.to_sparse_csr(),
    "8-bit floats": lambda x: x.to(torch.float8_e5m2),
    "a dict": lambda x: {"a": [x, (x, None)], "b": "text", "c": 3},
    "nothing": lambda x: None,
    "a long list of numbers": lambda x: [0.5] * 1000,
    "an object": lambda x: object(),
}


@both
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("make", HEALTHY.values(), ids=HEALTHY)
def test_finite_values_of_every_kind_are_quiet(make: Callable[[Tensor], Any], reads: Reads) -> None:
    assert quiet(Scaled(make), reads=reads) == []


BAD: dict[str, Callable[[Tensor], Any]] = {
    "float16": lambda x: x.half() * math.nan,
    "float64": lambda x: x.double() * math.inf,
    "complex": lambda x: torch.complex(x, x * math.nan),
    "sparse": lambda x: (x * math.nan).to_sparse(),
    "8-bit floats": lambda x: (x * math.nan).to(torch.float8_e5m2),
    "scalar": lambda x: x.sum() * math.nan,
    "second of two": lambda x: (x, {"deep": [x * math.nan]}),
}


@both
@pytest.mark.parametrize("make", BAD.values(), ids=BAD)
def test_bad_values_of_every_kind_are_found(make: Callable[[Tensor], Any], reads: Reads) -> None:
    with pytest.raises(NonFiniteError) as caught:
        quiet(Scaled(make), reads=reads)
    assert (caught.value.finding.code, caught.value.finding.module) == ("GG101", "inner")


@both
def test_tensors_that_cannot_be_tested_are_listed(reads: Reads) -> None:
    def nested(x: Tensor) -> Tensor:
        return torch.nested.nested_tensor([x[0], x[1]], layout=torch.jagged)

    model = Scaled(nested)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with guarded(model, optimizer, reads) as guardian:
        step(model, optimizer)
    assert guardian.report().not_watched == ("FiniteGuard: inner: a nested tensor",)


@both
def test_a_transform_in_which_nothing_can_be_read_does_not_break_the_run(reads: Reads) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with guarded(model, optimizer, reads) as guardian:
        rows = torch.vmap(model)(x())
        rows.sum().backward()
        optimizer.step()
    assert any("RuntimeError" in spot or "torch.func" in spot for spot in guardian.report().not_watched)


@both
def test_a_mask_of_negative_infinity_is_recorded_once(reads: Reads) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores, self.layer = (
                Made(lambda x: (x @ x.mT).masked_fill(torch.ones(3, 3).triu(1) > 0, -math.inf)),
                mlp(),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.scores(x).softmax(-1) @ x)  # type: ignore[no-any-return]  # a module call is Any

    found = quiet(Masked(), reads=reads)
    assert [(finding.code, finding.severity, finding.module) for finding in found] == [("GG109", "info", "scores")]


@both
def test_masks_in_the_batch_and_infinite_buffers_at_the_start_are_quiet(reads: Reads) -> None:
    class Observer(nn.Module):
        low: Tensor
        mask: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = mlp()
            self.register_buffer("low", torch.tensor(math.inf))
            self.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))

        def forward(self, x: Tensor) -> Tensor:
            self.low = torch.minimum(self.low, x.detach().min())
            return self.layer((x @ x.mT + self.mask).softmax(-1) @ x)  # type: ignore[no-any-return]  # Any

    assert quiet(Observer(), reads=reads) == []


@both
def test_a_padding_row_of_nan_in_an_input_is_a_finding(reads: Reads) -> None:
    batch = x()
    batch[2] = math.nan
    with pytest.raises(NonFiniteError) as caught:
        quiet(mlp(), batch, reads=reads)
    found = caught.value.finding
    assert (found.code, found.module, found.position) == ("GG103", "", "input[0]")
    if reads == "immediate":
        assert found.tensor is not None
        assert (found.tensor.nan, found.tensor.bad_rows) == (4, (2,))


@both
def test_a_parameter_that_is_bad_at_the_start_is_said_when_it_is_used(reads: Reads) -> None:
    model = mlp()
    with inject_nonfinite(model, "2.weight"), pytest.raises(NonFiniteError) as caught:
        quiet(model, reads=reads)
    found = caught.value.finding
    assert (found.code, found.parameter, found.moment) == ("GG105", "2.weight", "forward")
    assert "It was so when the Guardian was entered" in found.seen


@both
def test_a_bad_forward_that_no_step_follows_is_still_told(reads: Reads) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with halting(model, optimizer, reads) as halt, inject_nonfinite(model, "1", step=1):
        step(model, optimizer)
        model(x())
    assert (halt.finding.module, halt.finding.step) == ("1", 1)


@both
def test_an_evaluation_in_the_middle_of_a_step_takes_nothing_from_it(reads: Reads) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with guarded(model, optimizer, reads) as guardian:
        model(x()).square().mean().backward()
        with torch.no_grad():
            model(x())
        optimizer.step()
    assert guardian.latest is not None
    assert guardian.latest.loss is not None
    with halting(model, optimizer, reads) as halt, inject_nonfinite(model, "0.weight", at="gradient"):
        model(x()).square().mean().backward()
        with torch.no_grad():
            model(x())
        optimizer.step()
    assert (halt.finding.code, halt.finding.parameter) == ("GG104", "0.weight")


# What is not told twice, and what is switched off.


@both
@pytest.mark.parametrize("at", ["output", "gradient"])
def test_where_policy_only_warns_one_bad_step_is_one_finding(at: str, reads: Reads) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guardian = Guardian(
        model, optimizer, guards=[FiniteGuard(parameters=False)], sinks=[], reads=reads, policy={"GG1xx": "warn"}
    )
    with guardian, inject_nonfinite(model, "1", at=at):
        for _ in range(2):
            model(x()).sum().backward()
        optimizer.step()
    assert [finding.code for finding in guardian.findings] == ["GG101" if at == "output" else "GG104"]
    assert guardian.findings[0].micro_batch == 0


def test_two_guards_that_watch_outputs_are_refused() -> None:
    model = mlp()
    with pytest.raises(GuardUsageError, match="two FiniteGuards"):
        Guardian(model, guards=[FiniteGuard(), FiniteGuard(ignore="0")], sinks=[])


def test_a_failure_of_the_guard_itself_never_reaches_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("an error of ours")

    monkeypatch.setattr("gpt_guard.callbacks.finite.guard.first_seen", fails)
    model = mlp()
    with inject_nonfinite(model, "1"):
        found = quiet(model, reads="immediate", steps=1)
    assert [finding.code for finding in found] == ["GG906"]
    assert "an error of ours" in found[0].seen


@both
def test_each_thing_to_watch_can_be_switched_off(reads: Reads) -> None:
    off = {"outputs": False, "gradients": False, "parameters": False, "buffers": False}
    for path, at in (("1", "output"), ("0.weight", "gradient")):
        model = mlp()
        model[1] = nn.Sequential(nn.Tanh(), Made(lambda y: (y, y)[0].nan_to_num()))
        with inject_nonfinite(model, path if at == "gradient" else "1.0", at=at) as injection:
            assert quiet(model, reads=reads, steps=1, **off) == []
            assert injection.fired


# Loops.


@both
@pytest.mark.parametrize("at", ["output", "gradient"])
def test_the_micro_batch_that_failed_is_named(at: str, reads: Reads) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with (
        halting(model, optimizer, reads) as halt,
        inject_nonfinite(model, "1", at=at, step=1, call=2),
    ):
        for _ in range(3):
            for _ in range(4):
                model(x()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert (halt.finding.step, halt.finding.micro_batch) == (1, 2)


@both
def test_a_loss_outside_of_one_micro_batch_is_named(reads: Reads) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with halting(model, optimizer, reads) as halt:
        for step_number in range(3):
            for micro_batch in range(3):
                loss = model(x()).square().mean()
                (loss.log() if (step_number, micro_batch) != (1, 1) else (loss * 0.0).log()).backward()
            optimizer.step()
            optimizer.zero_grad()
    found = halt.finding
    assert (found.code, found.step, found.micro_batch) == ("GG102", 1, 1)
    if reads == "immediate":
        assert str(found.evidence["operations"]).startswith("['Log'")
        assert found.causes[0].startswith("log(softmax")


@both
def test_parameters_that_join_in_a_later_micro_batch_are_named_rightly(reads: Reads) -> None:
    """Gradients that exist differ between the micro-batches, as with experts."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts, self.chosen = nn.ModuleList(nn.Linear(4, 1) for _ in range(2)), 0

        def forward(self, x: Tensor) -> Tensor:
            return self.experts[self.chosen](x)  # type: ignore[no-any-return]  # a module call is Any

    model = Experts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        halting(model, optimizer, reads) as halt,
        inject_nonfinite(model, "experts.0.bias", at="gradient"),
    ):
        for model.chosen in (0, 1):
            model(x()).sum().backward()
        optimizer.step()
    found = halt.finding
    assert (found.parameter, found.micro_batch) == ("experts.0.bias", 0)


@both
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("clip", ["norm", "value"])
def test_the_first_bad_gradient_is_named_although_clipping_spreads_it(value: float, clip: str, reads: Reads) -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    with (
        guarded(model, optimizer, reads) as guardian,
        inject_nonfinite(model, "2.weight", at="gradient", value=value),
    ):
        try:
            optimizer.zero_grad()
            model(x()).square().mean().backward()
            if clip == "norm":
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            else:
                nn.utils.clip_grad_value_(model.parameters(), 1.0)
            optimizer.step()
        except NonFiniteError as halt:
            found = halt.finding
            assert (found.code, found.parameter, found.module) == ("GG104", "2.weight", "2")
            assert found.evidence["bad_gradient_count"] == 1
            assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
        else:
            # Clipping by value makes 1 of +inf: what was applied is finite, and only an immediate read saw it.
            assert (clip, value, reads) == ("value", math.inf, "per_step")
            assert guardian.findings == ()


@both
def test_gradients_of_1e30_are_finite(reads: Reads) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-38)
    with guarded(model, optimizer, reads) as guardian:
        (model(x()).sum() * 1e30).backward()
        nn.utils.clip_grad_value_(model.parameters(), 1e31)
        optimizer.step()
    assert guardian.findings == ()


@both
def test_the_loss_s_own_backward_is_blamed_on_the_last_module(reads: Reads) -> None:
    """The root of zero is finite, its derivative is not."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with halting(model, optimizer, reads) as halt:
        (model(x()) * 0.0).pow(2).sum().sqrt().backward()
        optimizer.step()
    found = halt.finding
    assert (found.code, found.module, found.evidence["bad_gradient_count"]) == ("GG104", "1", 4)


@both
def test_a_parameter_of_a_module_with_children_is_not_taken_for_the_last(reads: Reads) -> None:
    """The model returns last, but reads its own position table first."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = nn.Parameter(torch.zeros(3, 4))
            self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(x + self.position))  # type: ignore[no-any-return]  # a module call is Any

    model = Model()
    with inject_nonfinite(model, "layer", at="gradient"), pytest.raises(NonFiniteError) as caught:
        quiet(model, reads=reads)
    assert caught.value.finding.module == "layer"


@both
def test_a_reentrant_checkpoint_hides_the_graph_and_the_last_module_is_named(reads: Reads) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift, self.part, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.utils.checkpoint.checkpoint(self.part, self.lift(x), use_reentrant=True)
            return self.head(hidden)  # type: ignore[no-any-return]  # a module call is Any

    model = Model()
    with inject_nonfinite(model, "part", at="gradient"), pytest.raises(NonFiniteError) as caught:
        quiet(model, reads=reads)
    found = caught.value.finding
    assert found.module == "part"
    assert "most likely" in str(found.origin)


@both
def test_a_closure_that_goes_bad_is_stopped_before_the_first_change(reads: Reads) -> None:
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    batch = x()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(batch).square().mean()
        loss.backward()
        return loss

    with guarded(model, optimizer, reads), inject_nonfinite(model, "1", step=1):
        optimizer.step(closure)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(NonFiniteError) as caught:
            optimizer.step(closure)
        assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
    assert (caught.value.finding.module, caught.value.finding.step) == ("1", 1)


@both
def test_with_several_optimizers_none_steps_on_a_bad_gradient(reads: Reads) -> None:
    model = mlp()
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[2].parameters(), lr=0.1)]
    before: dict[str, Tensor] = {}
    with halting(model, optimizers, reads) as halt, inject_nonfinite(model, "0.weight", at="gradient", step=1):
        for _ in range(2):
            before = copy.deepcopy(model.state_dict())
            model.zero_grad()
            model(x()).square().mean().backward()
            for optimizer in reversed(optimizers):
                optimizer.step()
    assert (halt.finding.parameter, halt.finding.step) == ("0.weight", 1)
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())


# GradScaler.


def scaled_step(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
    optimizer.zero_grad()
    scaler.scale(model(x()).square().mean()).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


@both
def test_steps_that_a_scaler_skips_are_quiet(reads: Reads) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    with guarded(model, optimizer, reads) as guardian:
        for step_number in range(6):
            with inject_nonfinite(model, "0.weight", at="gradient", value=math.inf) as injection:
                if step_number % 2:
                    injection.remove()
                scaled_step(model, optimizer, scaler)
    assert guardian.findings == ()
    assert guardian.report().skipped_steps == 3


@both
def test_a_bad_forward_under_a_scaler_is_found(reads: Reads) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with (
        halting(model, optimizer, reads) as halt,
        inject_nonfinite(model, "1", step=1),
    ):
        for _ in range(3):
            scaled_step(model, optimizer, scaler)
    assert (halt.finding.code, halt.finding.module, halt.finding.step) == ("GG101", "1", 1)


@both
def test_a_scaler_that_only_skips_is_told_once(reads: Reads) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    with guarded(model, optimizer, reads) as guardian:
        for _ in range(25):
            with inject_nonfinite(model, "0.weight", at="gradient", value=math.inf):
                scaled_step(model, optimizer, scaler)
    assert [finding.code for finding in guardian.findings] == ["GG110"]


# The optimizer itself.


@both
def test_adams_eps_in_half_precision_is_named_with_the_parameter_and_step(reads: Reads) -> None:
    model = nn.Linear(4, 4).half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with halting(model, optimizer, reads) as halt:
        for _ in range(3):
            optimizer.zero_grad()
            model(x().half()).mul(1e-4).sum().backward()
            optimizer.step()
    found = halt.finding
    assert (found.code, found.step, found.module) == ("GG106", 0, "")
    assert "eps of 1e-08 is 0 in float16" in found.seen
    assert found.causes[0].startswith("Adam on float16")


@both
def test_a_schedule_that_divides_by_zero_is_the_likely_cause(reads: Reads) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with halting(model, optimizer, reads) as halt:
        for _ in range(3):
            optimizer.param_groups[0]["lr"] = math.nan
            step(model, optimizer)
    found = halt.finding
    assert (found.code, found.step) == ("GG106", 0)
    assert found.causes[0].startswith("The learning rate is itself NaN")


@both
def test_batchnorm_statistics_that_overflow_are_named_after_the_step(reads: Reads) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with halting(model, optimizer, reads) as halt:
        step(model, optimizer)
        step(model, optimizer, x() * 1e20)
        step(model, optimizer)
    found = halt.finding
    assert (found.code, found.parameter, found.module, found.step) == ("GG107", "1.running_var", "1", 1)


# The loss.


@both
@pytest.mark.parametrize("inside", [True, False])
def test_labels_that_are_all_ignored_are_counted(inside: bool, reads: Reads) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok = nn.Embedding(5, 5)

        def forward(self, ids: Tensor, labels: Tensor) -> Any:
            logits = self.tok(ids)
            return (logits, F.cross_entropy(logits, labels)) if inside else logits

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids, labels = torch.arange(3), torch.full((3,), -100)
    with halting(model, optimizer, reads) as halt:
        output = model(ids, labels)
        loss = output[1] if inside else F.cross_entropy(output, labels)
        loss.backward()
        optimizer.step()
    found = halt.finding
    assert (found.code, found.module) == ("GG102", "" if inside else None)
    assert found.position == ("output[1]" if inside else None)
    if reads == "immediate":
        assert found.evidence["supervised"] == 0
        assert "0 of 3 target positions" in found.seen
        assert found.causes[0].startswith("Every target of the batch is ignore_index")


@both
def test_a_loss_module_is_named_by_its_path(reads: Reads) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.criterion = nn.Linear(4, 4), nn.CrossEntropyLoss()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": self.criterion(self.layer(x), torch.full((3,), -100))}

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with halting(model, optimizer, reads) as halt:
        model(x())["loss"].backward()
        optimizer.step()
    assert (halt.finding.code, halt.finding.module) == ("GG102", "criterion")


def test_a_masked_target_is_the_likely_cause_where_an_output_was_masked() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.mask = nn.Linear(4, 4), Made(lambda y: y.masked_fill(torch.eye(4)[0] > 0, -math.inf))

        def forward(self, x: Tensor) -> Tensor:
            return self.mask(self.layer(x))  # type: ignore[no-any-return]  # a module call is Any

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with halting(model, optimizer) as halt:
        F.cross_entropy(model(x()), torch.zeros(3, dtype=torch.long)).backward()
    found = halt.finding
    assert found.code == "GG102"
    assert found.evidence["neg_inf_outputs"] == ["mask"]
    assert found.causes[0].startswith("The target's own logit is -inf")


# Compiled.


@both
def test_what_is_inside_a_compiled_model_is_said_to_be_unseen_and_its_output_is_watched(reads: Reads) -> None:
    model = mlp()
    compiled: Any = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled(x()).sum().backward()
    with halting(compiled, optimizer, reads) as halt:
        for number in range(3):
            step(compiled, optimizer, x() * (math.inf if number == 2 else 1.0))
    assert (halt.finding.code, halt.finding.step) == ("GG103", 2)
    assert any("compiled" in spot for spot in halt.guardian.report().not_watched)


@both
def test_a_bad_output_of_a_compiled_part_names_the_part(reads: Reads) -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = torch.compile(nn.Sequential(nn.Linear(4, 4), Made(lambda y: y / 0.0)), backend="eager")
            self.head = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.part(x))  # type: ignore[no-any-return]  # a module call is Any

    with pytest.raises(NonFiniteError) as caught:
        quiet(Root(), reads=reads)
    assert (caught.value.finding.code, caught.value.finding.module) == ("GG101", "part")


# Reading.


def test_a_healthy_step_is_read_once_and_only_by_the_ledger() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    counts = []
    with guarded(model, optimizer, "per_step"), refuse_host_reads() as reads:
        for _ in range(4):
            optimizer.zero_grad()
            for _ in range(2):
                model(x()).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            counts.append(reads.ledger)
    assert counts == [1, 2, 3, 4]


def test_what_was_not_counted_is_not_told() -> None:
    recorder = Recorder()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guardian = Guardian(model, optimizer, guards=[FiniteGuard()], sinks=[recorder], reads="per_step")
    with pytest.raises(NonFiniteError), guardian, inject_nonfinite(model, "1", value=math.inf):
        step(model, optimizer)
    (found,) = recorder.findings
    assert found.tensor is None
    assert found.where is None
    assert found.evidence == {
        "shape": [3, 8],
        "dtype": "float32",
        "minimum": found.evidence["minimum"],
        "maximum": math.inf,
    }
    assert "maximum inf" in found.seen
