"""A bundle that comes from anywhere: nothing in it is run, and what is wrong is said with the file and the remedy."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt_guard.blackbox import bundle as bundle_module
from gpt_guard.blackbox.bundle import read_bundle
from gpt_guard.blackbox.replay import replay
from gpt_guard.blackbox.stored import FileName
from gpt_guard.errors import GuardUsageError

from .conftest import Fail
from .failing_models import LogOfZero


@pytest.fixture
def bundle(fail: Fail) -> Path:
    return fail("log").path


def refused(path: Path, *words: str) -> str:
    """Open it and run it; returns what is said."""
    with pytest.raises(GuardUsageError) as caught:
        replay(path, LogOfZero())
    said = str(caught.value)
    for word in words:
        assert word in said
    assert "\x1b" not in said
    assert len(said) < 1200
    return said


def change(file: Path, edit: Callable[[Any], Any]) -> None:
    content = json.loads(file.read_text())
    file.write_text(json.dumps(edit(content) or content))


def reseal(bundle: Path, name: str) -> None:
    """Give a file that was changed the size and digest that the manifest asks for, as an attacker would."""
    raw = (bundle / name).read_bytes()
    entry = {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    change(bundle / "manifest.json", lambda manifest: manifest["files"].update({name: entry}))


def put(bundle: Path, name: str, content: Any) -> None:
    torch.save(content, bundle / name)
    reseal(bundle, name)


class Hostile:
    """Makes a file when it is unpickled."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.made}",)


@pytest.mark.parametrize("name", ["batch.pt", "rng.pt", "model.pt"])
def test_code_in_a_file_is_not_run(bundle: Path, tmp_path: Path, name: str) -> None:
    put(bundle, name, {"args": (Hostile(tmp_path / "made"),), "kwargs": {}})
    said = refused(bundle, name, "system", "nothing of it was run")
    assert "do not read it by other means" in said
    assert not (tmp_path / "made").exists()


def test_objects_of_any_class_are_refused(bundle: Path) -> None:
    put(bundle, "batch.pt", {"args": (torch.nn.Linear(2, 2),), "kwargs": {}})
    refused(bundle, "batch.pt", "torch.nn.modules.linear.Linear")


@pytest.mark.parametrize(
    "name", [each.value for each in FileName if each.value not in ("loss.pt", "output_gradients.pt")]
)
def test_a_file_cut_short_is_said_to_be(bundle: Path, name: str) -> None:
    file = bundle / name
    file.write_bytes(file.read_bytes()[:-1])
    opened = name not in ("optimizer.pt", "report.json", "steps.jsonl")  # a replay needs none of these
    if opened:
        refused(bundle, str(file), "cut short", "copy the whole folder again")
    else:
        with pytest.raises(GuardUsageError, match="cut short"):
            bundle_module._checked_file(bundle, FileName(name), read_bundle(bundle).manifest)


def test_one_changed_bit_is_found(bundle: Path) -> None:
    raw = bytearray((bundle / "model.pt").read_bytes())
    raw[len(raw) // 2] ^= 1
    (bundle / "model.pt").write_bytes(raw)
    refused(bundle, "model.pt", "SHA-256")


def test_a_file_that_is_missing_is_named(bundle: Path) -> None:
    (bundle / "batch.pt").unlink()
    refused(bundle, "batch.pt", "is missing")


@pytest.mark.parametrize("name", ["finding.json", "batch.pt", "manifest.json"])
def test_links_are_not_followed(bundle: Path, tmp_path: Path, name: str) -> None:
    shutil.move(bundle / name, tmp_path / "elsewhere")
    (bundle / name).symlink_to(tmp_path / "elsewhere")
    refused(bundle, name, "regular" if name == "manifest.json" else "a link")


def test_a_pipe_is_not_waited_for(bundle: Path) -> None:
    (bundle / "batch.pt").unlink()
    os.mkfifo(bundle / "batch.pt")
    refused(bundle, "batch.pt", "no regular file")


@pytest.mark.parametrize("name", ["../finding.json", "/etc/passwd", "sub/batch.pt", "batch.pt\x1b[2J", ""])
def test_names_that_lead_elsewhere_are_refused(bundle: Path, name: str) -> None:
    change(bundle / "manifest.json", lambda m: m["files"].update({name: m["files"]["batch.pt"]}))
    refused(bundle, "manifest.json", "is damaged")


@pytest.mark.parametrize("size", [10**15, 0])
def test_a_claimed_size_is_compared_before_anything_is_read(bundle: Path, size: int) -> None:
    change(bundle / "manifest.json", lambda m: m["files"]["batch.pt"].update(size=size))
    refused(bundle, "batch.pt", f"{size} were written")


def test_a_negative_size_is_none(bundle: Path) -> None:
    change(bundle / "manifest.json", lambda m: m["files"]["batch.pt"].update(size=-1))
    refused(bundle, "manifest.json", "size")


def test_a_tensor_that_fills_the_memory_once_it_is_copied_is_refused(bundle: Path) -> None:
    put(bundle, "batch.pt", {"args": (torch.zeros(1).expand(1 << 50),), "kwargs": {}})
    refused(bundle, "batch.pt", "claims tensors of")


def test_an_archive_that_unpacks_to_more_than_it_is_is_refused(bundle: Path) -> None:
    torch.save({"args": (torch.zeros(1 << 20),), "kwargs": {}}, bundle / "plain.pt")
    with zipfile.ZipFile(bundle / "plain.pt") as stored, zipfile.ZipFile(bundle / "batch.pt", "w") as packed:
        for entry in stored.infolist():
            packed.writestr(entry.filename, stored.read(entry), zipfile.ZIP_DEFLATED)
    reseal(bundle, "batch.pt")
    refused(bundle, "batch.pt", "claims to hold")


def test_a_list_that_contains_itself_ends(bundle: Path) -> None:
    endless: list[Any] = []
    endless.append(endless)
    put(bundle, "batch.pt", {"args": endless, "kwargs": {}})
    refused(bundle, "batch.pt", "nested without end")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("batch.pt", {"args": 5, "kwargs": {}}),
        ("batch.pt", {"args": (), "kwargs": {5: 1}}),
        ("batch.pt", [1, 2]),
        ("rng.pt", {"forward": {"cpu": torch.zeros(3)}}),
        ("rng.pt", {"forward": 3}),
        ("model.pt", {"model_state_dict": {"a": "b"}, "transient": {}, "frozen": []}),
        ("model.pt", {"model_state_dict": {}, "transient": {}, "frozen": [1]}),
    ],
)
def test_containers_of_another_form_are_refused(bundle: Path, name: str, content: Any) -> None:
    put(bundle, name, content)
    refused(bundle, name)


def test_a_generators_state_of_another_size_gives_no_answer(bundle: Path) -> None:
    put(bundle, "rng.pt", {"forward": {"cpu": torch.zeros(16, dtype=torch.uint8)}})
    model, before = LogOfZero(), torch.get_rng_state()
    assert replay(bundle, model).reproduced is None
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ("gpt_guard.bundle/2", "newer"),
        ("gpt_guard.run/1", "no bundle"),
        (None, "no bundle"),
        ("\x1b[2J/1", "no bundle"),
    ],
)
def test_other_schemas_are_named(bundle: Path, schema: str | None, word: str) -> None:
    change(bundle / "manifest.json", lambda m: m.update(schema_version=schema))
    refused(bundle, "manifest.json", "schema", word)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("finding.json", b"{"),
        ("finding.json", b"[" * 100_000),
        ("finding.json", b'{"code": 5}'),
        ("recipe.json", b'{"ambient": {"autocast": {"cpu": [true, "nn"]}}}'),
        ("recipe.json", b'{"ambient": {"autocast": {"cpu": [true, "__builtins__"]}}}'),
        ("recipe.json", b'{"run": "os.system"}'),
        ("modes.json", b'{"a": "yes"}'),
        ("environment.json", b"[]"),
        ("source.json", b"null"),
        ("finding.json", b"\xff\xfe\x00"),
    ],
)
def test_damaged_json_is_refused(bundle: Path, name: str, content: bytes) -> None:
    (bundle / name).write_bytes(content)
    reseal(bundle, name)
    refused(bundle, name)


def test_a_manifest_of_any_length_is_not_read(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle_module, "MAX_JSON_BYTES", 100)
    refused(bundle, "manifest.json", "larger than")


def test_what_is_no_bundle_is_said_with_what_to_give(bundle: Path, tmp_path: Path) -> None:
    refused(bundle.parent, "holds the bundles crash-step-000002", "give one of them")
    refused(tmp_path / "gone", "is not there")
    refused(bundle / "batch.pt", "is a file")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "no manifest.json")
    with pytest.raises(GuardUsageError, match="bundle is 5"):
        read_bundle(5)  # type: ignore[arg-type]  # that is the mistake


def test_a_whole_copy_elsewhere_works(bundle: Path, tmp_path: Path) -> None:
    shutil.copytree(bundle, tmp_path / "copy")
    shutil.rmtree(bundle)
    assert replay(tmp_path / "copy", LogOfZero()).same
