"""What watching costs: a guarded training step against the same step bare, in one process, in alternating blocks.

The model is the example's, in its tiny configuration (block 32, width 64, 4 heads, 2 layers, batch 8), trained with
AdamW and clipping. Each round times a block of bare steps and a block of guarded ones; the ratio of their medians is
one pair, and the median over all rounds is printed, with the middle half of the pairs. Guards that look harder in the
first steps after entry have done so before a block is timed; what those first steps cost is printed apart.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --rounds 5 --steps 20     # quick look
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.defaults import default_guards
from gpt_guard.guardian import Guardian
from mini_gpt import MiniGPT, MiniGPTConfig

BATCH, VOCABULARY = 8, 96
# Enough for what guards do in the first steps after entry.
SETTLE = 10


@dataclass(frozen=True)
class Subject:
    """What a Guardian is put round: `guards` makes the guards of a new Guardian, None stands for no Guardian at all."""

    name: str
    guards: Callable[[], list[Guard]] | None
    run_log: bool = False


class Loop:
    """The user's loop, one step at a time."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = MiniGPT(MiniGPTConfig(vocab_size=VOCABULARY))
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        length = self.model.config.block_size
        self.batches = [torch.randint(VOCABULARY, (BATCH, length + 1)) for _ in range(16)]
        self._taken = 0

    def step(self) -> None:
        ids = self.batches[self._taken % len(self.batches)]
        self._taken += 1
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(ids[:, :-1], ids[:, 1:])[1]
        assert loss is not None
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def times(self, steps: int) -> list[float]:
        """Seconds of each of so many steps."""
        found = []
        for _ in range(steps):
            start = time.perf_counter()
            self.step()
            found.append(time.perf_counter() - start)
        return found


@dataclass
class Figures:
    """Medians of a subject over all rounds: seconds bare, seconds guarded, and of the first steps after entry."""

    bare: list[float]
    guarded: list[float]
    first: list[float]

    @property
    def ratios(self) -> list[float]:
        return [guarded / bare for guarded, bare in zip(self.guarded, self.bare, strict=True)]


def measure(loop: Loop, subject: Subject, rounds: int, steps: int) -> Figures:
    """Alternate bare and guarded blocks; every round has a Guardian of its own."""
    figures = Figures([], [], [])
    for _ in range(rounds):
        figures.bare.append(statistics.median(loop.times(steps)))
        if subject.guards is None:
            figures.guarded.append(statistics.median(loop.times(steps)))
            continue
        with tempfile.TemporaryDirectory() as folder:
            run_dir = folder if subject.run_log else None
            guardian = Guardian(loop.model, loop.optimizer, guards=subject.guards(), sinks=[], run_dir=run_dir)
            with guardian:
                figures.first.append(statistics.median(loop.times(SETTLE)))
                figures.guarded.append(statistics.median(loop.times(steps)))
    return figures


def subjects() -> list[Subject]:
    """A bare control, Guardian without guards, each default guard alone, all of them, and all with the run log."""
    alone = [Subject(f"{guard.name} alone", _only(place)) for place, guard in enumerate(default_guards())]
    return [
        Subject("bare against bare", None),
        Subject("no guards", list),
        *alone,
        Subject("all default guards", default_guards),
        Subject("all, with the run log", default_guards, run_log=True),
    ]


def _only(place: int) -> Callable[[], list[Guard]]:
    return lambda: [default_guards()[place]]


def machine() -> str:
    """What the figures were taken on."""
    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
        processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), processor)
    return (
        f"{processor}, {os.cpu_count()} cores, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def report(threads: int, chosen: Sequence[Subject], rounds: int, steps: int) -> None:
    torch.set_num_threads(threads)
    loop = Loop()
    loop.times(50)
    print(f"\n{threads} thread{'s' if threads > 1 else ''}: {rounds} pairs of {steps} steps", flush=True)
    print(f"{'':24}{'bare':>10}{'ratio':>9}{'middle half':>16}{'added':>11}{'first steps':>13}")
    for subject in chosen:
        figures = measure(loop, subject, rounds, steps)
        ratio, bare = statistics.median(figures.ratios), statistics.median(figures.bare)
        low, _, high = statistics.quantiles(figures.ratios, n=4)
        first = f"{statistics.median(figures.first) / bare:12.2f}x" if figures.first else ""
        print(
            f"{subject.name:24}{bare * 1e3:7.2f} ms{ratio:8.3f}x{low:9.3f}-{high:.3f}"
            f"{(ratio - 1) * bare * 1e6:8.0f} us{first}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="pairs of blocks for each line, at least 2")
    parser.add_argument("--steps", type=int, default=40, help="steps in a block")
    parser.add_argument("--threads", type=int, nargs="*", help="thread counts (default: 1 and torch's own)")
    parser.add_argument("--only", default="", help="only lines whose name contains this")
    arguments = parser.parse_args()
    if arguments.rounds < 2 or arguments.steps < 1:
        parser.error("--rounds must be at least 2 and --steps at least 1")
    print(machine())
    chosen = [subject for subject in subjects() if arguments.only in subject.name]
    for threads in arguments.threads or sorted({1, torch.get_num_threads()}):
        report(threads, chosen, arguments.rounds, arguments.steps)


if __name__ == "__main__":
    main()
