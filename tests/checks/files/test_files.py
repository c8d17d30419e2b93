"""Files: read as data only; what cannot be used is named with its cause and a remedy."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpt_guard.checks.files.stage import FilesStage, UnusableFile, read_checkpoint, read_ids, read_tokenizer, size
from gpt_guard.checks.runner.base import Subject
from gpt_guard.checks.tokenizer.tokenizers import CharTokenizer
from gpt_guard.records import CheckResult

IDS = torch.arange(50) % 7


class Hostile:
    """Calls a function when it is unpickled."""

    def __reduce__(self) -> Any:
        return print, ("this must never be printed",)


def write(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def cut(path: Path) -> Path:
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2])
    return path


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8, torch.uint16])
def test_ids_come_as_they_are(tmp_path: Path, dtype: torch.dtype) -> None:
    ids = read_ids(write(tmp_path / "ids.pt", IDS.to(dtype)))
    assert ids.dtype == dtype
    assert torch.equal(ids.long(), IDS)


def test_ids_in_other_files(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", IDS.numpy())
    IDS.numpy().astype(np.uint16).tofile(tmp_path / "ids.bin")
    write(tmp_path / "list.pt", IDS.tolist())
    for name in ("ids.npy", "ids.bin", "list.pt"):
        assert torch.equal(read_ids(tmp_path / name).long(), IDS)


WRONG_IDS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda path: None, "There is no such file"),
    "empty": (lambda path: path.write_bytes(b""), "The file is empty"),
    "no ids": (lambda path: write(path, torch.empty(0).long()), "The file is empty"),
    "cut short": (lambda path: cut(write(path, IDS)), "It was cut short"),
    "a folder": (lambda path: path.mkdir(), "It is a folder"),
    "text": (lambda path: path.write_text("to be or not to be" * 9), "something else than a tensor"),
    "a dict": (lambda path: write(path, {"train": IDS}), "something else than a tensor"),
    "strings": (lambda path: write(path, ["a", "b"]), "something else than a tensor"),
    "code": (lambda path: write(path, Hostile()), "pickled Python objects"),
    "a pickle": (lambda path: path.write_bytes(pickle.dumps({"a": Hostile()})), "pickled Python objects"),
}


@pytest.mark.parametrize("case", WRONG_IDS)
def test_ids_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    make, cause = WRONG_IDS[case]
    path = tmp_path / "train_ids.pt"
    make(path)
    with pytest.raises(UnusableFile, match="train_ids") as caught:
        read_ids(path)
    finding = caught.value.finding
    assert finding.code == "GG615"
    assert cause in finding.causes[0]
    assert finding.fix
    assert "checkpoint" not in finding.title
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["ids.npy", "ids.bin"])
def test_damaged_arrays(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x93NUMPY rubbish" + b"x" * 7)
    with pytest.raises(UnusableFile, match=name):
        read_ids(tmp_path / name)


@pytest.mark.parametrize("content", [{"chars": ["a", "\n", "é"]}, ["a", "\n", "é"], {"a": 0, "\n": 1, "é": 2}])
def test_character_tokenizers(tmp_path: Path, content: Any) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    for path in (tmp_path / "tokenizer.json", tmp_path):
        tokenizer = read_tokenizer(path)
        assert isinstance(tokenizer, CharTokenizer)
        assert tokenizer.tokens == ["a", "\n", "é"]


@pytest.mark.parametrize(
    ("raw", "cause"),
    [
        (b"", "The file is empty"),
        (b'{"chars": ["a", ', "It was cut short"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b"[1, 2]", "not valid JSON"),
        (b'{"chars": [1]}', "not valid JSON"),
        (b'"abc"', "not valid JSON"),
        (b"[]", "The file is empty"),
        (b'["the", "cat"]', "not valid JSON"),
        (b'{"model": {"type": "BPE"', "It was cut short"),
    ],
)
def test_tokenizers_that_cannot_be_used(tmp_path: Path, raw: bytes, cause: str) -> None:
    path = tmp_path / "char_tokenizer.json"
    path.write_bytes(raw)
    with pytest.raises(UnusableFile, match="char_tokenizer") as caught:
        read_tokenizer(path)
    assert cause in caught.value.finding.causes[0]


def test_a_folder_without_a_tokenizer_lists_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("a")
    with pytest.raises(UnusableFile, match=r"vocab\.txt"):
        read_tokenizer(tmp_path)


def hugging_face_file(path: Path) -> None:
    vocabulary = {"[UNK]": 0, "one": 1, "two": 2}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
    special = {"id": 0, "content": "[UNK]", "special": True}
    special |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    whole = {"version": "1.0", **parts, "added_tokens": [special]}
    whole |= {"pre_tokenizer": {"type": "Whitespace"}, "model": model}
    path.write_text(json.dumps(whole), encoding="utf-8")


def test_a_hugging_face_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    hugging_face_file(tmp_path / "tokenizer.json")
    tokenizer = read_tokenizer(tmp_path)
    assert tokenizer.tokens == ["[UNK]", "one", "two"]
    assert tokenizer.encode("two one") == [2, 1]


def test_its_package_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr("gpt_guard.checks.files.stage.import_module", refuse)
    hugging_face_file(tmp_path / "tokenizer.json")
    with pytest.raises(UnusableFile) as caught:
        read_tokenizer(tmp_path)
    assert "gpt-guard-torch[tokenizers]" in caught.value.finding.fix


def test_checkpoints(tmp_path: Path) -> None:
    payload = read_checkpoint(write(tmp_path / "model.pt", {"model": {"w": torch.ones(2)}, "step": 3}))
    assert payload["step"] == 3
    for name, content in (("tensor.pt", IDS), ("code.pt", Hostile())):
        with pytest.raises(UnusableFile, match=name):
            read_checkpoint(write(tmp_path / name, content))


def ask(subject: Subject) -> list[CheckResult]:
    return list(FilesStage().run(subject))


def test_the_stage_has_a_line_for_each_file(tmp_path: Path) -> None:
    paths = {"train": write(tmp_path / "train.pt", IDS), "val": tmp_path / "val.pt", "test": tmp_path / "test.pt"}
    with pytest.raises(UnusableFile) as caught:
        read_ids(paths["val"])
    subject = Subject(paths=paths, data={"train": IDS}, unusable={"val": caught.value.finding})
    lines = ask(subject)
    assert [line.status for line in lines] == ["passed", "failed", "skipped"]
    assert "50 ids" in lines[0].measured
    assert lines[1].findings == (caught.value.finding,)
    assert "test.pt" in lines[2].measured


def test_without_paths_it_says_so() -> None:
    assert "objects" in (FilesStage().missing(Subject()) or "")


def subject_with(tmp_path: Path, block_size: int | None = None, **splits: int) -> Subject:
    data = {name: torch.zeros(count, dtype=torch.int64) for name, count in splits.items()}
    paths = {name: write(tmp_path / f"{name}.pt", ids) for name, ids in data.items()}
    return Subject(paths=paths, data=data, block_size=block_size)


def test_a_split_without_a_single_row_fails(tmp_path: Path) -> None:
    subject = subject_with(tmp_path, block_size=16, train=100, val=16, test=17)
    assert [line.status for line in ask(subject)] == ["passed", "failed", "passed"]
    assert ask(subject)[1].findings[0].code == "GG616"


def test_swapped_splits_fail(tmp_path: Path) -> None:
    lines = ask(subject_with(tmp_path, train=50, val=900))
    assert [line.status for line in lines] == ["failed", "passed"]
    assert "swapped" in lines[0].findings[0].causes[0]
    assert all(line.status == "passed" for line in ask(subject_with(tmp_path, train=900, val=50)))


def test_a_tokenizer_of_one_token_fails(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text('["a"]')
    (line,) = ask(Subject(paths={"tokenizer": path}, tokenizer=CharTokenizer(["a"])))
    assert line.status == "failed"


def test_sizes_are_readable(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for count, text in ((0, "0 bytes"), (999, "999 bytes"), (1500, "1.5 kB"), (2_500_000, "2.5 MB")):
        path.write_bytes(b"x" * count)
        assert size(path) == text
    assert size(tmp_path) == "2.5 MB"
