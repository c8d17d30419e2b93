from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpt_guard.checkpoint.fingerprint import plain_name, state_digest, unwrap, weights_digest
from gpt_guard.checkpoint.fingerprint import tensors as module
from gpt_guard.errors import GuardUsageError

BASE = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2)}
DTYPES = [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64]


@pytest.mark.parametrize(
    "other",
    [
        {"a": BASE["a"], "c": BASE["b"]},
        {"a": BASE["a"].double(), "b": BASE["b"]},
        {"a": BASE["a"].reshape(3, 2), "b": BASE["b"]},
        {"a": BASE["a"] + torch.tensor([0, 0, 1e-6]), "b": BASE["b"]},
        {"a": BASE["a"] * torch.tensor([-1.0, 1, 1]), "b": BASE["b"]},
        {"a": BASE["a"]},
    ],
)
def test_name_dtype_shape_and_every_byte_count(other: dict[str, Tensor]) -> None:
    assert weights_digest(other) != weights_digest(BASE)


def test_order_device_layout_and_container_do_not() -> None:
    again = OrderedDict(b=BASE["b"].clone(), a=BASE["a"].t().contiguous().t())
    assert not again["a"].is_contiguous()
    assert weights_digest(again) == weights_digest(BASE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_has_bytes(dtype: torch.dtype) -> None:
    ones, zeros = torch.ones(3).to(dtype), torch.zeros(3).to(dtype)
    assert weights_digest({"a": ones}) == weights_digest({"a": ones.clone()}) != weights_digest({"a": zeros})


def test_empty_scalar_sparse_and_conjugate_tensors() -> None:
    assert weights_digest({"a": torch.empty(0, 3)}) != weights_digest({"a": torch.empty(3, 0)})
    assert weights_digest({"a": torch.tensor(1.0)}) != weights_digest({"a": torch.tensor(2.0)})
    sparse = torch.eye(3).to_sparse()
    assert weights_digest({"a": sparse}) == weights_digest({"a": sparse.clone()})
    assert weights_digest({"a": sparse}) != weights_digest({"a": (2 * torch.eye(3)).to_sparse()})
    spin = torch.tensor([1 + 2j])
    assert weights_digest({"a": spin.conj()}) == weights_digest({"a": torch.tensor([1 - 2j])})


@pytest.mark.parametrize("shape", [(64,), (8, 8), (2, 4, 8), (1, 64)])
def test_the_size_of_a_chunk_changes_nothing(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(64).reshape(shape)
    states = [{"a": tensor}, {"a": tensor.transpose(0, -1).contiguous().transpose(0, -1)}]
    whole = [weights_digest(state) for state in states]
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 3)
    assert [weights_digest(state) for state in states] == whole
    assert whole[0] == whole[1]


def test_no_more_than_a_chunk_is_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = module._bytes
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 10)

    def counted(chunk: Tensor) -> Any:
        seen.append(chunk.numel())
        return real(chunk)

    monkeypatch.setattr(module, "_bytes", counted)
    weights_digest({"flat": torch.zeros(100), "turned": torch.zeros(20, 30).t()})
    assert max(seen) == 10
    assert sum(seen) == 700


def test_a_module_stands_for_its_weights_and_buffers_without_wrappers() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    plain = weights_digest(model)
    assert plain == weights_digest(model.state_dict())
    assert weights_digest(nn.DataParallel(model)) == plain
    assert weights_digest(torch.compile(model, backend="eager")) == plain  # type: ignore[arg-type]  # torch.compile gives a module
    assert unwrap(torch.compile(nn.DataParallel(model), backend="eager")) is model  # type: ignore[arg-type]  # the same
    model(torch.randn(4, 2))
    assert weights_digest(model) != plain


def test_optimizer_state_has_a_digest() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    digests = {state_digest(optimizer.state_dict())}
    for _ in range(2):
        model(torch.randn(4, 2)).sum().backward()
        optimizer.step()
        digests.add(state_digest(optimizer.state_dict()))
    assert len(digests) == 3


def test_nesting_is_part_of_the_digest() -> None:
    states: list[Any] = [{"a": {"b": 1}}, {"a.b": 1}, {"a": [1]}, {"a": {"0": 1}}, {"a": 1}, [], {}]
    assert len({state_digest(state) for state in states}) == len(states)


def test_a_tensor_without_bytes_is_said() -> None:
    with pytest.raises(GuardUsageError, match=r"^weight lies on the meta device"):
        weights_digest(nn.Linear(2, 2, device="meta", bias=False))


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("blocks.0.weight", "blocks.0.weight"),
        ("module.blocks.0.weight", "blocks.0.weight"),
        ("_orig_mod.blocks.0.weight", "blocks.0.weight"),
        ("module._orig_mod.blocks.0.weight", "blocks.0.weight"),
        ("_orig_mod.module.blocks.0.weight", "blocks.0.weight"),
        ("blocks.0._orig_mod.weight", "blocks.0.weight"),
        ("_fsdp_wrapped_module.blocks._checkpoint_wrapped_module.0.weight", "blocks.0.weight"),
        ("blocks.module.weight", "blocks.module.weight"),
        ("my_orig_mod.weight", "my_orig_mod.weight"),
    ],
)
def test_names_lose_the_segments_of_wrappers_only(name: str, plain: str) -> None:
    assert plain_name(name) == plain
