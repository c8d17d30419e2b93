from __future__ import annotations

import contextlib
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gpt_guard.catalogue import entry
from gpt_guard.checkpoint import load_checkpoint, save_checkpoint
from gpt_guard.checkpoint.read import unsafe_globals
from gpt_guard.errors import CheckpointError
from gpt_guard.records import Finding
from mini_gpt import MiniGPT

Build = Callable[..., MiniGPT]
WEIGHTS = {"weight": torch.ones(2, 2), "bias": torch.zeros(2)}
LEGACY = {"_use_new_zipfile_serialization": False}


def refused(path: Path, **options: Any) -> Finding:
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, nn.Linear(2, 2), **options)
    assert caught.value.finding.code == "GG707"
    assert str(path) in caught.value.finding.seen
    return caught.value.finding


def likeliest(finding: Finding) -> str:
    """What is said; a reader that knows what the file is must not guess at anything else."""
    (only,) = finding.causes
    return {cause.text: cause.key for cause in entry("GG707").causes}[only]


class Hostile:
    """Makes a file when it is unpickled."""

    def __init__(self, made: Path, call: Any = os.system) -> None:
        self._made, self._call = made, call

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return self._call, (f"touch {self._made}" if self._call is os.system else f"open({str(self._made)!r}, 'w')",)


class Config:
    """A class of the user's own."""

    n_layer = 2


@pytest.mark.parametrize("call", [os.system, eval, exec])
@pytest.mark.parametrize("form", ["zip", "legacy", "pickle", "gpt_guard"])
def test_code_in_a_file_is_not_run(path: Path, tmp_path: Path, call: Any, form: str) -> None:
    made = tmp_path / "made"
    content = {"model_state_dict": WEIGHTS, "extra": Hostile(made, call)}
    if form == "pickle":
        path.write_bytes(pickle.dumps(content["extra"]))
    elif form == "gpt_guard":
        torch.save({**content, "gpt_guard": {}, "fingerprint": {"weights": Hostile(made, call)}}, path)
    else:
        torch.save(content, path, **({} if form == "zip" else LEGACY))
    finding = refused(path)
    assert not made.exists()
    assert likeliest(finding) == "code"
    assert call.__name__ in finding.seen
    assert "nothing of it was run" in finding.seen
    assert "weights_only=False" in finding.fix


@pytest.mark.parametrize("protocol", range(6))
def test_names_are_read_from_every_protocol_of_pickle(path: Path, protocol: int) -> None:
    path.write_bytes(pickle.dumps([os.getcwd, os.system, os.getcwd, eval, {"a": ["b"]}], protocol))
    builtins = "__builtin__" if protocol < 3 else "builtins"
    assert unsafe_globals(path) == sorted([f"{builtins}.eval", f"{os.name}.getcwd", f"{os.name}.system"])


@pytest.mark.parametrize("options", [{}, LEGACY])
def test_pickled_objects_are_named_with_what_to_save_instead(path: Path, options: dict[str, bool]) -> None:
    torch.save({"model": WEIGHTS, "config": Config(), "loss": np.float64(2.0)}, path, **options)
    finding = refused(path)
    assert likeliest(finding) == "objects"
    assert "test_read.Config" in finding.seen
    assert "numpy" in finding.seen
    assert "float(x)" in finding.fix
    assert "vars(config)" in finding.fix


def test_a_whole_pickled_model_is_named(path: Path) -> None:
    torch.save(nn.Linear(2, 2), path)
    finding = refused(path)
    assert "torch.nn.modules.linear.Linear" in finding.seen
    assert "model.state_dict()" in finding.fix


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "text"),
        (b"<!DOCTYPE html><html>not found</html>", "text"),
        (b"loss 2.5\n", "text"),
        (b"PK\x03\x04" + bytes(200), "truncated"),
        (b"\x1f\x8b" + bytes(range(200)), "foreign"),
        (bytes(1000), "foreign"),
        ((64).to_bytes(8, "little") + b'{"weight":{"dtype":"F32"}}' + bytes(100), "safetensors"),
        (pickle.dumps([1, 2]), "foreign"),
    ],
)
def test_what_the_file_is_instead_is_said(path: Path, content: bytes, cause: str) -> None:
    path.write_bytes(content)
    finding = refused(path)
    assert likeliest(finding) == cause
    assert f"{len(content)} bytes" in finding.seen


@pytest.mark.parametrize("options", [{}, LEGACY])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_file_that_was_cut_short(path: Path, build: Build, options: dict[str, bool], share: float) -> None:
    torch.save(build().state_dict(), path, **options)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    assert likeliest(refused(path)) == "truncated"


def test_a_missing_file_names_what_lies_beside_where_it_should_be(path: Path) -> None:
    assert "there is no file" in refused(path).seen
    (path.parent / "mini_gpt_best.pt").touch()
    assert "holds mini_gpt_best.pt" in refused(path).seen
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path.parent / "no" / "a.pt", nn.Linear(2, 2))
    assert "does not exist either" in caught.value.finding.seen
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_a_folder_a_pipe_and_a_locked_file(path: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.safetensors").touch()
    finding = refused(tmp_path / "folder")
    assert likeliest(finding) == "folder"
    assert "model.safetensors" in finding.seen
    os.mkfifo(path)
    assert likeliest(refused(path)) == "foreign"


def test_zip_archives_of_other_kinds(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("notes.txt", "hello")
    assert "notes.txt" in refused(path).seen
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/data.pkl", "")
        archive.writestr("model/constants.pkl", "")
    assert likeliest(refused(path)) == "torchscript"


def test_a_file_larger_than_allowed_is_not_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(WEIGHTS, path)
    finding = refused(path, max_bytes=100)
    assert likeliest(finding) == "too_large"
    assert f"{path.stat().st_size} bytes; at most 100" in finding.seen
    monkeypatch.setattr("gpt_guard.checkpoint.read.memory_size", lambda: 200)
    assert "at most 200" in refused(path).seen
    monkeypatch.setattr("gpt_guard.checkpoint.read.memory_size", lambda: None)
    load_checkpoint(path, nn.Linear(2, 2))


def test_an_archive_that_would_grow_is_not_read(path: Path) -> None:
    torch.save(WEIGHTS, path)
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
        archive.writestr("latest/data/9", bytes(10_000_000))
    assert likeliest(refused(path)) == "too_large"


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (torch.ones(3), "holds a Tensor, not a dict"),
        ([1, 2], "holds a list"),
        (3, "holds an int"),
        ({}, "without model weights"),
        ({"epoch": 3, "loss": 0.5}, "its keys are epoch, loss"),
        ({"model": {"a": "b"}}, "without model weights"),
        ({0: torch.ones(1)}, "the key 0"),
        ({"state": {}, "param_groups": []}, "without model weights"),
    ],
)
def test_a_payload_of_another_kind_is_said(path: Path, payload: Any, words: str) -> None:
    torch.save(payload, path)
    finding = refused(path)
    assert likeliest(finding) == "payload"
    assert words in finding.seen


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ({"tokenizer_fingerprint": 3}, "damaged entry tokenizer_fingerprint"),
        ({"tokenizer_fingerprint": "0" * 1000}, "damaged entry tokenizer_fingerprint"),
        ({"tokenizer_chars": "abc"}, "damaged entry tokenizer_chars"),
        ({"fingerprint": ["x"]}, "damaged entry fingerprint"),
        ({"fingerprint": {"\x1b[2J": 1}}, r"damaged entry fingerprint.\x1b[2J"),
        ({"gpt_guard": 1}, "damaged entry gpt_guard"),
        ({"optimizer_parameters": [1]}, "damaged entry optimizer_parameters"),
    ],
)
def test_entries_of_ours_are_validated(path: Path, damage: dict[str, Any], words: str) -> None:
    torch.save({"model_state_dict": WEIGHTS, **damage}, path)
    assert words in refused(path).seen


def test_odd_values_under_common_names_are_left_to_the_user(path: Path) -> None:
    odd = {"step": -1, "config": "a: 1", "scheduler": 3, "optimizer": None, "iteration": True}
    torch.save({"model": WEIGHTS, **odd}, path)
    loaded = load_checkpoint(path, nn.Linear(2, 2))
    assert (loaded.step, loaded.config) == (None, None)
    assert loaded.extra == odd


def test_the_old_format_of_torch_is_read(path: Path) -> None:
    torch.save(WEIGHTS, path, **LEGACY)
    model = nn.Linear(2, 2)
    load_checkpoint(path, model)
    assert torch.equal(model.weight, WEIGHTS["weight"])


def test_no_byte_of_a_file_makes_it_fail_in_another_way(path: Path) -> None:
    save_checkpoint(path, nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters()), tokenizer=["a"])
    content = path.read_bytes()
    for place in range(0, len(content), 23):
        damaged = bytearray(content)
        damaged[place] ^= 0xFF
        path.write_bytes(damaged)
        model = nn.Linear(2, 2)
        with contextlib.suppress(CheckpointError):  # any other exception fails this test
            load_checkpoint(path, model)
