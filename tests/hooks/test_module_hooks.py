"""The tap: which modules it hears, in which order, and what it leaves behind."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.module_hooks import ModuleHooks


class Listener:
    """Counts the calls of the model."""

    def __init__(self) -> None:
        self.began = self.ended = 0

    def forward_begins(self) -> None:
        self.began += 1

    def forward_ended(self, output: Any) -> None:
        self.ended += 1


class Suspects(list[tuple[str, str, bool]]):
    """Collects what fails the cheap test, by the path of its module."""

    def __init__(self, tap: ModuleHooks) -> None:
        super().__init__()
        self.tap = tap

    def __call__(self, index: int, position: str, tensor: Tensor, entering: bool) -> None:
        self.append((self.tap.names[index], position, entering))


def tapped(model: nn.Module, *, immediate: bool = True, ignore: tuple[str, ...] = ()) -> tuple[ModuleHooks, Suspects]:
    tap = ModuleHooks(model, immediate=immediate)
    suspects = Suspects(tap)
    tap.open(Listener())
    tap.watch_outputs(suspects, ignore)
    tap.finish_setup()
    return tap, suspects


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def model_of(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers)


class Nan(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float("nan")


@pytest.mark.parametrize("immediate", [True, False])
def test_modules_are_listed_in_the_order_in_which_they_return(immediate: bool) -> None:
    model = model_of(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Linear(2, 2))
    tap, _ = tapped(model, immediate=immediate)
    model(torch.ones(1, 2))
    assert [tap.names[index] for index in tap.order] == ["0.0", "0.1", "0", "1", ""]
    model(torch.ones(1, 2))
    assert len(tap.order) == 5
    tap.close()


@pytest.mark.parametrize("immediate", [True, False])
def test_closing_takes_every_hook_away_and_may_run_twice(immediate: bool) -> None:
    model = model_of(nn.Linear(2, 2), nn.ReLU(inplace=True), Nan())
    tap, suspects = tapped(model, immediate=immediate, ignore=("0",))
    assert hooks(model)
    tap.close()
    tap.close()
    assert hooks(model) == 0
    model(torch.ones(1, 2))
    assert suspects == []


def test_a_bad_output_is_handed_on_where_it_is_made_and_once() -> None:
    model = model_of(nn.Linear(2, 2), nn.Sequential(nn.Sequential(Nan())))
    tap, suspects = tapped(model)
    model(torch.ones(1, 2))
    assert suspects == [("1.0.0", "", False)]
    tap.close()


def test_the_input_of_an_in_place_layer_is_tested_before_it() -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.relu(x / 0.0)  # type: ignore[no-any-return]  # a module call is Any

    tap, suspects = tapped(Parent())
    tap.model(torch.zeros(2))
    assert suspects[0] == ("relu", "[0]", True)
    tap.close()


def test_a_child_s_output_that_was_written_to_since_is_tested_again() -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x)
            return y.mul_(float("nan"))

    tap, suspects = tapped(Parent())
    tap.model(torch.ones(1, 2))
    assert suspects == [("", "", False)]
    tap.close()


@pytest.mark.parametrize("immediate", [True, False])
def test_recomputation_and_copies_are_not_heard(immediate: bool) -> None:
    model = model_of(nn.Linear(2, 2))
    tap, _ = tapped(model, immediate=immediate)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(torch.ones(1, 2))
    tap.paused = True
    model(torch.ones(1, 2))
    assert (tap.calls, list(tap.order)) == (0, [])
    tap.close()


@pytest.mark.parametrize("immediate", [True, False])
def test_no_activation_is_kept_alive(immediate: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
            self.kept: list[weakref.ref[Tensor]] = []

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
                self.kept.append(weakref.ref(x))
            return x.detach()

    model = Model()
    tap, _ = tapped(model, immediate=immediate)
    model(torch.ones(1, 2))
    gc.collect()
    assert [ref() for ref in model.kept if ref() is not None] == []
    tap.close()


@pytest.mark.parametrize("immediate", [True, False])
def test_what_never_ends_stays_bounded(immediate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules called one by one, the model never."""
    monkeypatch.setattr("gpt_guard.hooks.module_hooks._MOST_RETURNS", 10)
    model = model_of(nn.Linear(2, 2))
    tap, _ = tapped(model, immediate=immediate)
    for _ in range(50):
        model[0](torch.ones(1, 2))
    assert len(tap.order) == 10
    tap.close()


def test_the_inside_of_compiled_modules_is_named_and_left_alone() -> None:
    inner = nn.Sequential(nn.Linear(2, 2))
    in_place = nn.Linear(2, 2)
    in_place.compile(backend="eager")
    wrapper: Any = torch.compile(inner, backend="eager")
    model = model_of(wrapper, in_place, nn.Linear(2, 2))
    tap = ModuleHooks(model, immediate=True)
    assert tap.names == ["", "0", "2"]
    assert tap.inside_compiled == ["0", "1"]
    tap.close()


def test_a_shared_module_appears_once_under_its_first_path() -> None:
    shared = nn.Linear(2, 2)
    tap = ModuleHooks(model_of(shared, nn.Sequential(shared)), immediate=True)
    assert tap.names == ["", "0", "1"]
    tap.close()


@pytest.mark.parametrize("immediate", [True, False])
def test_ignored_modules_are_listed_and_their_outputs_remembered(immediate: bool) -> None:
    model = model_of(nn.Linear(2, 2), Nan(), nn.Linear(2, 2))
    tap, suspects = tapped(model, immediate=immediate, ignore=("1",))
    model(torch.ones(1, 2))
    assert tap.unwatched == {"1 (ignored as asked)"}
    assert "1" in [tap.names[index] for index in tap.order]
    assert ("1", "", False) not in suspects
    tap.close()


def test_a_second_asker_is_refused() -> None:
    tap, _ = tapped(model_of(nn.Linear(2, 2)))
    with pytest.raises(GuardUsageError, match="one FiniteGuard, not two"):
        tap.watch_outputs(lambda *_: None)
    tap.close()


# Where a reading would stall the device.


def test_each_tensor_is_weighed_once_and_packed_by_dtype() -> None:
    class Cast(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.half(), x.double()

    model = model_of(nn.Linear(2, 2), nn.Identity(), Cast())
    tap, _ = tapped(model, immediate=False)
    model(torch.ones(1, 2))
    weighed = tap.extremes.take(tap)
    assert weighed is not None
    places = [(tap.names[place.module], place.entering, place.position) for place in weighed.places]
    assert places == [
        ("", True, "[0]"),
        ("0", False, ""),
        ("2", False, "[0]"),
        ("2", False, "[1]"),
        ("", False, "[0]"),
        ("", False, "[1]"),
    ]
    # The half one is packed as float32, like the others.
    assert [(packed.dtype, packed.numel()) for _, packed in weighed.parts] == [
        (torch.float32, 4),
        (torch.float32, 4),
        (torch.float64, 4),
    ]
    assert tap.extremes.take(tap) is None
    tap.close()


def test_alike_forwards_share_their_places() -> None:
    model = model_of(nn.Linear(2, 2))
    tap, _ = tapped(model, immediate=False)
    taken = []
    for _ in range(2):
        model(torch.ones(1, 2))
        taken.append(tap.extremes.take(tap))
    first, second = taken
    assert first is not None
    assert second is not None
    assert all(one is other for one, other in zip(first.places, second.places, strict=True))
    tap.close()
