from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gpt_guard.checkpoint import load_checkpoint, save_checkpoint
from gpt_guard.errors import CheckpointError, GuardUsageError
from gpt_guard.records import Finding, Severity
from mini_gpt import MiniGPT

Build = Callable[..., MiniGPT]


def names(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.iterdir())


@pytest.mark.parametrize(("value", "words"), [(float("nan"), "2 NaN of 16"), (float("inf"), "2 +inf of 16")])
def test_weights_that_are_not_finite_are_refused_by_name_and_count(
    path: Path, build: Build, value: float, words: str
) -> None:
    save_checkpoint(path, build(), step=1)
    before = path.read_bytes()
    model = build()
    with torch.no_grad():
        model.get_parameter("blocks.1.mlp_norm.weight")[3:5] = value
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(path, model, step=2)
    finding = caught.value.finding
    assert finding.code == "GG706"
    assert (finding.parameter, finding.module) == ("blocks.1.mlp_norm.weight", "blocks.1.mlp_norm")
    assert words in finding.seen
    assert "left as it was" in finding.seen
    assert "single tensor" in finding.causes[0]
    assert path.read_bytes() == before
    assert names(path.parent) == [path.name]


def test_all_spoiled_weights_are_counted(path: Path, build: Build) -> None:
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    with pytest.raises(CheckpointError, match="and 25 more") as caught:
        save_checkpoint(path, model)
    assert len(caught.value.finding.evidence["non_finite"]) == len(model.state_dict())  # type: ignore[arg-type]  # a dict
    assert "not finite was applied" in caught.value.finding.causes[0]
    assert names(path.parent) == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e5m2])
def test_finite_weights_of_any_size_and_dtype_are_saved(path: Path, dtype: torch.dtype) -> None:
    model = nn.Module()
    largest = 60000.0 if dtype in (torch.float16, torch.float8_e5m2) else 3e38
    model.weight = nn.Parameter(torch.full((4, 4), largest).to(dtype), requires_grad=False)
    model.register_buffer("empty", torch.empty(0, dtype=dtype))
    save_checkpoint(path, model)
    bad = torch.full((4, 4), float("nan")).to(dtype)
    model.weight = nn.Parameter(bad, requires_grad=False)
    with pytest.raises(CheckpointError, match="not finite"):
        save_checkpoint(path, model)


def test_a_mask_of_minus_infinity_in_a_buffer_is_no_trouble_and_a_nan_is(path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.triu(torch.full((4, 4), float("-inf")), 1))
    save_checkpoint(path, model)
    assert load_checkpoint(path, model).findings == ()
    model.register_buffer("running_mean", torch.tensor([float("nan"), 1.0]))
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(path, model)
    assert caught.value.finding.parameter == "running_mean"
    assert "Only buffers" in caught.value.finding.causes[0]


def test_spoiled_optimizer_state_is_said_and_saved(
    path: Path, build: Build, train: Any, reported: list[Finding]
) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    optimizer.state[model.head.weight]["exp_avg"][0, 0] = float("nan")
    save_checkpoint(path, model, optimizer, on_finding=reported.append)
    (finding,) = reported
    assert (finding.code, finding.severity) == ("GG706", Severity.WARNING)
    assert "exp_avg (1 NaN of 208)" in finding.seen
    assert path.exists()


def test_weights_in_a_file_that_are_not_finite_are_a_warning(path: Path, reported: list[Finding]) -> None:
    torch.save({"weight": torch.tensor([[float("nan"), 1.0]]), "bias": torch.zeros(1)}, path)
    load_checkpoint(path, nn.Linear(2, 1), on_finding=reported.append)
    assert [(finding.code, finding.severity, finding.parameter) for finding in reported[1:]] == [
        ("GG706", Severity.WARNING, "weight")
    ]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_save_that_breaks_off_leaves_the_old_checkpoint_and_nothing_else(
    path: Path, build: Build, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    save_checkpoint(path, build(), step=1)
    before = path.read_bytes()

    def break_off(payload: Any, stream: Any) -> None:
        stream.write(b"half")
        raise error

    monkeypatch.setattr(torch, "save", break_off)
    with pytest.raises(type(error)) as caught:
        save_checkpoint(path, build(1), step=2)
    assert path.read_bytes() == before
    assert names(path.parent) == [path.name]
    if isinstance(error, OSError):
        assert caught.value.__notes__ == [f"gpt_guard: {path} was not written, the old one is intact"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no device that is always full")
def test_a_full_disk_is_noticed_before_the_old_file_goes(
    path: Path, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(path, build(), step=1)
    before = path.read_bytes()
    real = Path.open
    monkeypatch.setattr(Path, "open", lambda self, mode="r", **_: real(Path("/dev/full"), "wb", buffering=0))
    with pytest.raises((OSError, RuntimeError)):
        save_checkpoint(path, build(1), step=2)
    monkeypatch.undo()
    assert path.read_bytes() == before


def noted(name: str, calls: list[str]) -> Callable[..., Any]:
    real = getattr(os, name)

    def call(*args: Any) -> Any:
        calls.append(name)
        return real(*args)

    return call


def test_the_bytes_are_on_the_disk_before_the_name_changes(
    path: Path, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, noted(name, calls))
    save_checkpoint(path, build())
    assert calls == ["fsync", "replace", "fsync"]


def test_a_new_folder_is_made_and_a_link_replaced(tmp_path: Path, build: Build) -> None:
    first = save_checkpoint(tmp_path / "new" / "folder" / "step1.pt", build(), step=1)
    link = first.with_name("latest.pt")
    link.symlink_to(first)
    save_checkpoint(link, build(), step=2)
    assert torch.load(first)["step"] == 1
    assert torch.load(link)["step"] == 2


def test_the_file_has_the_rights_that_other_files_have(path: Path, build: Build) -> None:
    other = path.with_name("other")
    other.touch()
    save_checkpoint(path, build())
    assert path.stat().st_mode == other.stat().st_mode


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"best": {"loss": np.float64(1.0)}}, r"best\['loss'\] is a numpy"),
        ({"paths": [Path("a")]}, r"paths\[0\] is a pathlib"),
        ({"activation": nn.GELU()}, "activation is a torch.nn.modules.activation.GELU"),
    ],
)
def test_values_that_could_not_be_loaded_again_are_named(
    path: Path, build: Build, extra: dict[str, Any], words: str
) -> None:
    with pytest.raises(GuardUsageError, match=words):
        save_checkpoint(path, build(), extra=extra)
    assert names(path.parent) == []


@pytest.mark.parametrize("name", ["step", "model_state_dict", "gpt_guard", "tokenizer_fingerprint"])
def test_extra_cannot_replace_an_entry(path: Path, build: Build, name: str) -> None:
    with pytest.raises(GuardUsageError, match=name):
        save_checkpoint(path, build(), extra={name: 1})


def test_a_long_vocabulary_is_stored_by_its_digest_alone(
    path: Path, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpt_guard.checkpoint.save.MAX_STORED_TOKENS", 2)
    save_checkpoint(path, build(), tokenizer=["a", "b", "c"])
    assert "tokenizer_chars" not in torch.load(path)
    assert load_checkpoint(path, build(), tokenizer=["a", "b", "c"]).verified[0] == "tokenizer"
