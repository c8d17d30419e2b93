from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from gpt_guard.checkpoint.fingerprint import Fingerprint, file_digest, text_digest
from gpt_guard.checkpoint.fingerprint.record import StampFile, read_stamp, write_stamp
from gpt_guard.errors import GuardUsageError


def test_a_files_digest_is_the_one_of_sha256sum(tmp_path: Path) -> None:
    content = os.urandom(100_000)
    (tmp_path / "a.pt").write_bytes(content)
    assert file_digest(tmp_path / "a.pt") == hashlib.sha256(content).hexdigest()


def test_a_folders_digest_is_that_of_names_and_contents(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder / "inner").mkdir(parents=True)
        (tmp_path / folder / "inner" / "a").write_text("a")
        (tmp_path / folder / "b").write_text("b")
    assert file_digest(tmp_path / "one") == file_digest(tmp_path / "two")
    (tmp_path / "two" / "inner" / "a").write_text("b")
    changed = file_digest(tmp_path / "two")
    assert changed != file_digest(tmp_path / "one")
    (tmp_path / "two" / "inner" / "a").rename(tmp_path / "two" / "inner" / "c")
    assert file_digest(tmp_path / "two") not in (changed, file_digest(tmp_path / "one"))


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(GuardUsageError, match=r"cannot read .*gone to fingerprint it: No such file"):
        file_digest(tmp_path / "gone")


def test_a_text_counts_to_the_last_blank() -> None:
    assert text_digest("a\n") == hashlib.sha256(b"a\n").hexdigest()
    assert len({text_digest(text) for text in ("a\n", "a\r\n", "a", "a ")}) == 4


def test_parts_are_named(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train_ids.pt").write_text(folder)
    files = [tmp_path / "x" / "train_ids.pt", tmp_path / "y" / "train_ids.pt"]
    assert list(Fingerprint.of(data=str(files[0])).parts) == ["data:train_ids.pt"]
    made = Fingerprint.of(tokenizer=["a"], config={"n": 1}, data=files, texts={"chat_template": "{x}"})
    assert list(made.parts) == [
        "tokenizer",
        "config",
        "data:train_ids.pt",
        f"data:{files[1].as_posix()}",
        "text:chat_template",
    ]


def test_only_parts_that_both_know_are_compared() -> None:
    ours = Fingerprint(parts={"tokenizer": "1", "config": "2", "weights": "3"})
    theirs = Fingerprint(parts={"tokenizer": "1", "config": "4", "data:x": "5"})
    (difference,) = ours.compare(theirs)
    assert (difference.part, difference.ours, difference.theirs) == ("config", "2", "4")
    assert ours.compare(ours) == ()


def test_a_stamp_file_comes_back_as_it_was(tmp_path: Path) -> None:
    stamp = StampFile(parts={"tokenizer": "1"}, tokens=["\n", "é"], config={"lr": float("inf")})
    assert read_stamp(tmp_path) is None
    write_stamp(tmp_path / "new", stamp)
    again = read_stamp(tmp_path / "new")
    assert again is not None
    assert (again.parts, again.tokens) == (stamp.parts, stamp.tokens)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["fingerprint.json"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"parts": {"a": 1}}', '{"parts": {}, "more": 1}'])
def test_a_stamp_file_that_is_none_is_said(tmp_path: Path, content: str) -> None:
    (tmp_path / "fingerprint.json").write_text(content)
    with pytest.raises(ValueError, match=r"fingerprint\.json"):
        read_stamp(tmp_path)
