"""An output that has waited for the next module: the same module and the same line are told as in a full step."""

from __future__ import annotations

import gc
import math
from contextlib import ExitStack, closing
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from gpt_guard.hooks.pace import Pace
from gpt_guard.testing import inject_nonfinite

from . import waiting_kit
from .waiting_kit import FAULT, WIDTH, Fault, Net, halted, nothing, setting, spoil, told, train


@pytest.fixture(autouse=True)
def soon_light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Light steps after three full ones."""
    monkeypatch.setattr(Pace, "first", 3)
    torch.manual_seed(0)


LINES = {
    "inp": "x = self.inp(x)",
    "blocks.0.ln": "y = self.ln(x)",
    "blocks.0.up": "y = self.up(y)",
    "blocks.1.down": "y = self.down(y)",
    "seq.0": "x = self.seq(x)",
    # Its sequence is over when it is tested.
    "seq.1": "x = self.seq(x)",
    "head": "return self.head(x)",
}


@pytest.mark.parametrize("path", LINES)
@pytest.mark.parametrize("full", [False, True], ids=["light", "full"])
def test_the_module_whose_products_overflow(path: str, full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if full:
        monkeypatch.setattr(Pace, "first", 100)
    found = halted(Net(), spoil(path))
    assert (found.code, found.step, found.module) == ("GG101", FAULT, path)
    assert found.where is not None
    assert found.where.file == waiting_kit.__file__
    assert found.where.text.startswith(LINES[path])


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("path", ["blocks.0.up", "blocks.0.act", "blocks.1.drop", "blocks.0", "seq.1"])
def test_a_number_put_into_an_output(path: str, value: float) -> None:
    with ExitStack() as faults:
        model = Net()
        found = halted(model, lambda _: faults.enter_context(inject_nonfinite(model, path, value=value, call=0)))
    assert (found.code, found.step, found.module) == ("GG101", FAULT, path)


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (setting("blocks.0", "scale", math.nan), ("blocks.0", "blocks.0.ln", "y = self.ln(x)")),
        (setting("blocks.1", "scale", math.inf), ("blocks.1", "blocks.1.ln", "y = self.ln(x)")),
        (setting("blocks.0", "between", lambda y: y / 0), ("blocks.0", "blocks.0.act", "y = self.act(y)")),
    ],
    ids=["before a chain", "before the second", "inside of one"],
)
def test_code_between_the_modules(fault: Fault, named: tuple[str, str, str]) -> None:
    assert told(halted(Net(), fault)) == ("GG101", FAULT, *named)


class Nested(nn.Module):
    """Calls one of its own kind with what its norm has returned."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.ln, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.child = Nested(depth - 1) if depth else self.last
        self.broken = False

    def forward(self, x: Tensor) -> Tensor:
        if self.broken:
            x = x / 0
        y = self.ln(x)
        return self.child(y)  # type: ignore[no-any-return]  # a call of a module is Any


@pytest.mark.parametrize("path", ["", "child", "child.child"])
def test_code_of_a_block_inside_of_its_own_kind(path: str) -> None:
    inside = f"{path}.ln".lstrip(".")
    found = halted(Nested(2), setting(path, "broken", True))
    assert told(found) == ("GG101", FAULT, path, inside, "y = self.ln(x)")


def test_written_in_place_meanwhile_it_still_halts_and_is_not_called_certain() -> None:
    found = halted(Net(), setting("blocks.0", "between", lambda y: y.mul_(math.nan)))
    assert (found.code, found.step, found.module) == ("GG101", FAULT, "blocks.0.up")
    sure = "its inputs and its parameters are finite"
    assert sure not in (found.origin or sure)
    assert sure in (halted(Net(), spoil("blocks.0.up")).origin or "")


def test_a_cleaning_hook_on_the_next_module_hides_nothing() -> None:
    def fault(model: Net) -> None:
        model.get_submodule("blocks.0.act").register_forward_hook(lambda _m, _args, out: out.nan_to_num(0.0, 0.0, 0.0))
        spoil("blocks.0.up")(model)

    found = halted(Net(), fault)
    assert (found.step, found.module) == (FAULT, "blocks.0.up")


class Leaves(nn.Module):
    """Raises half-way when told to; `held` are its intermediate results."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 4)
        self.held: list[ref[Tensor]] = []
        self.raises = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        self.held.append(ref(y))
        y = self.act(y)
        self.held.append(ref(y))
        if self.raises:
            self.raises = False
            raise ValueError("half-way")
        return self.down(y)  # type: ignore[no-any-return]  # a call of a module is Any

    def leave(self) -> None:
        self.raises = True
        with pytest.raises(ValueError, match="half-way"):
            self(torch.randn(5, WIDTH))

    @property
    def alive(self) -> int:
        return sum(each() is not None for each in self.held)


def test_nothing_is_held_after_a_step_an_exception_and_exit() -> None:
    model = Leaves()
    gc.disable()
    try:
        loop = train(model, Leaves.leave)
        assert [model.alive for _ in loop] == [0] * (FAULT + 4)
        with closing(train(model, nothing)) as loop:
            assert FAULT in loop
            model.leave()
        assert model.alive == 0
    finally:
        gc.enable()


def test_what_a_forward_has_made_that_was_left_half_way_is_told_by_the_next() -> None:
    def fault(model: Leaves) -> None:
        before = model.up.weight.detach().clone()
        spoil("up")(model)
        model.leave()
        with torch.no_grad():
            model.up.weight.copy_(before)
            model.up.bias.zero_()

    found = halted(Leaves(), fault)
    assert (found.code, found.step, found.module) == ("GG101", FAULT, "up")


def test_two_guardians_name_the_same() -> None:
    found = halted(Net(), setting("blocks.0", "scale", math.nan), guardians=2)
    assert told(found) == ("GG101", FAULT, "blocks.0", "blocks.0.ln", "y = self.ln(x)")


class Fill(nn.Module):
    value = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.full_like(x, self.value)


@pytest.mark.parametrize("value", [-math.inf, 1e38], ids=["a mask", "a sum that overflows"])
def test_what_is_not_bad_stays_quiet_while_it_waits(value: float) -> None:
    model = nn.Sequential(Fill(), nn.ReLU(), nn.Linear(WIDTH, 4))
    weight = model.get_parameter("2.weight").requires_grad_(False)
    weight.fill_(1e-38)
    assert len(list(train(model, setting("0", "value", value), steps=FAULT + 1))) == FAULT + 1
