"""Prints what Guardian sees in each set-up: `python tests/setups/table.py`.

With `--write` the table goes into docs/setups.md instead.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.page_table import write
from tests.setups.rows import lines

DOCS = Path(__file__).parents[2] / "docs"

if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        write(DOCS / "setups.md", lines())
    else:
        for line in lines():
            print(line, flush=True)
