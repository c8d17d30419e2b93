"""What a Guardian loads late moves no random numbers: a seeded run draws the same ones with and without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# In a process of its own: whatever has been imported before, here by other tests, can no longer move anything.
RUN = """
import random, sys
import numpy, torch
import gpt_guard

random.seed(0); numpy.random.seed(0); torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.ones(4, 4)

def states():
    kind, keys, *rest = numpy.random.get_state()
    return random.getstate(), (kind, keys.tolist(), *rest), torch.get_rng_state().tolist()

def unmoved(when):
    moved = [name for name, a, b in zip(("random", "numpy", "torch"), before, states()) if a != b]
    assert not moved, f"{when}: {moved}"

before = states()
guardian = gpt_guard.Guardian(model, optimizer, run_dir=sys.argv[1])
unmoved("made")
try:
    with guardian:
        unmoved("entered")
        for step in range(6):
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            guardian.log(val_loss=loss)
            (loss * float("nan") if sys.argv[2:] and step == 4 else loss).backward()
            optimizer.step()
            unmoved(f"step {step}")
except gpt_guard.NonFiniteError:
    unmoved("halted")
unmoved("left")
"""


def stderr_of(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", RUN, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_guarded_run_and_its_summary_move_no_random_state(tmp_path: Path) -> None:
    text = stderr_of(str(tmp_path))
    assert "findings     none\n" in text
    assert f"log          {tmp_path / 'steps.jsonl'}\n" in text


def test_a_halt_with_its_replay_and_bundle_moves_none_either(tmp_path: Path) -> None:
    assert "findings     1 (1 error)\n" in stderr_of(str(tmp_path), "broken")
