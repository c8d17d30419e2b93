"""Write a folder as a whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpt_guard.records.atomic import sync_folder


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder beside `path` that takes its name when the block ends well; else nothing of it stays.

    All bytes are on the disk before the name changes, so that after a crash `path` is complete or absent. A process
    that is killed in between leaves a hidden folder `.gpt_guard-*.tmp`, which nothing reads. Raises OSError, also
    where `path` exists already.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # secrets, since the random module's state belongs to the user's run.
    temporary = path.with_name(f".gpt_guard-{secrets.token_hex(8)}.tmp")
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.iterdir():
            with file.open("rb+") as stream:
                os.fsync(stream.fileno())
        sync_folder(temporary)
        if path.exists():  # an empty folder of that name would be replaced without a word
            raise FileExistsError(f"{path} exists already")
        os.rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(path.parent)
