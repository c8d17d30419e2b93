"""What watching costs: a guarded training step against the same step bare, in one process, in alternating blocks.

The model is the example's, in its tiny configuration (block 32, width 64, 4 heads, 2 layers, batch 8), trained with
AdamW and clipping on the example's text. Where guards have something to say they look harder, and that is not what a
healthy run costs: a line tells of findings, if there were any. Each round takes a block of bare steps and a block of
guarded ones, and the time of every step, on the clock and on the processor. Three kinds of ratio are printed: of the
low percentiles over all steps, which what else runs on the machine hardly moves; of the usual step, as the median over
the pairs of blocks, with their middle half; and of the whole blocks, which also have what does not come in each step:
one step in sixteen is measured in full, and the light ones before it are judged all at once. A block holds twice
sixteen. In the first steps after entry all are full, and guards look harder: that is over before a block is timed, and
printed apart.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --rounds 5 --only all     # quick look
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
from pydoc_data.topics import topics

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.defaults import default_guards
from gpt_guard.guardian import Guardian
from mini_gpt import MiniGPT, MiniGPTConfig

BATCH, BATCHES = 8, 1000
# Enough for what guards do in the first steps after entry: twenty of them are measured in full.
SETTLE = 32
# Low enough for steps that nobody disturbed, high enough not to hang on a single one.
LOW = 0.1


@dataclass(frozen=True)
class Subject:
    """What a Guardian is put round: `guards` makes the guards of a new Guardian, None stands for no Guardian at all."""

    name: str
    guards: Callable[[], list[Guard]] | None
    run_log: bool = False
    replay: bool = True


@dataclass
class Times:
    """Seconds of steps: on the clock, and of processor time over all threads."""

    wall: list[float]
    cpu: list[float]

    def extend(self, more: Times) -> None:
        self.wall += more.wall
        self.cpu += more.cpu


class Loop:
    """The user's loop, one step at a time; the batches are made before."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        text = "\n".join(topics.values())
        places = {char: place for place, char in enumerate(sorted(set(text)))}
        ids = torch.tensor([places[char] for char in text])
        self.model = MiniGPT(MiniGPTConfig(vocab_size=len(places)))
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        length = self.model.config.block_size
        starts = torch.randint(len(ids) - length, (BATCHES, BATCH)).tolist()
        self.batches = [torch.stack([ids[start : start + length + 1] for start in each]) for each in starts]
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

    def times(self, steps: int) -> Times:
        """Seconds of each of so many steps."""
        found = Times([], [])
        for _ in range(steps):
            wall, cpu = time.perf_counter(), time.process_time()
            self.step()
            found.cpu.append(time.process_time() - cpu)
            found.wall.append(time.perf_counter() - wall)
        return found


@dataclass
class Figures:
    """All steps of a subject, bare and guarded; ratios of each pair of blocks; the medians of the first 20 steps.

    `pairs` are the ratios of the median steps, `wholes` those of all the time that the blocks took.
    """

    bare: Times
    guarded: Times
    pairs: list[float]
    wholes: list[float]
    first: list[float]
    findings: list[str]

    def low(self, clock: str, share: float) -> tuple[float, float]:
        """The seconds, bare and guarded, below which this share of the steps lies."""
        bare, guarded = sorted(getattr(self.bare, clock)), sorted(getattr(self.guarded, clock))
        return bare[int(share * len(bare))], guarded[int(share * len(guarded))]


def measure(loop: Loop, subject: Subject, rounds: int, steps: int) -> Figures:
    """Alternate bare and guarded blocks; every round has a Guardian of its own."""
    figures = Figures(Times([], []), Times([], []), [], [], [], [])
    for _ in range(rounds):
        # Bare steps after guarded ones start in caches that are still full of the guards.
        loop.times(2)
        bare = loop.times(steps)
        guarded = loop.times(steps) if subject.guards is None else _guarded(loop, subject, steps, figures)
        figures.bare.extend(bare)
        figures.guarded.extend(guarded)
        figures.pairs.append(statistics.median(guarded.wall) / statistics.median(bare.wall))
        figures.wholes.append(sum(guarded.wall) / sum(bare.wall))
    return figures


def _guarded(loop: Loop, subject: Subject, steps: int, figures: Figures) -> Times:
    assert subject.guards is not None
    with tempfile.TemporaryDirectory() as folder:
        run_dir = folder if subject.run_log else None
        guards = subject.guards()
        guardian = Guardian(loop.model, loop.optimizer, guards=guards, sinks=[], run_dir=run_dir, replay=subject.replay)
        with guardian:
            figures.first.append(statistics.median(loop.times(SETTLE).wall[:20]))
            found = loop.times(steps)
        figures.findings += [each.code for each in guardian.findings]
        return found


def subjects() -> list[Subject]:
    """A bare control, Guardian without guards, each default guard alone that works in every step, all, and variants."""
    default = list(enumerate(default_guards()))
    alone = [
        Subject(f"{guard.name} alone", _only(place), replay=False) for place, guard in default if not guard.inspects
    ]
    return [
        Subject("bare against bare", None),
        Subject("no guards", list, replay=False),
        Subject("no guards, replay ready", list),
        *alone,
        Subject("all default guards", default_guards),
        Subject("all, without replay", default_guards, replay=False),
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
    plural = "s" if threads > 1 else ""
    print(f"\n{threads} thread{plural}: {rounds} pairs of {steps} steps; low is the {LOW:.0%} quantile,", flush=True)
    print("pairs the usual step, whole all steps, first steps the first twenty after entry", flush=True)
    titles = f"{'':24}{'bare low':>11}{'wall low':>10}{'cpu low':>10}{'pairs':>10}{'middle half':>15}"
    print(f"{titles}{'whole':>10}{'added low':>12}{'first steps':>13}", flush=True)
    for subject in chosen:
        # A model that has trained for long is no longer where the example's is.
        loop = Loop()
        loop.times(50)
        print(_row(subject, measure(loop, subject, rounds, steps)), flush=True)


def _row(subject: Subject, figures: Figures) -> str:
    wall, cpu = figures.low("wall", LOW), figures.low("cpu", LOW)
    low, pair, high = statistics.quantiles(figures.pairs, n=4)
    row = (
        f"{subject.name:24}{wall[0] * 1e3:8.2f} ms{wall[1] / wall[0]:9.3f}x{cpu[1] / cpu[0]:9.3f}x{pair:9.3f}x"
        f"{low:9.3f}-{high:.3f}{statistics.median(figures.wholes):9.3f}x{(wall[1] - wall[0]) * 1e6:9.0f} us"
    )
    if not figures.first:
        return row
    row += f"{statistics.median(figures.first) / statistics.median(figures.bare.wall):12.2f}x"
    return row + "".join(f"\n    findings: {code}" for code in sorted(set(figures.findings)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=25, help="pairs of blocks for each line, at least 2")
    parser.add_argument("--steps", type=int, default=32, help="steps in a block: a multiple of sixteen")
    parser.add_argument("--threads", type=int, nargs="*", help="thread counts (default: 1 and torch's own)")
    parser.add_argument("--only", default="", help="only lines whose name contains this")
    arguments = parser.parse_args()
    if arguments.rounds < 2 or arguments.steps < 1:
        parser.error("--rounds must be at least 2 and --steps at least 1")
    print(machine())
    chosen = [subject for subject in subjects() if arguments.only in subject.name]
    if not chosen:
        parser.error(f"no line has {arguments.only!r} in its name; there are: {', '.join(s.name for s in subjects())}")
    for threads in arguments.threads or sorted({1, torch.get_num_threads()}):
        report(threads, chosen, arguments.rounds, arguments.steps)


if __name__ == "__main__":
    main()
