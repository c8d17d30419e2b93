"""ReplicaSync, with two real processes that train together on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

from gpt_guard import Guardian, GuardUsageError
from gpt_guard.callbacks.distributed.replicas import ReplicaSync, checksum
from gpt_guard.catalogue import entry

RANKS = 2
Found = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Findings of rank 0 by scenario; both ranks must have found the same."""
    if not dist.is_gloo_available():
        pytest.skip("this torch has no gloo")
    meeting = tmp_path_factory.mktemp("ranks") / "meeting"
    worker = Path(__file__).with_name("replica_worker.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(worker), str(rank), str(RANKS), str(meeting)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(RANKS)
    ]
    outputs = [rank.communicate(timeout=110) for rank in ranks]
    for rank, (_, errors) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, errors
    first, second = (json.loads(output) for output, _ in outputs)
    assert {name: [each["code"] for each in one] for name, one in first.items()} == {
        name: [each["code"] for each in one] for name, one in second.items()
    }
    assert isinstance(first, dict)
    return first


@pytest.mark.parametrize("name", ["healthy", "clipped_the_same_way"])
def test_replicas_in_step_are_silent(found: Found, name: str) -> None:
    assert found[name] == []


@pytest.mark.parametrize(
    ("name", "codes", "causes"),
    [
        ("no_wrapper", ["GG811", "GG810"], ["not_reduced", "gradients_apart"]),
        ("other_seeds_and_no_wrapper", ["GG810", "GG811"], ["start_apart", "not_reduced"]),
        ("inner_module_called", ["GG811", "GG810"], ["not_reduced", "gradients_apart"]),
        ("last_micro_batch_not_synchronised", ["GG811", "GG810"], ["not_reduced", "gradients_apart"]),
        ("clipped_by_rank", ["GG811", "GG810"], ["changed_after", "gradients_apart"]),
        ("optimizers_differ", ["GG810"], ["optimizer_apart"]),
        ("branch_on_one_rank", ["GG812", "GG810"], ["branch", "gradients_apart"]),
        ("same_data_everywhere", ["GG813"], ["no_sampler"]),
    ],
)
def test_what_is_not_equal_is_told_with_its_cause(found: Found, name: str, codes: list[str], causes: list[str]) -> None:
    told = found[name]
    assert [each["code"] for each in told] == codes
    for each, cause in zip(told, causes, strict=True):
        assert each["causes"][0] == next(one.text for one in entry(each["code"]).causes if one.key == cause)
        assert each["step"] <= 2


def test_the_parameter_with_a_gradient_on_one_rank_is_named(found: Found) -> None:
    told = found["branch_on_one_rank"][0]
    assert told["parameter"] == "extra.weight"
    assert "none on rank 1" in told["seen"]


def test_one_process_is_told_as_not_watched() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Guardian(model, optimizer, guards=[ReplicaSync()], sinks=[]) as guardian:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert guardian.findings == ()
    assert any(
        "ReplicaSync: replicas: this process group has one rank" in each for each in guardian.report().not_watched
    )


@pytest.mark.parametrize(("only", "told"), [("norm.*", True), ("weight", False)])
def test_patterns_that_match_nothing_are_told(only: str, told: bool) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Guardian(model, optimizer, guards=[ReplicaSync(only=only)], sinks=[]) as guardian:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    spots = guardian.report().not_watched
    assert any("no parameter of the model matches only=['norm.*']" in each for each in spots) == told


def test_settings_are_checked() -> None:
    with pytest.raises(GuardUsageError, match="every is 0"):
        ReplicaSync(every=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_a_checksum_feels_values_and_their_order(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0]).to(dtype)
    assert checksum(values) == checksum(values.clone())
    assert checksum(values) != checksum(values.flip(0))
    assert checksum(values) != checksum(torch.zeros_like(values))
