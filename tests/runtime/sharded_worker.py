"""One rank of a training with fully_shard (FSDP2) on the CPU; prints, as JSON, what a default Guardian found.

Run by test_sharded.py: `python sharded_worker.py RANK RANKS FILE SCENARIO`, one process for each rank.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gpt_guard import GuardError, Guardian

RANK, RANKS, FILE, SCENARIO = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
STEPS, BAD_STEP = 6, 4


NOW = {"bad": False}


class Spoiler(nn.Module):
    """Gives NaN once it is told to."""

    def forward(self, x: Tensor) -> Tensor:
        return x * float("nan") if NOW["bad"] else x


def make() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Spoiler(), nn.Linear(8, 8))
    mesh = init_device_mesh("cpu", (RANKS,))
    fully_shard(model[0], mesh=mesh)  # its memory is given back between forward and backward
    fully_shard(model, mesh=mesh)
    return model


def train(model: nn.Sequential, guarded: bool) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(RANK)
    guardian = Guardian(model, optimizer, sinks=[], summary=False) if guarded else None
    halted = None
    try:
        if guardian is not None:
            guardian.start()
        for step in range(STEPS):
            optimizer.zero_grad()
            NOW["bad"] = SCENARIO == "output" and step == BAD_STEP
            loss = model(torch.randn(4, 8, generator=generator)).square().mean()
            if SCENARIO == "loss" and step == BAD_STEP:
                loss = loss * float("nan")
            loss.backward()
            optimizer.step()
    except GuardError as error:
        halted = {"code": error.finding.code, "step": error.finding.step, "seen": error.finding.seen}
    finally:
        if guardian is not None:
            guardian.stop()
    weights = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]
    return {
        "halted": halted,
        "findings": [] if guardian is None else [each.code for each in guardian.findings],
        "not_watched": [] if guardian is None else list(guardian.report().not_watched),
        "weights": [each.detach().tolist() for each in weights],
    }


def main() -> None:
    dist.init_process_group("gloo", init_method=f"file://{FILE}", rank=RANK, world_size=RANKS)
    bare = train(make(), guarded=False) if SCENARIO == "healthy" else None
    seen = train(make(), guarded=True)
    print(json.dumps({**seen, "bit_identical": bare is None or bare["weights"] == seen["weights"]}), flush=True)
    # A group of gloo may abort the process while it is torn down.
    os._exit(0)


main()
