"""What the answer costs: the time of a replay in plain steps of the same model, and the memory it needs beside them.

The model is the example's MiniGPT, in its own size and in a larger one, trained with AdamW. A fault is switched on in
one step: a root of negative numbers in the last block (forward), a root of 0 in the first one (backward, the longest
way), or one in a loss outside of the model. Each round takes plain steps and one step that halts, in one process, and
compares those; the median over the rounds is printed, and for the replay the lowest and the highest. `halted` is the
whole step up to its exception, replay included, `cpu` the same in processor time, which other work on the machine
moves less. Memory is that of a process of its own: how far the peak rises above that of plain steps, beside what one
forward keeps for its backward.

    python benchmarks/replay.py
    python benchmarks/replay.py --rounds 3 --only tiny
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from gpt_guard import FiniteGuard, Guardian, NonFiniteError
from mini_gpt import MiniGPT, MiniGPTConfig

SIZES = {
    "tiny": (MiniGPTConfig(vocab_size=96), 8),
    "small": (MiniGPTConfig(vocab_size=512, block_size=64, embedding_dim=192, num_heads=6, num_layers=4), 8),
}
FAULTS = ("forward", "backward", "loss")
PLAIN = 6


class Faulty(nn.Module):
    """An activation that goes wrong once `fault` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.fault = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.fault == "forward":
            return (-x.abs() - 1).sqrt()
        return F.gelu(x) + (x * 0).sqrt() if self.fault == "backward" else F.gelu(x)


class Seconds(NamedTuple):
    """On the clock, and of processor time."""

    wall: float
    cpu: float


class Figures(NamedTuple):
    """Seconds of a plain step, of a step up to its exception, and of the replay in it (on the clock)."""

    plain: Seconds
    halted: Seconds
    replay: float


class Loop:
    """The user's loop; `break_it` makes its next step fail."""

    def __init__(self, size: str, fault: str) -> None:
        torch.manual_seed(0)
        config, self.batch = SIZES[size]
        self.model, self.fault, self.broken = MiniGPT(config), fault, False
        self.activation = Faulty()
        block = self.model.blocks[0 if fault == "backward" else -1]
        block.get_submodule("mlp").register_module("activation", self.activation)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.ids = torch.randint(config.vocab_size, (self.batch, config.block_size + 1))
        self.loss_of = self.loss

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return (-loss.abs()).sqrt() if self.broken and self.fault == "loss" else loss

    def break_it(self, *, broken: bool) -> None:
        self.broken = broken
        self.activation.fault = self.fault if broken else ""

    def step(self) -> Seconds:
        """How long one step takes, also where it ends in an exception of the guard."""
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            self.optimizer.zero_grad(set_to_none=True)
            logits, _ = self.model(self.ids[:, :-1])
            self.loss_of(logits, self.ids[:, 1:]).backward()
            self.optimizer.step()
        except NonFiniteError:
            pass
        return Seconds(time.perf_counter() - wall, time.process_time() - cpu)

    def round(self) -> Figures:
        """Plain steps, then one that halts."""
        steps = [self.step() for _ in range(PLAIN)]
        plain = Seconds(*(statistics.median(clock) for clock in zip(*steps, strict=True)))
        guardian = Guardian(self.model, self.optimizer, guards=[FiniteGuard()], sinks=[], inspect_steps=0)
        self.loss_of = guardian.watch_loss(self.loss)
        try:
            with guardian:
                self.step()
                self.break_it(broken=True)
                halted = self.step()
        finally:
            self.loss_of = self.loss
            self.break_it(broken=False)
        outcome = guardian.replay()
        assert outcome.reproduced, outcome.text
        return Figures(plain, halted, outcome.seconds)


def report(size: str, fault: str, rounds: int) -> str:
    """One line: the ratios, and the peak of memory."""
    loop = Loop(size, fault)
    loop.round()
    found = [loop.round() for _ in range(rounds)]
    replays = [each.replay / each.plain.wall for each in found]
    wall = statistics.median(each.halted.wall / each.plain.wall for each in found)
    cpu = statistics.median(each.halted.cpu / each.plain.cpu for each in found)
    plain = statistics.median(each.plain.wall for each in found)
    spread = f"{min(replays):.1f}-{max(replays):.1f}"
    ratios = f"{statistics.median(replays):9.1f}{spread:>15}{wall:9.1f}{cpu:9.1f}"
    return f"{size:8}{fault:10}{plain * 1e3:8.1f} ms{ratios}{memory(size, fault):>23}"


def memory(size: str, fault: str) -> str:
    """How far the peak of a fresh process rises in a halted step, what a forward keeps, and the ratio; Linux only."""
    if not Path("/proc/self/status").exists():
        return "-"
    done = subprocess.run([sys.executable, __file__, "--peak", size, fault], capture_output=True, text=True, check=True)
    rise, forward, ratio = (float(part) for part in done.stdout.split())
    return f"{rise:.0f} of {forward:.0f} MB, {ratio:.1f}"


def peak(size: str, fault: str) -> None:
    """Print the rise of the peak in a halted step above that of plain steps, and the bytes that a forward keeps."""
    loop = Loop(size, fault)
    for _ in range(PLAIN):
        loop.step()
    kept = saved_bytes(loop)
    before = high_water()
    loop.round()
    print((high_water() - before) / 2**10, kept / 2**20, (high_water() - before) * 2**10 / kept)


def high_water() -> int:
    """The largest resident size so far, in kB; `ru_maxrss` would begin at that of the process that started this one."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def saved_bytes(loop: Loop) -> int:
    """What one forward keeps for the backward, each storage once, parameters left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in loop.model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logits, _ = loop.model(loop.ids[:, :-1])
        loop.loss(logits, loop.ids[:, 1:]).backward()
    return sum(kept.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="pairs of plain steps and a halted one for each line")
    parser.add_argument("--only", default="", help="only this size")
    parser.add_argument("--peak", nargs=2, metavar=("SIZE", "FAULT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        peak(*arguments.peak)
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; replay, halted and cpu in plain steps")
    titles = f"{'size':8}{'fault':10}{'plain step':>11}{'replay':>9}{'low-high':>15}{'halted':>9}{'cpu':>9}"
    print(f"{titles}{'peak of a forward':>23}")
    for size in SIZES:
        if arguments.only in size:
            for fault in FAULTS:
                print(report(size, fault, arguments.rounds), flush=True)


if __name__ == "__main__":
    main()
