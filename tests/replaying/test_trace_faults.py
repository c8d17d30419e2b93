"""Each cause in the table is told by its operation, its module, its line, and first among the causes."""

from __future__ import annotations

import pytest
import torch

from gpt_guard.records import OperationSeen
from gpt_guard.replaying.trace import Trace

from . import faults_backward, faults_numbers, faults_tensors
from .parts import MARK, Fault, Net

FAULTS = (*faults_numbers.FAULTS, *faults_tensors.FAULTS, *faults_backward.FAULTS)

CASES = [
    pytest.param(fault, dtype, id=f"{fault.function.__name__}-{str(dtype).removeprefix('torch.')}")
    for fault in FAULTS
    for dtype in fault.dtypes
]


def told(fault: Fault, dtype: torch.dtype) -> tuple[OperationSeen | None, Trace]:
    model = Net(fault.function, dtype)
    with Trace(model) as trace:
        loss = model(torch.randn(3, 4)).float().mean()
        if fault.phase != "forward":
            assert bool(loss.isfinite())
            loss.backward()
    found = trace.origin(loss) if fault.phase == "forward" else trace.origin_of_gradient(model.lin.weight)
    return found, trace


@pytest.mark.filterwarnings("ignore:std..:UserWarning")
@pytest.mark.parametrize(("fault", "dtype"), CASES)
def test_the_place_and_the_cause(fault: Fault, dtype: torch.dtype) -> None:
    found, trace = told(fault, dtype)
    assert found is not None
    assert trace.skipped == {}
    assert (found.kind, found.name, found.module, found.module_class) == ("operation", fault.word, "part", "Part")
    assert found.where is not None
    assert found.where.text.endswith(MARK), found.where
    assert (found.where.file, found.where.line) == (fault.function.__code__.co_filename, fault.line)
    assert found.phase == ("forward" if fault.phase == "again" else fault.phase)
    assert found.cause == fault.cause, (found.shows, [cause.key for cause in found.causes])


@pytest.mark.filterwarnings("ignore:std..:UserWarning")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.function.__name__)
def test_without_a_tensor_at_hand_the_first_in_time_is_the_same(fault: Fault) -> None:
    found, trace = told(fault, fault.dtypes[0])
    assert found is not None
    first = trace.first()
    assert first is not None
    assert (first.name, first.where, first.cause) == (found.name, found.where, found.cause)
