"""Puts a table that a command makes into the page that shows it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

BEGIN, END = "<!-- table -->", "<!-- end of table -->"


def write(page: Path, lines: Iterable[str]) -> None:
    """Replace what stands between the two marks of a page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{page} has no table between `{BEGIN}` and `{END}`")
    table = "\n".join(lines).strip("\n")
    page.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}", encoding="utf-8")
