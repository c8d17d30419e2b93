"""Which tensor a finding is about, read from the finding."""

from __future__ import annotations

from typing import Any

import pytest

from gpt_guard.catalogue import finding
from gpt_guard.records import Moment
from gpt_guard.replaying.target import Target, target_of


@pytest.mark.parametrize(
    ("code", "fields", "target"),
    [
        ("GG101", {"module": "a.b", "position": "output[0]"}, Target("output", "a.b", "[0]")),
        ("GG101", {"module": "a", "position": "input['x'] of a.b"}, Target("input", "a.b", "['x']")),
        ("GG101", {"module": "a", "position": "input[0] of the model"}, Target("input", "", "[0]")),
        ("GG101", {"module": "a.c", "position": "output.logits of a.b"}, Target("output", "a.b", ".logits")),
        ("GG101", {"position": "input[0] of b"}, Target("input", "b", "[0]")),
        ("GG102", {"module": "", "position": "output[1]"}, Target("output", "", "[1]")),
        ("GG102", {}, Target("loss")),
        (
            "GG104",
            {"module": "a", "parameter": "a.w", "moment": Moment.AFTER_BACKWARD},
            Target("gradient", "a", parameter="a.w"),
        ),
        # Made between backward() and step(), by code that is no backward.
        ("GG104", {"module": "a", "parameter": "a.w", "moment": Moment.BEFORE_STEP}, None),
        ("GG103", {"module": "", "position": "input[0]"}, None),
        ("GG106", {"parameter": "a.w"}, None),
    ],
)
def test_each_finding_has_its_tensor(code: str, fields: dict[str, Any], target: Target | None) -> None:
    assert target_of(finding(code, "It is bad.", **fields)) == target
