"""Where the training text comes from: the standard library's own topics, a file, or a folder of splits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HELD_OUT = 0.05
SPLITS = ("train", "valid", "test")
FAMILIES = ("{}.txt", "{}", "wiki.{}.tokens", "wiki.{}.raw")
MAGIC = {
    b"\x1f\x8b": "compressed by gzip; unpack it first (gunzip)",
    b"PK\x03\x04": "a zip archive; unpack it first (unzip)",
    b"PAR1": "a parquet file; export its text column to a .txt file",
    b"\xff\xfe": "UTF-16 text; convert it: iconv -f UTF-16 -t UTF-8 IN > OUT",
    b"\xfe\xff": "UTF-16 text; convert it: iconv -f UTF-16 -t UTF-8 IN > OUT",
}


class CorpusError(Exception):
    """A corpus that cannot be used; the message names the file and the remedy."""


@dataclass(frozen=True)
class Corpus:
    """Three texts that do not overlap, and a line that says where each came from."""

    train: str
    val: str
    test: str
    note: str

    @property
    def text(self) -> str:
        """All three, for the vocabulary: a character known only from validation must have an id, too."""
        return self.train + self.val + self.test


def load_corpus(source: str, block_size: int) -> Corpus:
    """Read `pydoc`, a text file or a folder; see `_folder` for the names a folder may hold.

    Raises CorpusError when something is missing, empty, cut off, not UTF-8, or a split has no row of `block_size`.
    """
    if source == "pydoc":
        texts = {"train": ("pydoc_data.topics", _pydoc())}
    else:
        path = Path(source)
        if path.is_dir():
            texts = _folder(path)
        elif path.exists():
            texts = {"train": (str(path), _read(path))}
        else:
            raise CorpusError(
                f"{path}: no such file or folder. Give a UTF-8 text file, a folder with train.txt, valid.txt and "
                f"test.txt, or --corpus pydoc, which needs no file."
            )
    return _cut(texts, block_size)


def _pydoc() -> str:
    """The help texts of Python's own `help()`: real prose and code on every machine, nothing to download."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise CorpusError(
            "pydoc_data.topics: this Python was installed without it. Give a text of your own: --corpus FILE"
        ) from error
    return "\n\n".join(topics[name] for name in sorted(topics))


def _folder(path: Path) -> dict[str, tuple[str, str]]:
    """Read the splits of the naming family of which the folder holds most files."""
    found = [
        {split: path / family.format(split) for split in SPLITS if (path / family.format(split)).is_file()}
        for family in FAMILIES
    ]
    files = max(found, key=len)
    if not files:
        there = ", ".join(sorted(entry.name for entry in path.iterdir())[:6]) or "nothing"
        raise CorpusError(
            f"{path}: no split under a known name. Looked for train, valid and test as "
            f"{', '.join(family.format('train') for family in FAMILIES)}; found {there}. Rename the files, or give one "
            f"of them as --corpus FILE."
        )
    return {split: (str(file), _read(file)) for split, file in files.items()}


def _cut(texts: dict[str, tuple[str, str]], block_size: int) -> Corpus:
    """Cut what is missing from the end of the first text there is, 5 % for each held-out split; train is its start."""
    donor = next(split for split in SPLITS if split in texts)
    name, text = texts[donor]
    held_out = [split for split in SPLITS[1:] if split not in texts or split == donor]
    size = int(len(text) * HELD_OUT)
    end = len(text) - size * len(held_out)
    parts = dict(texts)
    parts["train"] = (f"{name} [0:{end}]" if held_out else name, text[:end])
    for split in held_out:
        parts[split] = (f"{name} [{end}:{end + size}]", text[end : end + size])
        end += size
    for split, (label, part) in parts.items():
        if len(part) <= block_size:
            raise CorpusError(
                f"{label}: {len(part)} characters for the {split} split, but one row takes {block_size + 1}. "
                f"Give a longer text (a single file is cut 90/5/5, so at least {20 * (block_size + 1)} characters)."
            )
    note = "\n".join(f"  {split:5}  {len(parts[split][1]):>9,} characters  {parts[split][0]}" for split in SPLITS)
    return Corpus(parts["train"][1], parts["valid"][1], parts["test"][1], note)


def _read(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read ({error.strerror}). Check the path and its permissions.") from error
    if not data.strip():
        raise CorpusError(f"{path}: is empty. The download or copy may have failed; fetch it again.")
    for magic, what in MAGIC.items():
        if data.startswith(magic):
            raise CorpusError(f"{path}: is {what}.")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":
            raise CorpusError(
                f"{path}: is cut off, its last character is incomplete (byte {error.start} of {len(data)}). "
                f"The download or copy stopped early; fetch it again."
            ) from error
        raise CorpusError(
            f"{path}: is not UTF-8 text (byte 0x{data[error.start]:02x} at offset {error.start}: {error.reason}). "
            f"Convert it, e.g.: iconv -f LATIN1 -t UTF-8 IN > OUT"
        ) from error
    if "\0" in text:
        raise CorpusError(
            f"{path}: holds NUL characters (first at {text.index(chr(0))}): a binary file, or a download that was "
            f"reserved but not filled. Give plain text, or fetch it again."
        )
    return text.replace("\r\n", "\n")
