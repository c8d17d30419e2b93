"""What modules hold past torch, in whatever it lies."""

from __future__ import annotations

import torch
from torch import nn

from gpt_guard.hooks.unregistered import held_in, kind_of, plain_attributes, tensors_in


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.registered = nn.Linear(2, 2)
        self.experts = {"a": [nn.Linear(2, 2)], "b": (torch.ones(3),)}
        self.width = 2


def test_registered_modules_and_torchs_own_tables_are_no_plain_attributes() -> None:
    model = nn.Sequential(Holder(), nn.ReLU())
    found = {each.path: each for each in plain_attributes(model) if each.owner is model[0]}
    assert sorted(found) == ["0.experts", "0.width"]
    assert found["0.experts"].owner_path == "0"


def test_what_hidden_modules_hold_past_torch_themselves_is_found_too() -> None:
    inner = Holder()
    found = list(held_in([inner]))
    assert found[0] is inner
    assert sum(isinstance(each, nn.Linear) for each in found) == 2
    assert len(list(tensors_in([inner]))) == 5


def test_a_structure_that_holds_itself_ends() -> None:
    ring: list[object] = [torch.ones(1)]
    ring.append(ring)
    module = Holder()
    module.back = [module]  # type: ignore[assignment]
    assert len(list(tensors_in(ring))) < 10
    assert list(held_in([module]))


def test_kinds_are_told_in_words() -> None:
    assert kind_of([nn.Linear(1, 1), nn.Linear(1, 1)]) == "a list of 2 nn.Linear"
    assert kind_of(torch.ones(1)) == "a plain tensor"
    assert kind_of(torch.ones(1, requires_grad=True) * 2) == "a tensor computed from an nn.Parameter"
