"""Prints the kinds of silent bugs, and what is found of each: `python tests/cases/table.py`.

With `--write` the table goes into docs/silent-bugs.md instead.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.cases.kinds_table import lines
from tests.page_table import write

DOCS = Path(__file__).parents[2] / "docs"

if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        write(DOCS / "silent-bugs.md", lines())
    else:
        for line in lines():
            print(line, flush=True)
