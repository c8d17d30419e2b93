"""Writing to the terminal beside other people's progress bars, and the handler that the `gpt_guard` logger is lent."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import Any

LOGGER = logging.getLogger("gpt_guard")


def write_stderr(text: str) -> None:
    """Write to what `sys.stderr` is at this moment, with tqdm's bars taken away meanwhile.

    rich's live displays put a proxy into `sys.stderr` that prints above the bar, so that the stream must be looked up
    at each call. Does nothing where there is no stderr (pythonw). Raises OSError as the stream does.
    """
    stream = sys.stderr
    if stream is None:
        return
    with _without_bars():
        stream.write(text)
        stream.flush()


def _without_bars() -> AbstractContextManager[Any]:
    # Only what the user's program has loaded can have bars on the screen: importing tqdm here would cost for nothing.
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    mode = getattr(bars, "external_write_mode", None)
    return mode(file=sys.stderr) if mode is not None else nullcontext()


class _StderrHandler(logging.Handler):
    """Writes records to the current stderr; silent as soon as the user has set up handlers of their own."""

    def emit(self, record: logging.LogRecord) -> None:
        if any(True for _ in _other_handlers()):
            return
        try:
            write_stderr(f"gpt_guard {record.levelname.lower()}: {self.format(record)}\n")
        except Exception:
            self.handleError(record)


_HANDLER = _StderrHandler()
_LOCK = Lock()
_borrowers = 0


def lend_handler() -> bool:
    """Give the logger our handler, unless others listen already; True means that it must be taken back.

    Several Guardians at once share the one handler, so that nothing is said twice.
    """
    global _borrowers
    with _LOCK:
        if speaks_itself():
            return False
        _borrowers += 1
        LOGGER.addHandler(_HANDLER)
        return True


def take_back_handler() -> None:
    """Undo one `lend_handler`; the last one removes the handler."""
    global _borrowers
    with _LOCK:
        _borrowers -= 1
        if _borrowers == 0:
            LOGGER.removeHandler(_HANDLER)


def speaks_itself() -> bool:
    """Whether a handler of the user's own receives what this logger says; a NullHandler does not count."""
    return any(True for _ in _other_handlers())


def _other_handlers() -> Iterator[logging.Handler]:
    logger: logging.Logger | None = LOGGER
    while logger is not None:
        yield from (h for h in logger.handlers if h is not _HANDLER and not isinstance(h, logging.NullHandler))
        logger = logger.parent if logger.propagate else None
