"""What a result depends on beside code and data: versions, devices, and torch's own switches."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata

import torch
from torch import nn

from gpt_guard.hooks.surroundings import surroundings


def environment_of(model: nn.Module) -> dict[str, str]:
    """Versions, platform, devices, dtypes and numeric switches as text; reads nothing from a device."""
    facts = surroundings(model)
    facts["gpt_guard"] = metadata.version("gpt-guard-torch")
    facts["default dtype"] = str(torch.get_default_dtype()).removeprefix("torch.")
    facts["float32 matmul precision"] = torch.get_float32_matmul_precision()
    facts["deterministic algorithms"] = str(torch.are_deterministic_algorithms_enabled())
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # asking must not start it
        facts["cuda"] = str(torch.version.cuda)
        facts["cudnn"] = str(torch.backends.cudnn.version())
        facts["cudnn.benchmark"] = str(torch.backends.cudnn.benchmark)
        facts["gpu"] = torch.cuda.get_device_name()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        facts["rank"] = f"{torch.distributed.get_rank()} of {torch.distributed.get_world_size()}"
    return facts


def differences(recorded: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What is not as it was, each as a sentence part: "torch was 2.12.0, is 2.13.0"."""
    shared = [name for name in recorded if name in now and name != "gpt_guard"]
    return [f"{name} was {recorded[name]}, is {now[name]}" for name in shared if recorded[name] != now[name]]
