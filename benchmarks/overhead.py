"""What watching costs: guarded and bare blocks of steps in turn, in one process, and the median of their ratios.

The loops are plain ones of a model that the package does not know (workloads.py). By default one row is measured for
the usual loop, and one for each axis varied alone; where axes are given, their combinations are. Other measures, each
instead of the ratios: `--parts` (what a step is spent on), `--growth` (added time against the number of modules),
`--entering` (time to enter and to leave) and `--memory` (resident memory over many steps). Nothing here passes or
fails: figures are printed, and README.md says what each means.

    python benchmarks/overhead.py                                     # tiny: every axis alone
    python benchmarks/overhead.py --case tiny deep small --guards default
    python benchmarks/overhead.py --guards each --run-log off on --repeat 3
    python benchmarks/overhead.py --parts --case deep
"""

from __future__ import annotations

import argparse
import gc
import inspect
import itertools
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.parts import print_parts
from benchmarks.workloads import CASES, Case, Chain, Loop, timed

from gpt_guard import FiniteGuard, Guard, Guardian

Guards = Callable[[], list[Guard]]


def finite(*, modules: bool) -> FiniteGuard:
    """FiniteGuard with or without a hook on each module."""
    # An older name of the same parameter.
    name = "modules" if "modules" in inspect.signature(FiniteGuard).parameters else "outputs"
    given: dict[str, Any] = {name: modules}
    return FiniteGuard(**given)


def default_guards() -> list[Guard]:
    """A new default set, asked of a Guardian, so that this file knows no inner module."""
    return list(Guardian(nn.Linear(1, 1), guards=None, sinks=[]).guards)


def doors() -> list[Guard]:
    """The default set, without a hook on each module."""
    return [finite(modules=False) if isinstance(guard, FiniteGuard) else guard for guard in default_guards()]


SETS: dict[str, Guards] = {
    "default": default_guards,
    "doors": doors,
    "none": list,
    "modules=True": lambda: [finite(modules=True)],
    "modules=False": lambda: [finite(modules=False)],
}
"""Guards by the name that the command takes; each default guard alone goes by the name of its class."""


def alone(name: str) -> list[Guard]:
    return [guard for guard in default_guards() if guard.name == name]


def guards_for(name: str) -> Guards:
    return SETS[name] if name in SETS else lambda: alone(name)


@dataclass(frozen=True)
class Row:
    """One line of the table: a loop, and what is put round it. "bare" is the control: no Guardian at all."""

    case: str
    guards: str = "default"
    run_log: str = "off"
    lr: str = "constant"
    clip: str = "on"
    accumulate: int = 1

    @property
    def name(self) -> str:
        """What differs from the usual row."""
        marks = [self.guards]
        marks += ["run log"] if self.run_log == "on" else []
        marks += ["varying lr"] if self.lr == "varying" else []
        marks += ["no clipping"] if self.clip == "off" else []
        marks += [f"accumulate {self.accumulate}"] if self.accumulate > 1 else []
        return ", ".join(marks)

    def loop(self) -> Loop:
        varying = self.lr == "varying"
        return Loop(CASES[self.case], clip=self.clip == "on", varying=varying, accumulate=self.accumulate)


@dataclass
class Figures:
    """Of each pair of blocks: bare and guarded seconds a step, all time counted, and of the median step."""

    bare: list[float]
    guarded: list[float]
    usual: list[float]
    findings: set[str]

    @property
    def ratios(self) -> list[float]:
        return [guarded / bare for bare, guarded in zip(self.bare, self.guarded, strict=True)]

    @property
    def added(self) -> float:
        """Seconds a step, median over the pairs."""
        return statistics.median(guarded - bare for bare, guarded in zip(self.bare, self.guarded, strict=True))


def measure(row: Row, pairs: int, steps: int, warm_up: int) -> Figures:
    """Pairs of blocks, each guarded one under a Guardian of its own; which of the two comes first changes each time."""
    loop = row.loop()
    loop.times(warm_up)
    figures = Figures([], [], [], set())
    for turn in range(pairs):
        if turn % 2:
            guarded, bare = _guarded(loop, row, steps, warm_up, figures.findings), _bare(loop, steps)
        else:
            bare, guarded = _bare(loop, steps), _guarded(loop, row, steps, warm_up, figures.findings)
        figures.bare.append(statistics.mean(bare))
        figures.guarded.append(statistics.mean(guarded))
        figures.usual.append(statistics.median(guarded) / statistics.median(bare))
    return figures


def _bare(loop: Loop, steps: int) -> list[float]:
    # What ran before may have left caches as it needs them.
    loop.times(2)
    return loop.times(steps)


def _guarded(loop: Loop, row: Row, steps: int, warm_up: int, findings: set[str]) -> list[float]:
    if row.guards == "bare":
        return _bare(loop, steps)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = folder if row.run_log == "on" else None
        guards = guards_for(row.guards)()
        with Guardian(loop.model, loop.optimizer, guards=guards, sinks=[], run_dir=run_dir) as guardian:
            loop.times(warm_up)
            found = loop.times(steps)
        findings |= {each.code for each in guardian.findings}
        return found


def print_ratios(rows: list[Row], arguments: argparse.Namespace) -> None:
    for case, some in itertools.groupby(rows, key=lambda row: row.case):
        pairs, steps = arguments.pairs or CASES[case].pairs, arguments.steps or CASES[case].steps
        repeats = f", {arguments.repeat} times" if arguments.repeat > 1 else ""
        print(f"\n{_size(case, CASES[case])}: {pairs} pairs of {steps} steps{repeats}", flush=True)
        print(f"{'':36}{'bare':>11}{'ratio':>9}{'middle half':>15}{'usual step':>12}{'added':>10}")
        for row in some:
            runs = [measure(row, pairs, steps, arguments.warm_up) for _ in range(arguments.repeat)]
            print(_line(row, runs), flush=True)


def _size(name: str, case: Case) -> str:
    model = Loop(case).model
    modules, tensors = len(list(model.modules())), len(list(model.parameters()))
    weights = sum(parameter.numel() for parameter in model.parameters())
    return f"{name} ({modules} modules, {tensors} tensors, {weights:,} weights)"


def _line(row: Row, runs: list[Figures]) -> str:
    ratio = statistics.median(statistics.median(run.ratios) for run in runs)
    low, _, high = statistics.quantiles([each for run in runs for each in run.ratios], n=4, method="inclusive")
    bare = statistics.median(statistics.median(run.bare) for run in runs)
    usual = statistics.median(statistics.median(run.usual) for run in runs)
    added = statistics.median(run.added for run in runs)
    codes = sorted(set().union(*(run.findings for run in runs)))
    line = f"{row.name:36}{bare * 1e3:8.2f} ms{ratio:8.3f}x{low:9.3f}-{high:.3f}{usual:11.3f}x{added * 1e6:7.0f} us"
    return line + (f"  findings: {' '.join(codes)}" if codes else "")


def print_growth(arguments: argparse.Namespace) -> None:
    """Added time a step against the number of modules, parameters and their number held."""
    pairs, steps = arguments.pairs or 5, arguments.steps or 10
    print(f"\nadded microseconds a step by the number of modules; {pairs} pairs of {steps} steps")
    counts = arguments.growth or [10, 50, 200, 500, 1000, 2000]
    print(f"{'guards':20}" + "".join(f"{count:>9}" for count in counts) + f"{'for each module more':>24}", flush=True)
    for name in arguments.guards or ["none", "modules=False", "modules=True", "doors", "default"]:
        added = [
            statistics.median(_added(count, name, pairs, steps, arguments.warm_up) for _ in range(arguments.repeat))
            for count in counts
        ]
        slope = (added[-1] - added[0]) / (counts[-1] - counts[0]) if len(counts) > 1 else float("nan")
        print(f"{name:20}" + "".join(f"{each * 1e6:>9.0f}" for each in added) + f"{slope * 1e6:>21.2f} us", flush=True)


def _added(modules: int, name: str, pairs: int, steps: int, warm_up: int) -> float:
    chain = Chain(modules)
    differences = []
    for _ in range(pairs):
        bare = [timed(chain) for _ in range(steps + 2)][2:]
        with Guardian(chain.model, chain.optimizer, guards=guards_for(name)(), sinks=[]):
            for _ in range(warm_up):
                chain.step()
            guarded = [timed(chain) for _ in range(steps)]
        differences.append(statistics.median(guarded) - statistics.median(bare))
    return statistics.median(differences)


def print_entering(arguments: argparse.Namespace) -> None:
    """Milliseconds to make and enter a Guardian, and to leave it after one step, by the number of modules."""
    print(f"\nmilliseconds to enter and to leave after one step, median of {arguments.pairs or 7}")
    print(f"{'guards':20}{'modules':>9}{'enter':>10}{'leave':>10}")
    for name in arguments.guards or ["default", "doors"]:
        for count in arguments.entering or [10, 2000]:
            entered, left = [], []
            for _ in range(arguments.pairs or 7):
                chain = Chain(count)
                chain.step()
                gc.collect()
                start = time.perf_counter()
                guardian = Guardian(chain.model, chain.optimizer, guards=guards_for(name)(), sinks=[]).start()
                entered.append(time.perf_counter() - start)
                chain.step()
                start = time.perf_counter()
                guardian.stop()
                left.append(time.perf_counter() - start)
            enter, leave = statistics.median(entered), statistics.median(left)
            print(f"{name:20}{count:>9}{enter * 1e3:>10.1f}{leave * 1e3:>10.1f}", flush=True)


def print_memory(steps: int) -> None:
    """Resident memory of this process at each tenth of a long run; flat once it has begun."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    print(f"\nresident memory over {steps} steps of a linear model, default guards and run log")
    print(f"{'steps':>10}{'MiB':>10}", flush=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        Guardian(model, optimizer, sinks=[], run_dir=folder) as guardian,
    ):
        for step in range(steps + 1):
            if step % max(steps // 10, 1) == 0:
                gc.collect()
                print(f"{step:>10}{_resident() / 2**20:>10.2f}", flush=True)
            x = torch.randn(8, 4)
            optimizer.zero_grad()
            (model(x) - x.sum(dim=1, keepdim=True) - torch.randn(8, 1)).square().mean().backward()
            optimizer.step()
        codes = sorted({each.code for each in guardian.findings})
    print(f"findings: {' '.join(codes) or 'none'}")


def _resident() -> int:
    """Bytes that this process holds in memory; Linux only."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def machine() -> str:
    """What the figures were taken on, and what else was at work there."""
    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
        processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), processor)
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return (
        f"{processor}, {os.cpu_count()} cores{load}, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, threads: {torch.get_num_threads()}"
    )


def rows_of(arguments: argparse.Namespace) -> Iterator[Row]:
    """The combinations of the axes that are given; where none is, each axis alone beside the usual row."""
    axes = {name: getattr(arguments, name) for name in ("guards", "run_log", "lr", "clip", "accumulate")}
    given = {name: values for name, values in axes.items() if values is not None}
    for case in arguments.case:
        usual = Row(case)
        if given:
            for values in itertools.product(*given.values()):
                yield replace(usual, **dict(zip(given, values, strict=True)))
            continue
        yield replace(usual, guards="bare")
        yield usual
        yield replace(usual, run_log="on")
        yield replace(usual, lr="varying")
        yield replace(usual, clip="off")
        yield replace(usual, accumulate=4)
        for name in [*SETS, *(guard.name for guard in default_guards())]:
            if name != usual.guards:
                yield replace(usual, guards=name)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = [guard.name for guard in default_guards()]
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=["tiny"], help="sizes of the GPT")
    parser.add_argument(
        "--guards", nargs="+", metavar="SET", help=f"each, bare, {', '.join(SETS)}, or of {', '.join(names)}"
    )
    parser.add_argument("--run-log", nargs="+", choices=["off", "on"], help="with a run_dir or without")
    parser.add_argument("--lr", nargs="+", choices=["constant", "varying"])
    parser.add_argument("--clip", nargs="+", choices=["on", "off"], help="clip_grad_norm_ in each step")
    parser.add_argument("--accumulate", nargs="+", type=int, help="micro-batches to a step")
    parser.add_argument("--pairs", type=int, help="pairs of blocks, at least 2 (default: by the case)")
    parser.add_argument("--steps", type=int, help="steps in a block (default: by the case)")
    parser.add_argument("--warm-up", type=int, default=40, help="steps left out after each entry")
    parser.add_argument("--repeat", type=int, default=1, help="measure all of it so many times: the median of medians")
    parser.add_argument("--threads", type=int, help="threads of torch (default: as many as torch takes)")
    parser.add_argument("--parts", action="store_true", help="what a guarded step is spent on, instead")
    parser.add_argument("--growth", nargs="*", type=int, metavar="MODULES", help="by the number of modules, instead")
    parser.add_argument("--entering", nargs="*", type=int, metavar="MODULES", help="time to enter and leave, instead")
    parser.add_argument("--memory", nargs="?", type=int, const=100_000, metavar="STEPS", help="slow; instead")
    arguments = parser.parse_args()
    if arguments.guards is not None:
        arguments.guards = [one for name in arguments.guards for one in (names if name == "each" else [name])]
        if unknown := set(arguments.guards) - {"bare", *SETS, *names}:
            parser.error(f"no guards are called {', '.join(sorted(unknown))}; see --help")
    if arguments.pairs is not None and arguments.pairs < 2:
        parser.error("--pairs must be at least 2")
    return arguments


def main() -> None:
    arguments = parsed()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    print(machine(), flush=True)
    if arguments.parts:
        arguments.guards = arguments.guards or ["default"]
        for row in rows_of(arguments):
            title, run_log = f"{row.case}, {row.name}", row.run_log == "on"
            print_parts(title, row.loop(), guards_for(row.guards), arguments, run_log=run_log)
    elif arguments.growth is not None:
        print_growth(arguments)
    elif arguments.entering is not None:
        print_entering(arguments)
    elif arguments.memory is not None:
        print_memory(arguments.memory)
    else:
        print_ratios(list(rows_of(arguments)), arguments)


if __name__ == "__main__":
    main()
