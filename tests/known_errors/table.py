"""Prints which of the known silent errors are found: `python tests/known_errors/table.py`.

With `--write` the table goes into docs/known-errors.md instead.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.known_errors.rows import lines
from tests.page_table import write

DOCS = Path(__file__).parents[2] / "docs"

if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        write(DOCS / "known-errors.md", lines())
    else:
        for line in lines():
            print(line, flush=True)
