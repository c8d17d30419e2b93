"""Prints what is told of each case: operation, module, line, which of the causes it was, and the time it took.

    python tests/gallery/table.py
    python tests/gallery/table.py --only softmax --markdown

`rank` is the place of the expected cause among those told, `steps` the time of the replay in plain steps of the same
training, nobody watching. These nets are as small as can be, so that a step is almost all overhead; see
benchmarks/replay.py for models of a more usual size.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gallery.collection import CASES
from tests.gallery.parts import Case, Precision, loop_of, run, told

TITLES = ("case", "dtype", "phase", "operation", "module", "line", "cause", "rank", "steps")
WIDTHS = (28, 14, 10, 28, 36, 46, 20, 4, 5)


def row(case: Case, precision: Precision, repeats: int) -> tuple[str, ...]:
    """One line of the table."""
    runs = [run(case, precision) for _ in range(repeats)]
    finding, _ = runs[0]
    found = told(finding)
    rank = str(found.causes.index(case.cause) + 1) if case.cause in found.causes else "-"
    steps = "-"
    if finding.replay is not None:
        replay = statistics.median(guardian.replay().seconds for _, guardian in runs)
        steps = f"{replay / plain_step(case, precision):.1f}"
    module = "(loss)" if found.module is None else found.module or "(model)"
    line = "-" if found.where is None else f"{Path(found.where.file).name}:{found.where.line} {found.where.text}"
    return case.name, precision, found.phase, found.operation, module, line, case.cause, rank, steps


def plain_step(case: Case, precision: Precision, count: int = 7) -> float:
    """Seconds of a step that nobody watches."""
    times = []
    for _ in range(count):
        # Anew each time: what one bad step leaves of the weights may be refused by the next.
        loop = loop_of(case, precision)
        inputs, targets = next(iter(loop.training.batches))
        began = time.perf_counter()
        loop.step(inputs, targets)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def plain(cells: tuple[str, ...]) -> str:
    return "  ".join(cell[:width].ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


def markdown(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="only cases in whose name, operation or cause this is")
    parser.add_argument("--markdown", action="store_true", help="as a table of a document")
    parser.add_argument("--repeats", type=int, default=3, help="replays of which the median is taken")
    arguments = parser.parse_args()
    # What torch has to say of a deviation of one value is what the case is about.
    warnings.simplefilter("ignore", UserWarning)
    show = markdown if arguments.markdown else plain
    print(show(TITLES))
    if arguments.markdown:
        print(show(("---",) * len(TITLES)))
    ranks: list[str] = []
    for case in CASES:
        if any(arguments.only in text for text in (case.name, case.operation, case.cause)):
            for precision in case.runs:
                cells = row(case, precision, arguments.repeats)
                ranks.append(cells[-2])
                print(show(cells), flush=True)
    first, second = ranks.count("1"), ranks.count("2")
    print(
        f"\n{len(ranks)} rows: the expected cause is first in {first}, second in {second}, later or not told in ",
        end="",
    )
    print(len(ranks) - first - second)


if __name__ == "__main__":
    main()
