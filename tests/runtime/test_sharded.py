"""Under fully_shard nothing that belongs to the wrapper is touched, and what cannot be seen is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpt_guard.hooks.tensors import describe, is_freed, readable

WORKER = Path(__file__).parent / "sharded_worker.py"


def ranks(count: int, scenario: str, folder: Path) -> list[dict[str, Any]]:
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(count), str(folder / "store"), scenario],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    answers = []
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        answers.append(json.loads(out.splitlines()[-1]))
    return answers


@pytest.mark.parametrize("count", [1, 2])
def test_a_healthy_training_is_silent_and_the_bare_one(count: int, tmp_path: Path) -> None:
    for seen in ranks(count, "healthy", tmp_path):
        assert seen["findings"] == []
        assert seen["bit_identical"]
        assert any("ModelProbe: all questions" in each for each in seen["not_watched"])
        assert any("the whole gradient norm" in each for each in seen["not_watched"]) is (count > 1)


@pytest.mark.parametrize(("scenario", "code"), [("output", "GG101"), ("loss", "GG102")])
def test_what_goes_bad_halts_before_the_update_and_is_told_as_what_it_is(
    scenario: str, code: str, tmp_path: Path
) -> None:
    (seen,) = ranks(1, scenario, tmp_path)
    assert (seen["halted"]["code"], seen["halted"]["step"]) == (code, 4)
    assert "was finite" not in seen["halted"]["seen"]
    assert all(bool(torch.tensor(each).isfinite().all()) for each in seen["weights"])


def test_memory_that_was_given_back_is_not_read() -> None:
    tensor = nn.Parameter(torch.ones(4, 4))
    assert not is_freed(tensor)
    assert readable(tensor) is not None
    tensor.untyped_storage().resize_(0)
    assert is_freed(tensor)
    assert readable(tensor) is None
    assert describe(tensor) is None
