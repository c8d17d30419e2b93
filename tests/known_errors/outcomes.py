"""Runs the known errors and their twins, and tells of each whether it is found, where, when and by what."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from gpt_guard.records import Finding

from . import loops, ranks, tensor_parallel, texts
from .parts import KNOWN, KnownError, worth_saying

FILES = (loops, texts, ranks, tensor_parallel)
RANKS = 2
_WORKER = Path(__file__).with_name("worker.py")
Both = tuple[list[Finding], list[Finding]]


class Outcome(NamedTuple):
    """What was found in the loop with the error, and in its twin."""

    error: KnownError
    broken: list[Finding]
    twin: list[Finding]

    @property
    def finding(self) -> Finding | None:
        """The finding that was to be made: of warning or above the first of all, or a note where none is."""
        first = [*worth_saying(self.broken), *self.broken]
        return first[0] if first and first[0].code == self.error.code else None

    @property
    def named(self) -> bool:
        """Whether the finding tells the place."""
        found = self.finding
        if found is None:
            return False
        line = found.where.text if found.where is not None else ""
        told = (found.module or "", found.parameter or "", line, found.seen)
        return any(self.error.place in text for text in told)

    @property
    def silent(self) -> bool:
        """Whether the twin has no finding of warning or above, nor this one as a note."""
        return not worth_saying(self.twin) and self.error.code not in {each.code for each in self.twin}


@cache
def outcome(error: KnownError) -> Outcome:
    """Run one error and its twin; those that take two processes are run together, once."""
    assert error.run is not None
    if error.ranks:
        return Outcome(error, *_on_two_ranks()[error.source])
    found = []
    with warnings.catch_warnings():
        # The forked process of a loader loads a few samples and ends.
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork.*", DeprecationWarning)
        for broken in (True, False):
            torch.manual_seed(0)
            found.append(list(error.run(broken)))
    return Outcome(error, *found)


@cache
def _on_two_ranks() -> dict[str, Both]:
    """Findings by source; both ranks must have the same complaints, notes aside: each has data of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, str(_WORKER), str(rank), str(RANKS), str(Path(folder) / "meeting")],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(RANKS)
        ]
        outputs = [each.communicate(timeout=110) for each in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    first, second = ({source: _read(both) for source, both in json.loads(text).items()} for text, _ in outputs)
    assert {source: _codes(both) for source, both in first.items()} == {
        source: _codes(both) for source, both in second.items()
    }
    return first


def _read(both: list[list[str]]) -> Both:
    broken, twin = ([Finding.model_validate_json(each) for each in one] for one in both)
    return broken, twin


def _codes(both: Both) -> list[list[str]]:
    return [[each.code for each in worth_saying(one)] for one in both]


__all__ = ["FILES", "KNOWN", "Outcome", "outcome"]
