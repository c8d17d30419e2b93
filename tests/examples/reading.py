from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch


def load(run: Path, name: str = "latest") -> dict[str, Any]:
    content: dict[str, Any] = torch.load(run / "checkpoints" / f"mini_gpt_{name}.pt")
    return content


def same(first: Any, second: Any) -> bool:
    """Bit by bit, through nested dicts and lists."""
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def records(run: Path) -> list[dict[str, Any]]:
    """The lines of a run log."""
    return [json.loads(line) for line in (run / "steps.jsonl").read_text(encoding="utf-8").splitlines()]


def logged_losses(run: Path) -> dict[int, float]:
    """Loss by step; of a step that was run twice, the later one."""
    return {record["step"]: record["loss"] for record in records(run) if record["kind"] == "step"}


def codes(run: Path) -> set[str]:
    """The codes of what was found."""
    return {record["code"] for record in records(run) if record["kind"] == "finding"}
