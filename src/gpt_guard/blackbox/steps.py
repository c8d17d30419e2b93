"""The end of a run log, as a run log of its own."""

from __future__ import annotations

from pathlib import Path

from gpt_guard.report.run_log import MAX_LINE_BYTES, RUN_FILE

LAST_STEPS = 100
"""Enough to see a loss or a norm grow; the whole log lies in the run's folder."""
_STEP_BYTES = 4096
"""A step has a few hundred bytes in the log; lines of other kinds stand between them."""


def last_steps(run_dir: Path, count: int = LAST_STEPS) -> bytes | None:
    """The header and the last steps of the log in `run_dir`, as `read_run` reads them; None where there is no log."""
    file = run_dir / RUN_FILE
    try:
        with file.open("rb") as stream:
            header = stream.readline(MAX_LINE_BYTES)
            start = max(stream.tell(), file.stat().st_size - count * _STEP_BYTES)
            stream.seek(start)
            lines = stream.read().split(b"\n")
    except OSError:
        return None
    if not header.startswith(b'{"kind":"header"') or not header.endswith(b"\n"):
        return None
    # The first line may be half of one, and the last has no end; what is whole begins and ends like an object.
    steps = [line for line in lines if line.startswith(b'{"kind":"step"') and line.endswith(b"}")]
    return header + b"".join(line + b"\n" for line in steps[-count:])
