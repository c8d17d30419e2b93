"""One rank: runs each known error that takes two processes, and its twin, and prints what it found as JSON.

`python worker.py RANK RANKS FILE`, one process for each rank; FILE is where they meet.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from tests.known_errors import ranks, tensor_parallel
from tests.known_errors.parts import KNOWN
from torch import distributed as dist

FILES = (ranks, tensor_parallel)


def main() -> None:
    torch.set_num_threads(1)
    rank, size, meeting = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    found: dict[str, list[list[str]]] = {}
    for error in KNOWN:
        if error.run is not None and error.ranks:
            both = [error.run(broken) for broken in (True, False)]
            found[error.source] = [[each.model_dump_json() for each in one] for one in both]
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()
    # Threads of gloo may be at work still, and the interpreter's end would abort the process for it now and then.
    os._exit(0)


if __name__ == "__main__":
    main()
