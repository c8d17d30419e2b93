from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .conftest import SCRIPT, TEXT, Refusal


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file or folder"),
        (b"", "is empty"),
        (TEXT.encode() + "é".encode()[:1], "is cut off"),
        ("naïve ".encode("latin-1") * 100, "is not UTF-8"),
        (b"short", "one row takes 33"),
    ],
)
def test_a_corpus_that_cannot_be_used_is_refused(
    refused: Refusal, tmp_path: Path, content: bytes | None, said: str
) -> None:
    path = tmp_path / "corpus.txt"
    if content is not None:
        path.write_bytes(content)
    message = refused(corpus=path)
    assert str(path) in message
    assert said in message
    assert not (tmp_path / "run").exists()


def test_a_folder_without_known_names_is_refused(refused: Refusal, tmp_path: Path) -> None:
    empty = tmp_path / "folder"
    empty.mkdir()
    assert f"{empty}: no split under a known name" in refused(corpus=empty)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--dropout", "1"), "dropout is 1.0"),
        (("--steps", "0"), "0 is not a positive number"),
        (("--lr", "-1"), "-1 is not a positive number"),
        (("--break", "everything"), "invalid choice: 'everything'"),
    ],
)
def test_options_that_cannot_work_are_refused(refused: Refusal, options: tuple[str, ...], said: str) -> None:
    assert said in refused(*options)


@pytest.mark.parametrize(("device", "kind"), [("cuda", "CUDA"), ("mps", "Metal")])
def test_a_device_that_is_not_there_is_refused(
    refused: Refusal, monkeypatch: pytest.MonkeyPatch, device: str, kind: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert f"this torch sees no {kind} device" in refused("--device", device)


def test_a_folder_that_cannot_be_written_is_refused(refused: Refusal, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where a folder should be")
    assert "cannot be written to" in refused("--steps", "1")


def test_a_bad_corpus_ends_the_process_with_code_2(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--corpus", str(tmp_path / "none"), "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "no such file or folder" in done.stderr
    assert "Traceback" not in done.stderr
