from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt_guard import cached, stamp_cache, verify_cache
from gpt_guard.errors import CheckpointError, FingerprintMismatch, GuardUsageError

CHARS = list("abcdefgh")
TEMPLATE = "<user>{question}<model>{answer}"
IDS = torch.arange(12)


class Maker:
    """Counts how often it is asked."""

    def __init__(self, value: Any = IDS) -> None:
        self.value = value
        self.calls = 0

    def __call__(self) -> Any:
        self.calls += 1
        return self.value


class Chat:
    """A tokenizer with a chat template of its own, as Hugging Face has it."""

    def __init__(self, template: str) -> None:
        self.chars = CHARS
        self.chat_template = template


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "train_ids.pt"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.txt"
    file.write_text("abc", encoding="utf-8")
    return file


@pytest.fixture
def make() -> Maker:
    return Maker()


def test_it_is_made_once_and_read_from_then_on(path: Path, make: Maker, source: Path) -> None:
    parts: dict[str, Any] = {"tokenizer": CHARS, "template": TEMPLATE, "source": source, "settings": {"block_size": 8}}
    for _ in range(3):
        assert torch.equal(cached(path, make, **parts), IDS)
    assert make.calls == 1
    assert torch.equal(torch.load(path), IDS)
    stamp = json.loads((path.parent / "train_ids.pt.fingerprint.json").read_text())
    assert set(stamp["parts"]) == {"tokenizer", "config", "data:corpus.txt", "text:template", "cache"}


STALE: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "extended tokenizer": ({"tokenizer": CHARS}, {"tokenizer": [*CHARS, "i"]}, "tokenizer", "8 tokens there, 9 here"),
    "sorted otherwise": (
        {"tokenizer": CHARS},
        {"tokenizer": CHARS[::-1]},
        "tokenizer",
        "Id 0 is 'a' there and 'h' here",
    ),
    "template": ({"template": TEMPLATE}, {"template": TEMPLATE + " "}, "text:template", "text template"),
    "named templates": ({"template": {"chat": "a"}}, {"template": {"chat": "b"}}, "text:chat", "text chat"),
    "no template": ({"template": TEMPLATE}, {}, "text:template", "the one in use is none"),
    "chat template": ({"tokenizer": Chat("x")}, {"tokenizer": Chat("y")}, "text:chat_template", "chat_template"),
    "settings": ({"settings": {"block": 8}}, {"settings": {"block": 16}}, "config", "block was 8, is 16"),
}


@pytest.mark.parametrize("name", STALE)
def test_a_stale_cache_is_refused_with_the_part_and_both_digests(name: str, path: Path, make: Maker) -> None:
    before, now, part, words = STALE[name]
    cached(path, make, **before)
    with pytest.raises(FingerprintMismatch) as refused:
        cached(path, make, **now)
    found = refused.value.finding
    assert found.code == "GG709"
    assert list(found.evidence) == [part]
    assert words in found.seen
    digests = found.evidence[part]
    assert isinstance(digests, dict)
    assert digests["cache"] != digests["now"]
    assert make.calls == 1


def test_a_source_file_that_changed(path: Path, make: Maker, source: Path) -> None:
    cached(path, make, source=[source])
    source.write_text("abcd", encoding="utf-8")
    with pytest.raises(FingerprintMismatch, match=r"data file corpus\.txt"):
        cached(path, make, source=[source])


def test_several_parts_are_all_named(path: Path, make: Maker) -> None:
    cached(path, make, tokenizer=CHARS, template="a")
    with pytest.raises(FingerprintMismatch) as refused:
        cached(path, make, tokenizer=CHARS[1:], template="b")
    assert set(refused.value.finding.evidence) == {"tokenizer", "text:template"}


def test_it_is_made_anew_where_that_is_asked_for(path: Path) -> None:
    cached(path, Maker(), template="a")
    new = Maker(IDS + 1)
    for _ in range(2):
        assert torch.equal(cached(path, new, template="b", remake=True), IDS + 1)
    assert new.calls == 1
    assert verify_cache(path, template="b") == ("text:template",)


def test_the_code_that_makes_it_counts_without_its_comments(path: Path, tmp_path: Path) -> None:
    def load(body: str, name: str) -> Callable[[], Tensor]:
        file = tmp_path / f"{name}.py"
        file.write_text(f"import torch\ndef make():\n{body}", encoding="utf-8")
        namespace: dict[str, Any] = {}
        exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), namespace)
        made: Callable[[], Tensor] = namespace["make"]
        return made

    cached(path, load("    return torch.arange(3)\n", "one"), code=True)
    cached(path, load("    # the first three\n    return torch.arange( 3 )\n", "two"), code=True)
    with pytest.raises(FingerprintMismatch, match="code"):
        cached(path, load("    return torch.arange(4)\n", "three"), code=True)
    with pytest.raises(GuardUsageError, match="source"):
        cached(path, eval("lambda: 3"), code=True)


# What cannot be trusted.


def test_a_file_without_fingerprint_is_never_overwritten(path: Path, make: Maker) -> None:
    path.parent.mkdir()
    torch.save(torch.zeros(3), path)
    for remake in (False, True):
        with pytest.raises(CheckpointError, match="GG710"):
            cached(path, make, template="a", remake=remake)
    assert torch.equal(torch.load(path), torch.zeros(3))
    assert make.calls == 0
    stamp_cache(path, template="a")
    assert torch.equal(cached(path, make, template="a"), torch.zeros(3))


def replaced(path: Path) -> None:
    torch.save(torch.ones(3), path)


def cut(path: Path) -> None:
    stamp = path.with_name(path.name + ".fingerprint.json")
    stamp.write_text(stamp.read_text()[:40])


@pytest.mark.parametrize("damage", [replaced, cut])
def test_a_fingerprint_that_does_not_belong_to_the_file(
    damage: Callable[[Path], None], path: Path, make: Maker
) -> None:
    cached(path, make, template="a")
    damage(path)
    with pytest.raises(CheckpointError, match="GG710"):
        cached(path, make, template="a")


def test_a_part_that_was_not_recorded_cannot_be_compared(path: Path, make: Maker) -> None:
    cached(path, make, template="a")
    with pytest.raises(CheckpointError) as refused:
        cached(path, make, template="a", tokenizer=CHARS)
    # Not in the error's own text, which is wrapped at a place that depends on how long the path is.
    assert "without a record of its tokenizer" in refused.value.finding.seen
    assert refused.value.finding.code == "GG710"


def test_a_value_that_could_not_be_read_back_is_not_written(path: Path) -> None:
    with pytest.raises(GuardUsageError, match="from_numpy"):
        cached(path, Maker({"ids": torch.zeros(2).numpy()}), template="a")
    assert not path.exists()


def test_a_crash_while_it_is_written_leaves_no_stale_pair(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached(path, Maker(), template="a")

    def crash(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("gpt_guard.checkpoint.cache.write_stamp", crash)
    with pytest.raises(OSError, match="no space"):
        cached(path, Maker(IDS + 1), template="b", remake=True)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="GG710"):
        cached(path, Maker(), template="a")


# Caches of one's own.


def test_a_cache_of_any_format_is_stamped_and_verified(tmp_path: Path) -> None:
    file = tmp_path / "train.bin"
    file.write_bytes(bytes(range(20)))
    stamp_cache(file, tokenizer=CHARS, template=TEMPLATE)
    assert verify_cache(file, tokenizer=CHARS) == ("tokenizer",)
    assert verify_cache(file, tokenizer=CHARS, template=TEMPLATE) == ("tokenizer", "text:template")
    with pytest.raises(FingerprintMismatch, match="template"):
        verify_cache(file, tokenizer=CHARS, template="another")
    with pytest.raises(CheckpointError, match="there is no cache"):
        verify_cache(tmp_path / "gone.bin", tokenizer=CHARS)
    with pytest.raises(GuardUsageError, match="cannot read"):
        stamp_cache(tmp_path / "gone.bin", tokenizer=CHARS)
