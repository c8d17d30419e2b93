"""How the example ends when a guard stops it: what the guard says, the lines that led there, exit code 1."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpt_guard.errors import GuardError

HERE = Path(__file__).resolve().parent


@contextmanager
def exit_on_halt() -> Iterator[None]:
    """Print a GuardError once, without the frames of torch and gpt_guard, and raise SystemExit(1) in its place.

    Enter it before Guardian and the progress bar: both are then closed before the text is printed.
    """
    try:
        yield
    except GuardError as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _ours(frame.filename)]
        lines = "".join(traceback.format_list(frames))
        print(f"\n{type(error).__name__}: {error}\n\nstopped at:\n{lines}", end="", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def _ours(filename: str) -> bool:
    path = Path(filename).resolve()
    return path.parent == HERE and path != Path(__file__).resolve()
