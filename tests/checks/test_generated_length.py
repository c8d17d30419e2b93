"""Stage 14: `generate` adds as many tokens as were asked for, also where it crops the prompt first."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gpt_guard.checks.generation.stage import GenerationStage
from gpt_guard.checks.runner.base import Subject
from gpt_guard.checks.runner.run import preflight

from .generate_faults import BLOCK, TinyGPT, V, with_generate


def likeliest(model: TinyGPT, ids: Tensor, until: int) -> Tensor:
    while ids.size(1) < until:
        ids = torch.cat([ids, model(ids[:, -BLOCK:])[:, -1].argmax(dim=-1, keepdim=True)], dim=1)
    return ids


def counted_from_the_whole(self: TinyGPT, ids: Tensor, max_new_tokens: int) -> Tensor:
    return likeliest(self, ids[:, -BLOCK:], ids.size(1) + max_new_tokens)


def once_too_often(self: TinyGPT, ids: Tensor, max_new_tokens: int) -> Tensor:
    return likeliest(self, ids, ids.size(1) + max_new_tokens + 1)


def cropped_first(self: TinyGPT, ids: Tensor, max_new_tokens: int) -> Tensor:
    ids = ids[:, -BLOCK:]
    return likeliest(self, ids, ids.size(1) + max_new_tokens)


def new_ones_alone(self: TinyGPT, ids: Tensor, max_new_tokens: int) -> Tensor:
    return cropped_first(self, ids, max_new_tokens)[:, -max_new_tokens:]


def failures(method: Callable[..., Tensor]) -> list[tuple[str, str, str]]:
    subject = Subject(model=with_generate(method), vocab_size=V, block_size=BLOCK)
    failed = preflight(subject, [GenerationStage()]).failed
    return [(line.title, found.code, found.causes[0]) for line in failed for found in line.findings]


@pytest.mark.parametrize(
    ("method", "title"), [(counted_from_the_whole, "long prompt"), (once_too_often, "likeliest tokens")]
)
def test_more_than_was_asked_for_is_told(method: Callable[..., Tensor], title: str) -> None:
    title_seen, code, cause = failures(method)[0]
    assert (title_seen, code) == (title, "GG680")
    assert cause.startswith("It adds more ids than were asked for")


@pytest.mark.parametrize("method", [cropped_first, new_ones_alone])
def test_a_cropped_prompt_is_no_fault(method: Callable[..., Tensor]) -> None:
    assert failures(method) == []
