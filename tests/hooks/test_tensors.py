"""Tensors in structures, and exact statistics of every kind that can be tested."""

from __future__ import annotations

import math
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from gpt_guard.hooks.tensors import describe, is_bad, kind_of, looks_bad, readable, total, version_of, walk, watchable

NAN, INF = math.nan, math.inf


@dataclass
class Output:
    loss: Tensor
    hidden: tuple[Tensor, ...]


class Opaque:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self.other = logits


Pair = namedtuple("Pair", "first second")


def test_tensors_are_found_with_their_position() -> None:
    t = torch.ones(1)
    cases: list[tuple[Any, list[str]]] = [
        (t, [""]),
        ((t, [t, None]), ["[0]", "[1][0]"]),
        ({"a": t, 3: (t,)}, ["['a']", "[3][0]"]),
        (OrderedDict(loss=t), ["['loss']"]),
        (Output(t, (t,)), [".loss", ".hidden[0]"]),
        (Pair(t, 1), [".first"]),
        (Opaque(t), [".logits"]),
        (torch.nn.utils.rnn.pack_sequence([t]), [".data", ".batch_sizes"]),
        (None, []),
        ("text", []),
        (Output, []),
    ]
    for value, positions in cases:
        assert [position for position, _ in walk(value)] == positions


def test_a_list_that_holds_itself_ends() -> None:
    endless: list[Any] = [torch.ones(1)]
    endless.append(endless)
    assert len(list(walk(endless))) == 8


def test_a_long_list_of_numbers_is_not_walked() -> None:
    class Counted(list[Any]):
        steps = 0

        def __iter__(self) -> Any:
            Counted.steps += 1
            return super().__iter__()

    assert list(walk(Counted([0.5] * 1000))) == []
    assert Counted.steps == 0
    assert len(list(walk([torch.ones(1)] * 1000))) == 1000


def test_counts_are_exact() -> None:
    values = torch.tensor([[1.0, NAN, INF], [-INF, 5.0, -2.0], [0.0, 0.0, NAN]])
    stats = describe(values)
    assert stats is not None
    assert (stats.nan, stats.pos_inf, stats.neg_inf, stats.bad, stats.numel) == (2, 1, 1, 4, 9)
    assert (stats.finite_min, stats.finite_max) == (-2.0, 5.0)
    assert (stats.first_bad, stats.bad_rows, stats.bad_row_count) == ((0, 1), (0, 1, 2), 3)
    assert (stats.shape, stats.dtype, stats.device) == ((3, 3), "float32", "cpu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2])
def test_every_float_type_is_described(dtype: torch.dtype) -> None:
    stats = describe(torch.tensor([1.0, NAN, 2.0]).to(dtype))
    assert stats is not None
    assert (stats.nan, stats.first_bad, stats.finite_max) == (1, (1,), 2.0)
    assert describe(torch.ones(3).to(dtype)) is None


def test_a_complex_element_counts_once() -> None:
    values = torch.complex(torch.tensor([1.0, NAN, 3.0]), torch.tensor([INF, NAN, 4.0]))
    for tensor in (values, values.conj()):
        stats = describe(tensor)
        assert stats is not None
        assert (stats.numel, stats.nan, stats.pos_inf + stats.neg_inf, stats.first_bad) == (3, 1, 1, (0,))
        assert stats.bad_rows == (0, 1)


def test_of_a_sparse_tensor_the_stored_values_are_described() -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([1.0, NAN]), (5,), check_invariants=False)
    stats = describe(sparse)
    assert stats is not None
    assert (stats.shape, stats.numel, stats.nan, stats.first_bad) == ((5,), 2, 1, None)


def test_a_scalar_and_an_empty_tensor() -> None:
    stats = describe(torch.tensor(NAN))
    assert stats is not None
    assert (stats.first_bad, stats.bad_rows, stats.finite_min) == ((), (), None)
    assert describe(torch.zeros(0, 3)) is None


def test_a_mask_is_described_and_not_bad() -> None:
    mask = torch.tensor([0.0, -INF])
    assert describe(mask) is not None
    assert looks_bad(mask) is None
    assert looks_bad(torch.tensor([0.0, INF])) is not None
    assert not is_bad(-INF, 0.0)
    assert is_bad(0.0, INF)
    assert is_bad(NAN, NAN)


def test_what_has_no_values_to_test() -> None:
    assert readable(torch.ones(3, dtype=torch.long)) is None
    assert readable(torch.ones(3) > 0) is None
    assert describe(torch.ones(3, dtype=torch.long)) is None


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_cannot_be_tested_is_named() -> None:
    with FakeTensorMode():
        fake = torch.ones(2)
    kinds = {
        "meta": torch.ones(2, device="meta"),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8),
        "fake": fake,
    }
    for kind, tensor in kinds.items():
        assert not watchable(tensor)
        assert kind_of(tensor) == kind
        assert describe(tensor) is None


def test_inside_of_a_transform_there_are_no_values() -> None:
    kinds = []

    def look(row: Tensor) -> Tensor:
        kinds.append((watchable(row), kind_of(row)))
        return row

    torch.vmap(look)(torch.ones(2, 3))
    assert kinds == [(False, "torch.func")]


def test_half_types_are_summed_wider() -> None:
    assert total(torch.full((10,), 60000.0, dtype=torch.float16)).item() == 600000.0
    assert math.isnan(total(torch.tensor([1.0, NAN], dtype=torch.bfloat16)).item())


def test_an_inference_tensor_counts_no_writes() -> None:
    written = torch.ones(2)
    written.add_(1)
    with torch.inference_mode():
        inference = torch.ones(2)
    assert (version_of(written), version_of(inference)) == (1, -1)
