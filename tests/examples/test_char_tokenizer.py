from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from char_tokenizer import CharTokenizer


def test_text_comes_back() -> None:
    text = 'naïve "quotes"\n\t日本 🙂 \\'
    tokenizer = CharTokenizer.from_text(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == len(set(text))


def test_ids_do_not_depend_on_the_order_of_the_text() -> None:
    assert CharTokenizer.from_text("abc").chars == CharTokenizer.from_text("ccba").chars == ["a", "b", "c"]


def test_fingerprint_is_the_digest_of_the_compact_json() -> None:
    written = '["\\n","\\"","é"]'
    assert CharTokenizer(["\n", '"', "é"]).fingerprint == hashlib.sha256(written.encode()).hexdigest()
    assert CharTokenizer(["a", "b"]).fingerprint != CharTokenizer(["b", "a"]).fingerprint


def test_file_holds_the_characters_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "char_tokenizer.json"
    tokenizer = CharTokenizer.from_text("añ\n")
    tokenizer.save(path)
    assert json.loads(path.read_bytes()) == {"chars": ["\n", "a", "ñ"]}
    assert CharTokenizer.load(path).fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"chars": []}', '{"chars": ["ab"]}', '{"chars": [1]}', '{"chars": 3}']
)
def test_a_file_that_is_something_else_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"other\.json is not a character tokenizer"):
        CharTokenizer.load(path)


def test_unknown_character_is_named_with_its_position() -> None:
    with pytest.raises(ValueError, match="'x' at position 2"):
        CharTokenizer.from_text("ab").encode("abx")


def test_a_character_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="'a' stands more than once"):
        CharTokenizer(["a", "b", "a"])


def test_mismatch_names_the_first_id_that_differs(tmp_path: Path) -> None:
    old, new = CharTokenizer.from_text("abd"), CharTokenizer.from_text("abcd")
    path = tmp_path / "char_tokenizer.json"
    old.save(path)
    said = new.explain_mismatch(old.fingerprint, path)
    assert old.fingerprint in said
    assert new.fingerprint in said
    assert "2: 'd' there, 'c' here" in said
    assert "first id" not in new.explain_mismatch("0" * 64, path)
    assert "first id" not in new.explain_mismatch(old.fingerprint, tmp_path / "none.json")
    longer = CharTokenizer.from_text("abde").explain_mismatch(old.fingerprint, path)
    assert "it has 3 characters, this one 4" in longer
