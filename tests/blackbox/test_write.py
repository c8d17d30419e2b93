"""How a bundle is written: whole or absent, plain data only, within its limit, and honest about what it lacks."""

from __future__ import annotations

import enum
import os
import signal
import subprocess
import sys
from collections import OrderedDict, UserDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpt_guard import Guardian
from gpt_guard.blackbox.bundle import read_bundle
from gpt_guard.blackbox.replay import replay
from gpt_guard.blackbox.stored import FileName
from gpt_guard.blackbox.write import Plain, host_copy, whole_folder
from gpt_guard.errors import GuardError, GuardUsageError

from .conftest import Fail, built
from .failing_models import LogOfZero

Pair = namedtuple("Pair", "x y")


class Level(enum.IntEnum):
    LOW = 1


def half_written(target: Path) -> None:
    with whole_folder(target) as folder:
        (folder / "first").write_text("1")
        assert not target.exists()
        _ = 1 / 0


def test_a_folder_takes_its_name_only_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "new" / "bundle"
    with pytest.raises(ZeroDivisionError):
        half_written(target)
    assert list((tmp_path / "new").iterdir()) == []
    with whole_folder(target) as folder:
        (folder / "first").write_text("1")
    assert (target / "first").read_text() == "1"
    assert [path.name for path in target.parent.iterdir()] == ["bundle"]


@pytest.mark.parametrize("filled", [True, False])
def test_a_folder_that_is_there_is_not_replaced(tmp_path: Path, filled: bool) -> None:
    target = tmp_path / "bundle"
    target.mkdir()
    if filled:
        (target / "mine").write_text("1")
    with pytest.raises(OSError, match="exists"), whole_folder(target) as folder:
        (folder / "first").write_text("1")
    assert [path.name for path in target.iterdir()] == (["mine"] if filled else [])
    assert len(list(tmp_path.iterdir())) == 1


def test_a_process_that_is_killed_in_between_leaves_no_bundle(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, pathlib\n"
        "from gpt_guard.blackbox.write import whole_folder\n"
        "with whole_folder(pathlib.Path(sys.argv[1]) / 'crash-step-000001') as folder:\n"
        "    (folder / 'manifest.json').write_text('{}')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not list(tmp_path.glob("crash-*"))
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".gpt_guard-")


def test_an_interrupt_while_it_is_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    model = built("log")
    with pytest.raises(KeyboardInterrupt), Guardian(model, run_dir=tmp_path, sinks=[]):
        model(-torch.ones(2, 4))
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


@pytest.mark.parametrize(
    ("limit", "left_out"),
    [
        (0.0, ["batch.pt", "model.pt", "optimizer.pt"]),
        (60 / 2**20, ["model.pt", "optimizer.pt"]),
        (200 / 2**20, ["optimizer.pt"]),
        (1.0, []),
    ],
)
def test_over_its_limit_it_says_what_it_left_out(fail: Fail, limit: float, left_out: list[str]) -> None:
    failed = fail("log", bundle_limit_mb=limit)
    bundle = failed.bundle
    assert bundle.has(FileName.RNG)
    assert [name for name in ("batch.pt", "model.pt", "optimizer.pt") if not bundle.has(FileName(name))] == left_out
    for name in left_out:
        assert "bundle_limit_mb" in str(bundle.why_absent(FileName(name)))
    model = failing_weights(LogOfZero())
    if "batch.pt" in left_out:
        with pytest.raises(GuardUsageError, match="the inputs are not in the bundle"):
            replay(bundle, model)
        return
    done = replay(bundle, model)
    assert done.same
    assert ("the model's own weights were used" in " ".join(done.notes)) == ("model.pt" in left_out)


def failing_weights(model: LogOfZero) -> LogOfZero:
    model.load_state_dict({**built("log").state_dict(), "head.weight": model.head.weight})
    return model


def test_a_slice_of_a_large_tensor_is_stored_alone_with_its_strides() -> None:
    data = torch.arange(10_000.0).reshape(100, 100)
    part = data[3:5, 10:20]
    copy = host_copy(part)
    assert torch.equal(copy, part)
    assert copy.stride() == part.stride()
    assert copy.untyped_storage().nbytes() < 1000
    rows = data[:, :-1]
    assert host_copy(rows).data_ptr() == rows.data_ptr()  # most of its storage: nothing is copied


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, 1).expand(3, 1000),
        torch.arange(12.0).reshape(3, 4).t(),
        torch.zeros(0, 3),
        torch.tensor(2),
        torch.complex(torch.ones(2), torch.ones(2)).conj(),
        torch.eye(3).to_sparse(),
        torch.ones(2, requires_grad=True),
        torch.ones(2, dtype=torch.bfloat16),
    ],
)
def test_tensors_of_any_kind_come_back_as_they_were(tmp_path: Path, tensor: Tensor) -> None:
    torch.save(Plain().take({"x": tensor}, "kwargs"), tmp_path / "x.pt")
    back = torch.load(tmp_path / "x.pt", weights_only=True)["x"]
    assert torch.equal(back.to_dense(), tensor.detach().resolve_conj().to_dense())
    assert back.dtype == tensor.dtype
    assert back.requires_grad == tensor.requires_grad
    assert (tmp_path / "x.pt").stat().st_size < 5000


def test_plain_values_are_kept_and_others_are_named(tmp_path: Path) -> None:
    plain = Plain()
    shared = torch.ones(2)
    value = {
        "number": 1.5,
        "level": Level.LOW,
        "names": ["a", ("b", None)],
        "dtype": torch.float16,
        "ordered": OrderedDict(a=shared),
        "pair": Pair(shared, 2),
        "user": UserDict({"ids": shared}),
        "set": {1, 2},
        "object": object(),
        "call": [len, shared],
        ("tuple",): 1,
        "meta": torch.empty(2, device="meta"),
    }
    torch.save(plain.take(value, "kwargs"), tmp_path / "x.pt")
    back = torch.load(tmp_path / "x.pt", weights_only=True)
    assert back["names"] == ["a", ("b", None)]
    assert back["level"] == 1
    assert type(back["level"]) is int
    assert back["dtype"] is torch.float16
    assert back["ordered"]["a"] is back["pair"][0] is back["user"]["ids"]
    assert back["set"] == {1, 2}
    assert back["object"] is None
    assert sorted(plain.holes) == sorted(
        ["kwargs['object']", "kwargs['call'][0]", "kwargs[('tuple',)]", "kwargs['meta']"]
    )
    assert any("Pair" in str(each) and "kept as a tuple" in str(each) for each in plain.left_out)


def test_what_contains_itself_ends() -> None:
    endless: list[Any] = []
    endless.append(endless)
    plain = Plain()
    plain.take(endless, "args")
    assert len(plain.holes) == 1
    assert "nested too deep" in str(plain.left_out[0])


class Graph:
    """A batch of the user's own kind."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class OnGraphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)

    def forward(self, graph: Graph, scale: float = 1.0) -> Tensor:
        output: Tensor = self.body(torch.log(graph.x)) * scale
        return output


def test_a_batch_of_objects_is_named_not_pickled_and_can_be_given(tmp_path: Path) -> None:
    model = OnGraphs()
    graph = Graph(-torch.ones(2, 2))
    with pytest.raises(GuardError) as caught, Guardian(model, run_dir=tmp_path, sinks=[]):
        model(graph, scale=2.0)
    bundle = read_bundle(str(caught.value.finding.bundle))
    assert bundle.manifest.holes == ("args[0]",)
    assert any("pickled" in str(each) for each in bundle.manifest.left_out)
    with pytest.raises(GuardUsageError, match=r"args\[0\] is no plain data.*args=\.\.\."):
        replay(bundle, OnGraphs())
    assert replay(bundle, OnGraphs(), args=[graph], kwargs={"scale": 2.0}).same


def test_every_file_of_tensors_loads_as_plain_data(fail: Fail) -> None:
    failed = fail("sqrt")
    files = sorted(failed.path.glob("*.pt"))
    assert [file.name for file in files] == ["batch.pt", "model.pt", "optimizer.pt", "output_gradients.pt", "rng.pt"]
    for file in files:
        assert isinstance(torch.load(file, weights_only=True), dict)
    assert os.listdir(failed.path).count("manifest.json") == 1
