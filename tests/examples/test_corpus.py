from __future__ import annotations

from pathlib import Path

import pytest

from corpus import Corpus, CorpusError, load_corpus

ROW = 8


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return folder


def letters(count: int, letter: str = "a") -> str:
    return letter * count


def test_pydoc_is_real_text_cut_by_position() -> None:
    corpus = load_corpus("pydoc", 32)
    assert len(corpus.train) > 100_000
    assert len(corpus.val) == len(corpus.test) == len(corpus.text) // 20
    assert "assert_stmt" in corpus.text


def test_a_file_is_cut_90_5_5_without_overlap(tmp_path: Path) -> None:
    text = "".join(chr(0x4E00 + index) for index in range(1000))
    corpus = load_corpus(str(write(tmp_path, a__txt=text) / "a.txt"), ROW)
    assert (corpus.train, corpus.val, corpus.test) == (text[:900], text[900:950], text[950:])


@pytest.mark.parametrize("family", ["{}__txt", "{}", "wiki__{}__tokens", "wiki__{}__raw"])
def test_folder_of_three_splits(tmp_path: Path, family: str) -> None:
    files = {family.format(split): letters(50, split[0]) for split in ("train", "valid", "test")}
    corpus = load_corpus(str(write(tmp_path, **files)), ROW)
    assert (corpus.train, corpus.val, corpus.test) == ("t" * 50, "v" * 50, "t" * 50)


def test_without_train_file_train_is_cut_from_valid_and_test_is_kept(tmp_path: Path) -> None:
    write(tmp_path, valid__txt=letters(950, "a") + letters(50, "b"), test__txt=letters(60, "c"), README="x")
    corpus = load_corpus(str(tmp_path), ROW)
    assert (corpus.train, corpus.val, corpus.test) == ("a" * 950, "b" * 50, "c" * 60)
    assert "valid.txt [0:950]" in corpus.note
    assert "test.txt" in corpus.note


def test_without_valid_or_test_they_are_cut_from_train(tmp_path: Path) -> None:
    write(tmp_path, train__txt=letters(900, "a") + letters(50, "b") + letters(50, "c"))
    assert load_corpus(str(tmp_path), ROW).test == "c" * 50
    write(tmp_path, valid__txt=letters(20, "v"))
    corpus = load_corpus(str(tmp_path), ROW)
    assert (corpus.val, corpus.test) == ("v" * 20, "c" * 50)


def test_the_family_with_most_files_is_taken(tmp_path: Path) -> None:
    write(tmp_path, test__txt=letters(50, "x"))
    write(tmp_path, wiki__train__raw=letters(50), wiki__valid__raw=letters(50), wiki__test__raw=letters(50))
    assert load_corpus(str(tmp_path), ROW).test == "a" * 50


def test_line_ends_and_a_byte_order_mark_are_not_characters(tmp_path: Path) -> None:
    path = tmp_path / "windows.txt"
    path.write_bytes(b"\xef\xbb\xbf" + b"line\r\n" * 100)
    assert set(load_corpus(str(path), ROW).text) == set("line\n")


BAD_FILES = {
    "empty": (b"", "is empty"),
    "blank": (b" \n\n", "is empty"),
    "cut off": ("ééé".encode()[:-1], "is cut off.*byte 4 of 5"),
    "latin-1": ("caf\xe9 au lait".encode("latin-1") * 100, "is not UTF-8 text .byte 0xe9 at offset 3"),
    "utf-16": ("text".encode("utf-16"), "UTF-16"),
    "gzip": (b"\x1f\x8b\x08\x00" * 50, "gzip"),
    "holes": (b"text" * 100 + b"\0" * 100, "NUL characters .first at 400"),
    "short": (b"too short", "one row takes 33"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_file_is_named_with_its_trouble(tmp_path: Path, kind: str) -> None:
    content, said = BAD_FILES[kind]
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=rf"bad\.txt.*{said}"):
        load_corpus(str(path), 32)


def test_missing_path_and_unknown_names_tell_what_would_work(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"nowhere\.txt: no such file.*--corpus pydoc"):
        load_corpus(str(tmp_path / "nowhere.txt"), ROW)
    write(tmp_path, notes__md="hello")
    with pytest.raises(CorpusError, match=r"wiki\.train\.tokens.*found notes\.md"):
        load_corpus(str(tmp_path), ROW)


def test_an_unreadable_file_is_an_error_of_the_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, a__txt="text") / "a.txt"

    def denied(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(CorpusError, match=r"a\.txt: cannot be read \(Permission denied\)"):
        load_corpus(str(path), ROW)


def test_a_split_shorter_than_a_row_is_refused_whichever_it_is(tmp_path: Path) -> None:
    write(tmp_path, train__txt=letters(900), valid__txt=letters(5), test__txt=letters(50))
    with pytest.raises(CorpusError, match=r"valid\.txt: 5 characters for the valid split, but one row takes 9"):
        load_corpus(str(tmp_path), ROW)


def test_corpus_text_is_all_of_it() -> None:
    assert Corpus("a", "b", "c", "").text == "abc"
