"""A check may do what it likes to a model: afterwards every bit and every object is as it was."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.isolation.preserve import preserved
from mini_gpt import MiniGPT, MiniGPTConfig


class Tied(nn.Module):
    """Tied weights, a buffer, an expanded buffer, a module in a plain list, a counter, a cache."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4, dtype=dtype)
        self.head = nn.Linear(4, 7, bias=False, dtype=dtype)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(4, dtype=dtype)
        self.hidden = [nn.Linear(4, 4, dtype=dtype)]
        self.register_buffer("mask", torch.ones(1, 5).expand(3, 5))
        self.register_buffer("nothing", None)
        self.calls = 0
        self.cache: dict[str, Tensor] = {"last": torch.zeros(2)}
        self.frozen = nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.norm(self.hidden[0](self.embedding(x)).flatten(0, 1))
        self.cache["last"] = h.detach()[:2, 0]
        out: Tensor = self.head(h)
        return out


@contextmanager
def unchanged(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
    """Fails unless names, objects, bits, gradients, modes and optimizer state are the same after the block."""
    before = photograph(model, optimizer)
    yield
    after = photograph(model, optimizer)
    assert before.keys() == after.keys()
    for name, (identity, value) in before.items():
        assert after[name][0] == identity, f"{name} is another object"
        assert same(after[name][1], value), f"{name} changed"


def photograph(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, tuple[Any, Any]]:
    shot: dict[str, tuple[Any, Any]] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        shot[name] = ((id(tensor), tensor.data_ptr(), tensor.requires_grad), tensor.detach().clone())
        shot[f"{name}.grad"] = (id(tensor.grad), None if tensor.grad is None else tensor.grad.clone())
    for name, module in model.named_modules():
        shot[f"{name}.training"] = (None, module.training)
        shot[f"{name}.hooks"] = (None, len(module._forward_hooks))
    if optimizer is not None:
        for index, (key, state) in enumerate(optimizer.state.items()):
            for name, value in state.items():
                kept = value.clone() if isinstance(value, Tensor) else value
                shot[f"state.{index}.{name}"] = ((id(key), id(value) if isinstance(value, Tensor) else None), kept)
        for index, group in enumerate(optimizer.param_groups):
            shot[f"group.{index}"] = (list(map(id, group["params"])), {k: v for k, v in group.items() if k != "params"})
    return shot


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(bits(one), bits(other))
    return bool(one == other)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)


def trained(optimizer_kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> tuple[MiniGPT, Any, Tensor]:
    model = MiniGPT(MiniGPTConfig(11, block_size=6, embedding_dim=8, num_heads=2, dropout=0.5))
    optimizer = optimizer_kind(model.parameters(), lr=0.1)
    x = torch.randint(11, (2, 6))
    model(x, x)[1].backward()
    optimizer.step()
    model.blocks[1].eval()
    return model, optimizer, x


def ruin(model: MiniGPT, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """Everything that a check could ever do to a training set-up, and worse."""
    for _ in range(2):
        optimizer.zero_grad()
        model(x, x)[1].backward()
        optimizer.step()
    model.eval()
    optimizer.param_groups[0]["lr"] = 7.0
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    optimizer.state[model.head.weight] = {"momentum": torch.ones(3)}
    model.norm.weight = nn.Parameter(torch.zeros(8))
    model.head.weight.data = torch.zeros(11, 8, dtype=torch.float16)
    up = model.get_submodule("blocks.0.mlp.up")
    up.requires_grad_(False)
    up.register_forward_hook(lambda *_: None)
    del model.blocks[0].attention_norm
    model.blocks.append(nn.Linear(2, 2))
    model.position_embedding.weight.grad = torch.ones_like(model.position_embedding.weight)
    x.fill_(3)


def test_everything_is_put_back() -> None:
    model, optimizer, x = trained()
    given = x.clone()
    names = [name for name, _ in model.named_parameters()]
    with unchanged(model, optimizer), preserved(model, optimizer, [x]):
        ruin(model, optimizer, x)
    assert torch.equal(x, given)
    assert [name for name, _ in model.named_parameters()] == names


@pytest.mark.parametrize("error", [RuntimeError("a check failed"), KeyboardInterrupt(), GeneratorExit()])
def test_everything_is_put_back_after_an_exception(error: BaseException) -> None:
    model, optimizer, x = trained()

    def check_that_fails() -> None:
        with preserved(model, optimizer, [x]):
            ruin(model, optimizer, x)
            raise error

    with unchanged(model, optimizer), pytest.raises(type(error)):
        check_that_fails()


@pytest.mark.parametrize(
    "kind",
    [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Rprop],
    ids=lambda kind: kind.__name__,
)
def test_training_goes_on_as_if_nothing_had_happened(kind: Callable[..., torch.optim.Optimizer]) -> None:
    losses = []
    for checked in (False, True):
        torch.manual_seed(5)
        model, optimizer, x = trained(kind)
        if checked:
            with preserved(model, optimizer, [x]):
                ruin(model, optimizer, x)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(x, x)[1]
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]


def test_lbfgs_history_is_put_back() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    x = torch.randn(5, 3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    state = optimizer.state[model.weight]
    before = [tensor.clone() for tensor in state["old_dirs"]]
    with preserved(model, optimizer):
        optimizer.step(closure)
        optimizer.step(closure)
        assert len(state["old_dirs"]) > len(before)
    assert len(state["old_dirs"]) == len(before)
    assert all(torch.equal(one, other) for one, other in zip(state["old_dirs"], before, strict=True))


def test_state_that_a_check_created_is_gone() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with preserved(model, optimizer):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert optimizer.state
    assert not optimizer.state
    assert model.weight.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_tied_weights_buffers_attributes_and_unregistered_modules(dtype: torch.dtype) -> None:
    model = Tied(dtype)
    model.train()
    last = model.cache["last"]
    hidden = model.hidden[0]
    weight = hidden.weight.detach().clone()
    with unchanged(model), preserved(model):
        if dtype in (torch.float32, torch.float64):
            model(torch.randint(7, (2, 3))).sum().backward()
            assert hidden.weight.grad is not None
        with torch.no_grad():
            model.embedding.weight.add_(1)
            hidden.weight.mul_(3)
            model.norm.running_mean = torch.full((4,), 9.0)  # a new tensor in place of the buffer
        model.mask = torch.zeros(3, 5)
        model.head.weight = nn.Parameter(torch.zeros(7, 4))
        model.hidden.append(nn.Linear(1, 1))
        model.calls = 99
        vars(model)["extra"] = "left behind"
    assert model.head.weight is model.embedding.weight
    assert model.mask.stride(0) == 0
    assert model.nothing is None
    assert model.calls == 0
    assert not hasattr(model, "extra")
    assert model.cache["last"] is last
    assert len(model.hidden) == 1
    assert hidden.weight.grad is None
    assert torch.equal(hidden.weight, weight)
    assert not model.frozen.requires_grad


def test_a_conversion_to_half_is_undone() -> None:
    model, optimizer, _ = trained()
    with unchanged(model, optimizer), preserved(model, optimizer):
        model.half()
        assert model.head.weight.dtype is torch.float16


def test_nan_payloads_and_signed_zeros_survive() -> None:
    model = nn.Linear(4, 1, bias=False)
    raw = torch.tensor([[0x7FC00001, -2147483648, 0x7F800001, 0x00000001]], dtype=torch.int32)
    model.weight.data = raw.view(torch.float32)
    with preserved(model):
        model.weight.data.zero_()
    assert torch.equal(model.weight.data.view(torch.int32), raw)


def test_parameters_that_share_one_storage() -> None:
    flat = torch.arange(8.0)
    model = nn.Module()
    model.a, model.b = nn.Parameter(flat[:4]), nn.Parameter(flat[4:].view(2, 2))
    with preserved(model):
        flat.zero_()
        model.a.data = torch.ones(4)
    assert torch.equal(flat, torch.arange(8.0))
    flat[0] = 5.0
    assert model.a[0].item() == 5.0


def test_gradients_keep_their_objects_and_sparse_ones_their_values() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    model(torch.tensor([1, 1, 3])).sum().backward()
    grad = model.weight.grad
    assert grad is not None
    before = grad.to_dense().clone()
    with preserved(model):
        model(torch.tensor([2])).sum().backward()
        model.weight.grad = None
    assert model.weight.grad is grad
    assert torch.equal(grad.to_dense(), before)


def test_a_graph_the_user_still_holds_can_go_backward() -> None:
    model = nn.Linear(2, 2)
    loss = model(torch.ones(1, 2)).square().sum()
    with preserved(model):
        model(torch.ones(1, 2)).sum().backward()
    loss.backward()
    assert model.weight.grad is not None


def test_random_numbers_go_on_as_if_nothing_had_been_drawn() -> None:
    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), float(np.random.rand())

    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    first, second = draw(), draw()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    assert draw() == first
    with preserved():
        draw()
        torch.manual_seed(99)
        random.seed(99)
        np.random.seed(99)
    assert draw() == second


def test_views_and_overlapping_windows_of_the_users_tensors() -> None:
    ids = torch.arange(20)
    windows = ids.unfold(0, 6, 1)
    row = ids[None, :4].expand(3, 4)
    with preserved(tensors=[windows, row]):
        ids.zero_()
    assert torch.equal(ids, torch.arange(20))


def test_a_schedulers_patched_optimizer_is_left_patched() -> None:
    model, optimizer, x = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step = optimizer.step
    with preserved(model, optimizer):
        model(x, x)[1].backward()
        optimizer.step()
    assert optimizer.step == step
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_wrappers_and_parametrizations() -> None:
    compiled: Any = torch.compile(nn.Linear(2, 2), backend="eager")
    for model in (compiled, nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))):
        with unchanged(model), preserved(model):
            model(torch.ones(1, 2)).sum().backward()
            with torch.no_grad():
                next(iter(model.parameters())).add_(1)


def test_tensors_made_in_inference_mode_are_no_obstacle() -> None:
    with torch.inference_mode():
        x = torch.ones(2)
    with preserved(tensors=[x]):
        pass
    assert torch.equal(x, torch.ones(2))


def test_lazy_parameters_are_refused_before_anything_happens() -> None:
    with pytest.raises(GuardUsageError, match="lazy"), preserved(nn.LazyLinear(3)):
        pass
