"""Replace a file as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file beside `path` that takes its place when the block ends well; else nothing of it stays.

    The bytes are on the disk before the name changes, so that after a crash the old file or the new one is there.
    Makes the folder if it is missing. Raises OSError as `open` does.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # secrets, since the random module's state belongs to the user's run.
    temporary = path.with_name(f".gpt_guard-{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the new name last; some systems cannot open a folder, and then the file itself is safe all the same."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
