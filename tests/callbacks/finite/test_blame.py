"""Who made it: the maker is named however modules are shared, stored, called or left half-way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gpt_guard import Finding, FiniteGuard, Guardian, NonFiniteError
from gpt_guard.testing import inject_nonfinite

Reads = Literal["immediate", "per_step"]
both = pytest.mark.parametrize("reads", ["immediate", "per_step"])


@contextmanager
def halting(model: nn.Module, optimizer: Any, reads: Reads, **options: Any) -> Iterator[list[Finding]]:
    """A guarded loop that must be halted; the list holds the finding afterwards."""
    found: list[Finding] = []
    guardian = Guardian(model, optimizer, guards=[FiniteGuard(**options)], sinks=[], reads=reads, replay=False)
    with pytest.raises(NonFiniteError) as caught, guardian:
        yield found
    found.append(caught.value.finding)


def blamed(
    model: nn.Module, *inputs: Any, reads: Reads, call: Callable[..., Any] | None = None, **options: Any
) -> Finding:
    """The finding of one training step on `model(*inputs)`, or on what `call` makes of it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with halting(model, optimizer, reads, **options) as found:
        output = (call or model)(*inputs)
        output.sum().backward()
        optimizer.step()
    return found[0]


class NaNOutput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x - x)


class Custom(nn.Module):
    """Runs the function it is given between its two children."""

    def __init__(self, between: Callable[[Tensor], Tensor], second: nn.Module | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4) if second is None else second
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))  # type: ignore[no-any-return]  # a module call is Any


def nan(x: Tensor) -> Tensor:
    return x * math.nan


def x() -> Tensor:
    return torch.randn(3, 4)


@both
@pytest.mark.parametrize(
    "second",
    [
        nn.Identity(),
        nn.Dropout(0.0),
        nn.Dropout(0.5).eval(),
        nn.Flatten(),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5, inplace=True),
        nn.Sequential(nn.Identity(), nn.ReLU(inplace=True)),
        nn.LayerNorm(4),
        nn.BatchNorm1d(4),
        nn.Sequential(nn.BatchNorm1d(4)),
    ],
    ids=str,
)
def test_a_layer_that_passes_on_or_changes_in_place_what_it_was_given_is_not_blamed(
    second: nn.Module, reads: Reads
) -> None:
    found = blamed(Custom(nan, second), x(), reads=reads)
    assert (found.code, found.module, found.evidence["received_by"]) == ("GG101", "", "second")
    assert found.evidence["after"] == "first"


@both
def test_an_in_place_change_by_the_parent_is_the_parents(reads: Reads) -> None:
    found = blamed(Custom(lambda y: y.mul_(math.nan)), x(), reads=reads)
    assert (found.module, found.evidence["received_by"]) == ("", "second")


class InPlaceResidual(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.inner, self.outer, self.value = nn.Linear(4, 4), nn.Linear(4, 4), value

    def forward(self, x: Tensor) -> Tensor:
        x += self.inner(x.clone()) * self.value
        return self.outer(x)  # type: ignore[no-any-return]  # a module call is Any


@both
@pytest.mark.parametrize(("value", "module"), [(math.nan, "second"), (1.0, "")])
def test_a_module_that_writes_to_its_own_input_is_blamed_only_if_it_was_good_before(
    value: float, module: str, reads: Reads
) -> None:
    between = (lambda y: y * 1.0) if module else nan
    found = blamed(Custom(between, InPlaceResidual(value)), x(), reads=reads)
    assert found.module == module


class OwnInPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(math.nan)


def test_a_module_without_children_that_writes_to_its_input_is_named_with_a_doubt() -> None:
    found = blamed(Custom(lambda y: y * 1.0, OwnInPlace()), x(), reads="immediate")
    assert found.module == "second"
    assert "or was given it" in str(found.origin)


@both
def test_the_last_child_s_output_changed_in_place_is_the_parents(reads: Reads) -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x)
            return y.mul_(math.nan)

    found = blamed(Custom(lambda y: y, Parent()), x(), reads=reads)
    assert (found.module, found.evidence["after"]) == ("second", "second.inner")


@both
def test_a_shared_module_is_blamed_on_the_caller_of_this_call(reads: Reads) -> None:
    """Registered first in the encoder, called by the decoder."""

    class Side(nn.Module):
        def __init__(self, shared: nn.Module, factor: float) -> None:
            super().__init__()
            self.shared, self.own, self.factor = shared, nn.Linear(4, 4), factor

        def forward(self, x: Tensor) -> Tensor:
            return self.shared(self.own(x) * self.factor)  # type: ignore[no-any-return]  # a module call is Any

    shared = nn.Linear(4, 4)
    model = nn.Sequential(Side(shared, 1.0), Side(shared, math.nan))
    found = blamed(model, x(), reads=reads)
    assert (found.module, found.evidence["after"], found.evidence["received_by"]) == ("1", "1.own", "0.shared")


@both
def test_a_module_called_twice_is_named_as_the_last_before_its_second_call(reads: Reads) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x) * math.nan)  # type: ignore[no-any-return]  # a module call is Any

    found = blamed(Twice(), x(), reads=reads)
    assert (found.module, found.evidence["after"], found.evidence["received_by"]) == ("", "layer", "layer")


@both
def test_a_module_kept_outside_of_its_caller_is_found_by_the_call(reads: Reads) -> None:
    """A registry holds the layers; the module that calls them is elsewhere."""

    class Caller(nn.Module):
        registry: nn.ModuleDict

        def __init__(self, registry: nn.ModuleDict) -> None:
            super().__init__()
            self.own = nn.Linear(4, 4)
            self.__dict__["registry"] = registry

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.registry["a"](self.own(x))
            return self.registry["b"](hidden * math.nan)  # type: ignore[no-any-return]  # a module call is Any

    registry = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.registry, self.caller = registry, Caller(registry)

        def forward(self, x: Tensor) -> Tensor:
            return self.caller(x)  # type: ignore[no-any-return]  # a module call is Any

    found = blamed(Model(), x(), reads=reads)
    assert (found.module, found.evidence["after"], found.evidence["received_by"]) == (
        "caller",
        "registry.a",
        "registry.b",
    )


@both
def test_a_list_of_modules_is_never_blamed(reads: Reads) -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for place, layer in enumerate(self.layers):
                x = layer(x * math.nan if place == 2 else x)
            return x

    found = blamed(nn.Sequential(Listed()), x(), reads=reads)
    assert (found.module, found.evidence["after"], found.evidence["received_by"]) == ("0", "0.layers.1", "0.layers.2")


@both
def test_keyword_arguments_and_nested_structures_are_looked_into(reads: Reads) -> None:
    @dataclass
    class Output:
        hidden: dict[str, list[Tensor]]
        extra: None = None

    class Inner(nn.Module):
        def forward(self, *, given: dict[str, Any]) -> Output:
            return Output({"all": [given["x"], given["x"] / 0.0]})

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift, self.inner = nn.Linear(4, 4), Inner()

        def forward(self, x: Tensor) -> Tensor:
            output: Output = self.inner(given={"x": self.lift(x), "mask": None})
            return output.hidden["all"][1]

    found = blamed(Model(), x(), reads=reads)
    assert (found.module, found.module_class, found.position) == ("inner", "Inner", "output.hidden['all'][1]")


@both
def test_a_bad_batch_by_keyword_is_the_batch(reads: Reads) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, *, features: Tensor, padding: Tensor) -> Tensor:
            return self.layer(features)  # type: ignore[no-any-return]  # a module call is Any

    features = x()
    features[1] = math.nan
    model = Model()
    found = blamed(model, reads=reads, call=lambda: model(features=features, padding=torch.zeros(3).bool()))
    assert (found.code, found.position) == ("GG103", "input['features']")
    assert "no module made it" in str(found.origin)


# Parameters and buffers.


@both
def test_a_parameter_that_only_the_parent_reads_is_named(reads: Reads) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok, self.ln = nn.Embedding(4, 4), nn.LayerNorm(4)

        def forward(self, ids: Tensor) -> Tensor:
            return self.ln(F.linear(self.ln(self.tok(ids)), self.tok.weight))  # type: ignore[no-any-return]  # Any

    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with halting(model, optimizer, reads) as halt:
        model(torch.zeros(2, dtype=torch.long)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model.tok.weight[3, 0] = math.nan
        model(torch.zeros(2, dtype=torch.long)).sum().backward()
        optimizer.step()
    found = halt[0]
    assert (found.code, found.parameter, found.module, found.step) == ("GG105", "tok.weight", "tok", 1)
    assert "other than optimizer.step()" in found.seen


@both
def test_a_parameter_poisoned_between_steps_and_never_read_is_not_blamed_on_the_step(reads: Reads) -> None:
    model = nn.Embedding(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with halting(model, optimizer, reads) as halt:
        for step in range(3):
            if step == 1:
                with torch.no_grad():
                    model.weight[3, 0] = math.nan
            model(torch.zeros(2, dtype=torch.long)).sum().backward()
            optimizer.step()
    found = halt[0]
    assert (found.code, found.parameter, found.step) == ("GG105", "weight", 1)


@both
@pytest.mark.parametrize("wrap", [lambda norm: norm, nn.Sequential], ids=["bare", "nested"])
def test_running_statistics_that_took_in_a_bad_batch_are_not_blamed(
    wrap: Callable[[nn.Module], nn.Module], reads: Reads
) -> None:
    found = blamed(Custom(nan, wrap(nn.BatchNorm1d(4))), x(), reads=reads)
    assert (found.code, found.module) == ("GG101", "")


@both
def test_statistics_of_ones_own_that_took_in_a_bad_input_are_not_blamed(reads: Reads) -> None:
    class Ema(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            return x * self.weight

    found = blamed(Custom(nan, Ema()), x(), reads=reads)
    assert (found.code, found.module) == ("GG101", "")


@both
def test_a_bad_buffer_that_evaluation_reads_is_named(reads: Reads) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with halting(model.eval(), None, reads) as halt, torch.no_grad():
        model(x())
        inject_nonfinite(model, "1.running_mean")
        model(x())
    found = halt[0]
    assert (found.code, found.module, found.parameter) == ("GG107", "1", "1.running_mean")
    assert found.evaluation
    assert found.micro_batch is None


# Ways of calling.


class WithMethod(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.encoder, self.decoder, self.between = nn.Linear(4, 4), nn.Linear(4, 4), between

    def encode(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.encoder(x)
        return self.between(hidden)

    def decode(self, hidden: Tensor) -> Tensor:
        return self.decoder(hidden)  # type: ignore[no-any-return]  # a module call is Any

    def run(self, x: Tensor) -> Tensor:
        return self.decoder(self.between(self.encoder(x)))  # type: ignore[no-any-return]  # a module call is Any


def test_a_method_of_the_model_is_the_closest_that_can_be_told() -> None:
    model = WithMethod(nan)
    found = blamed(model, x(), reads="immediate", call=model.run)
    assert (found.code, found.module, found.evidence["after"]) == ("GG101", "", "encoder")
    assert "a method was called" in str(found.origin)


@both
def test_a_bad_batch_handed_to_a_method_is_the_batch(reads: Reads) -> None:
    model, batch = WithMethod(lambda y: y), x() * math.nan
    found = blamed(model, batch, reads=reads, call=model.run)
    assert found.code == "GG103"


@both
def test_code_of_the_loop_between_two_modules_is_no_module(reads: Reads) -> None:
    model = WithMethod(lambda y: y)
    found = blamed(model, x(), reads=reads, call=lambda x: model.decoder(model.encoder(x) * math.nan))
    assert (found.code, found.module, found.position) == ("GG101", None, "input[0] of decoder")
    assert "no module of the model was running" in str(found.origin)


@both
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_parts_are_named_as_any_other(reentrant: bool, reads: Reads) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift = nn.Linear(4, 4)
            self.part = Custom(nan)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.part, self.lift(x), use_reentrant=reentrant)  # type: ignore[no-any-return]  # Any

    found = blamed(Checkpointed(), x(), reads=reads)
    assert (found.module, found.evidence["after"]) == ("part", "part.first")


@both
def test_a_forward_left_by_an_exception_leaves_nothing_behind(reads: Reads) -> None:
    """What was running when it was left is not taken for the caller of what comes next."""

    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.fails = nn.Linear(4, 4), True

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x)
            if self.fails:
                self.fails = False
                raise ValueError("not this time")
            return y

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fragile, self.rest = Fragile(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            try:
                y = self.fragile(x)
            except ValueError:
                y = x
            return self.rest(y * math.nan)  # type: ignore[no-any-return]  # a module call is Any

    found = blamed(Model(), x(), reads=reads)
    assert (found.module, found.evidence["received_by"]) == ("", "rest")


@both
def test_an_ignored_module_that_returned_it_is_named_and_not_its_caller(reads: Reads) -> None:
    model = nn.Sequential(nn.Linear(4, 4), NaNOutput(), nn.Linear(4, 4))
    found = blamed(model, x(), reads=reads, ignore="1")
    assert (found.module, found.evidence["received_by"]) == ("1", "2")
    assert "ignored as asked" in str(found.origin)


@both
def test_inference_mode_and_no_grad_are_watched(reads: Reads) -> None:
    for context in (torch.inference_mode, torch.no_grad):
        model = Custom(nan)
        with halting(model, None, reads) as halt, context():
            model(x())
        assert (halt[0].module, halt[0].evaluation) == ("", True)


@both
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_torchs_own_attention_and_encoder_layers_are_watched(value: float, reads: Reads) -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2, enable_nested_tensor=False)
    with inject_nonfinite(model, "layers.1.linear1", value=value):
        found = blamed(model, torch.randn(2, 3, 4), reads=reads)
    assert (found.code, found.module) == ("GG101", "layers.1.linear1")


@both
def test_softmax_over_a_row_that_is_masked_throughout_is_told(reads: Reads) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qk, self.proj = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            scores = self.qk(x) @ x.mT
            scores = scores.masked_fill(torch.eye(3)[0, :, None].bool(), -math.inf)
            return self.proj(scores.softmax(-1) @ x)  # type: ignore[no-any-return]  # a module call is Any

    found = blamed(nn.Sequential(Attention()), x(), reads=reads)
    assert found.module == "0"
    assert found.causes[0].startswith("Softmax over a row")
    if reads == "immediate":
        assert found.evidence["rows_all_neg_inf"] == 1
        assert "1 row is -inf throughout" in found.seen
