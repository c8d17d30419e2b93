"""RestoreWatch: what is loaded restores what it should, or is told; healthy loads are silent and leave no hook."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpt_guard import Finding, Guardian, RestoreWatch, Severity

CODES = {"GG730", "GG731", "GG732", "GG733", "GG734"}


class Net(nn.Module):
    """Two layers of one shape, made in the order that is asked for, behind a norm with statistics."""

    def __init__(self, order: tuple[str, ...] = ("first", "second")) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.body = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in order})

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body["second"](self.body["first"](self.norm(x)).tanh())
        return out


Optimizer = torch.optim.Optimizer
Do = Callable[[nn.Module, Optimizer], None]


def train(model: nn.Module, optimizer: Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()


def said(do: Do, model: nn.Module | None = None, optimizer: Optimizer | None = None) -> list[Finding]:
    model = Net() if model is None else model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3) if optimizer is None else optimizer
    before = _hooks(model, optimizer)
    with Guardian(model, optimizer, sinks=[], summary=False) as guardian:
        train(model, optimizer)
        do(model, optimizer)
    assert _hooks(model, optimizer) == before
    return [each for each in guardian.findings if each.code in CODES]


def _hooks(model: nn.Module, optimizer: Optimizer) -> list[int]:
    held = [
        (each._state_dict_pre_hooks, each._load_state_dict_pre_hooks, each._load_state_dict_post_hooks)
        for each in model.modules()
    ]
    theirs: Any = optimizer
    tables = theirs._optimizer_load_state_dict_pre_hooks, theirs._optimizer_load_state_dict_post_hooks
    return [len(table) for each in (*held, tables) for table in each]


# A snapshot that is no copy.


@pytest.mark.parametrize(
    "kept",
    [lambda state: state, lambda state: dict(state), lambda state: state.copy(), copy.copy],
    ids=["state_dict()", "dict()", ".copy()", "copy.copy()"],
)
def test_a_live_snapshot_is_named_at_the_load(kept: Callable[[Any], Any]) -> None:
    def do(model: nn.Module, optimizer: Optimizer) -> None:
        best = kept(model.state_dict())
        train(model, optimizer)
        model.load_state_dict(best)

    (found,) = said(do)
    assert (found.code, found.severity, found.step) == ("GG730", Severity.ERROR, 6)
    assert "asked for at step 3, and 3 steps have changed it since" in found.seen
    assert found.where is not None
    assert found.where.text == "model.load_state_dict(best)"


@pytest.mark.parametrize(
    "kept",
    [
        copy.deepcopy,
        lambda state: {name: each.clone() for name, each in state.items()},
        lambda state: {name: each.cpu().double() for name, each in state.items()},
    ],
    ids=["deepcopy", "clone", "another dtype"],
)
def test_a_copy_is_silent(kept: Callable[[Any], Any]) -> None:
    def do(model: nn.Module, optimizer: Optimizer) -> None:
        best = kept(model.state_dict())
        train(model, optimizer)
        model.load_state_dict(best)

    assert said(do) == []


def test_a_file_and_an_average_are_silent() -> None:
    def do(model: nn.Module, optimizer: Optimizer) -> None:
        average = torch.optim.swa_utils.AveragedModel(model)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        train(model, optimizer)
        average.update_parameters(model)
        own = copy.deepcopy(model.state_dict())
        model.load_state_dict(average.module.state_dict())
        model.load_state_dict(own)
        file.seek(0)
        model.load_state_dict(torch.load(file))

    assert said(do) == []


def test_loading_ones_own_state_at_once_is_silent() -> None:
    assert said(lambda model, _: model.load_state_dict(model.state_dict()) and None) == []


# With strict=False.


def renamed(change: Callable[[str], str]) -> Do:
    def do(model: nn.Module, optimizer: Optimizer) -> None:
        model.load_state_dict({change(name): each.clone() for name, each in model.state_dict().items()}, strict=False)

    return do


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "base_model.model."])
def test_a_prefix_that_keeps_all_names_out_is_named(prefix: str) -> None:
    (found,) = said(renamed(lambda name: prefix + name))
    assert (found.code, found.severity) == ("GG731", Severity.ERROR)
    assert f"The given names begin with `{prefix}`, and fit without it." in found.seen
    assert found.causes[0].startswith("The names carry the prefix of a wrapper")


def test_a_prefix_that_the_given_names_lack() -> None:
    model = nn.Sequential(Net())
    (found,) = said(renamed(lambda name: name.removeprefix("0.")), model)
    assert "The model's names begin with `0.`" in found.seen


def test_a_whole_checkpoint_in_the_place_of_its_weights() -> None:
    def do(model: nn.Module, optimizer: Optimizer) -> None:
        checkpoint: dict[str, Any] = {"model": model.state_dict(), "step": 3}
        model.load_state_dict(checkpoint, strict=False)

    (found,) = said(do)
    assert found.causes[0].startswith("What was given is the whole checkpoint")


def test_a_part_that_is_loaded_by_itself() -> None:
    def do(model: nn.Module, optimizer: Optimizer) -> None:
        body = model.get_submodule("body")
        body.load_state_dict({f"module.{name}": each for name, each in body.state_dict().items()}, strict=False)

    (found,) = said(do)
    assert "into `body`" in found.seen


def partly(model: nn.Module, _: Optimizer) -> None:
    model.load_state_dict({"norm.weight": torch.ones(4)}, strict=False)


def without_a_head(model: nn.Module, _: Optimizer) -> None:
    state = {name: each.clone() for name, each in model.state_dict().items() if "second" not in name}
    model.load_state_dict({**state, "head.weight": torch.ones(3)}, strict=False)


def tried_strictly_first(model: nn.Module, _: Optimizer) -> None:
    state = {f"module.{name}": each.clone() for name, each in model.state_dict().items()}
    try:
        model.load_state_dict(state)
    except RuntimeError:
        model.load_state_dict({name.removeprefix("module."): each for name, each in state.items()})


@pytest.mark.parametrize("do", [partly, without_a_head, tried_strictly_first])
def test_an_adapter_a_body_and_a_second_try_are_silent(do: Do) -> None:
    assert said(do) == []


# The state of an optimizer.


def saved(order: tuple[str, ...], *, named: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    model = Net(order)
    given: Any = model.named_parameters() if named else model.parameters()
    optimizer = torch.optim.Adam(given, lr=1e-3)
    train(model, optimizer)
    return copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize("named", [False, True])
def test_moments_that_go_to_another_parameter_of_the_same_shape(named: bool) -> None:
    weights, moments = saved(("second", "first"), named=named)
    model = Net()
    given: Any = model.named_parameters() if named else model.parameters()

    def do(model: nn.Module, optimizer: Optimizer) -> None:
        if not named:
            model.load_state_dict(weights)
        optimizer.load_state_dict(moments)

    (found,) = said(do, model, torch.optim.Adam(given, lr=1e-3))
    assert found.code == "GG732"
    assert found.severity is (Severity.ERROR if named else Severity.WARNING)
    assert "was `body.second.weight` and is `body.first.weight` now" in found.seen


@pytest.mark.parametrize("named", [False, True])
def test_the_same_order_is_silent(named: bool) -> None:
    weights, moments = saved(("first", "second"), named=named)
    model = Net()
    given: Any = model.named_parameters() if named else model.parameters()

    def do(model: nn.Module, optimizer: Optimizer) -> None:
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
        train(model, optimizer)

    assert said(do, model, torch.optim.Adam(given, lr=1e-3)) == []


def test_groups_in_the_same_order_are_silent() -> None:
    def grouped(model: nn.Module) -> Optimizer:
        decay = [each for each in model.parameters() if each.dim() > 1]
        rest = [each for each in model.parameters() if each.dim() == 1]
        groups: list[dict[str, Any]] = [{"params": decay}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-3)

    other = Net()
    theirs = grouped(other)
    train(other, theirs)
    model = Net()

    def do(model: nn.Module, optimizer: Optimizer) -> None:
        model.load_state_dict(copy.deepcopy(other.state_dict()))
        optimizer.load_state_dict(theirs.state_dict())

    assert said(do, model, grouped(model)) == []


def test_hyperparameters_that_a_load_replaces_are_noted_with_both_values() -> None:
    def do(model: nn.Module, optimizer: Optimizer) -> None:
        other = torch.optim.Adam(model.parameters(), lr=0.1, betas=(0.5, 0.9))
        optimizer.load_state_dict(other.state_dict())

    (found,) = said(do)
    assert (found.code, found.severity) == ("GG733", Severity.INFO)
    assert "lr 0.001 -> 0.1" in found.seen
    assert "betas (0.9, 0.999) -> (0.5, 0.9)" in found.seen


def test_the_rate_of_a_schedule_under_way_is_restored_without_a_word() -> None:
    def do(model: nn.Module, optimizer: Optimizer) -> None:
        other = torch.optim.Adam(model.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.ExponentialLR(other, gamma=0.5)
        other.step()
        schedule.step()
        optimizer.load_state_dict(other.state_dict())

    assert said(do) == []


@pytest.mark.parametrize("when", ["before", "inside"])
def test_state_on_another_device_is_named_before_the_step_that_raises(when: str) -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)
    train(model, optimizer)

    def spoil() -> None:
        for state in optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].to("meta")

    if when == "before":
        spoil()
    else:
        optimizer.register_load_state_dict_post_hook(lambda _: spoil())
    with Guardian(model, optimizer, guards=[RestoreWatch()], sinks=[], summary=False) as guardian:
        if when == "inside":
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        with contextlib.suppress(RuntimeError):
            train(model, optimizer, 1)
    found = guardian.findings[0]
    assert (found.code, found.parameter) == ("GG734", "norm.weight")
    assert "`exp_avg` of `norm.weight` is on meta and the parameter on cpu" in found.seen


def test_an_optimizer_without_such_hooks_is_named_as_not_watched() -> None:
    model = Net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer._optimizer_load_state_dict_pre_hooks = None
    guard = RestoreWatch()
    with Guardian(model, optimizer, guards=[guard], sinks=[], summary=False) as guardian:
        train(model, optimizer)
    assert any("what is loaded into SGD" in each for each in guardian.report().not_watched)
