from __future__ import annotations

import torch
from torch import Tensor, nn

from gpt_guard.callbacks.data.batches import InputNames


class Model(nn.Module):
    def forward(self, ids: Tensor, labels: Tensor | None = None, *, mask: Tensor | None = None) -> Tensor:
        return ids


def test_data_and_targets_by_name() -> None:
    names = InputNames(Model())
    ids, labels, mask = torch.ones(2, 3), torch.zeros(2), torch.ones(2, 3)
    for given in (names.split((ids, labels), {"mask": mask}), names.split((ids,), {"labels": labels, "mask": mask})):
        assert list(given.data) == ["ids", "mask"]
        assert list(given.targets) == ["labels"]
        assert given.first is ids


def test_structures_are_walked_and_what_has_no_values_is_left_out() -> None:
    batch = {
        "input_ids": torch.ones(2, 3),
        "labels": torch.ones(2),
        "empty": torch.ones(0),
        "meta": torch.ones(2, device="meta"),
    }
    found = InputNames(Model()).split((batch,), {})
    assert list(found.data) == ["ids['input_ids']"]
    assert list(found.targets) == ["ids['labels']"]


def test_a_wrapper_that_takes_anything() -> None:
    class Wrapper(nn.Module):
        def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
            return args[0]

    found = InputNames(Wrapper()).split((torch.ones(2),), {"y": torch.ones(2)})
    assert (list(found.data), list(found.targets)) == (["input[0]"], ["y"])
