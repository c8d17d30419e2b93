"""What operations are called, and which of them may give another result for the same inputs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from gpt_guard.replaying.operations import documented, op_of, word_for, word_for_node
from gpt_guard.replaying.trace import Trace


@pytest.mark.parametrize(
    ("base", "word"),
    [
        ("_softmax", "softmax"),
        ("log", "log"),
        ("div", "division"),
        ("addmm", "matmul"),
        ("native_layer_norm", "layer norm"),
        ("_scaled_dot_product_flash_attention_for_cpu", "scaled_dot_product_attention"),
        ("_foreach_sqrt", "sqrt"),
        ("_log_softmax_backward_data", "log_softmax"),
        ("nll_loss_backward", "cross entropy (nll_loss)"),
        ("linalg_eigh", "eigh"),
        ("_to_copy", "cast"),
    ],
)
def test_operations(base: str, word: str) -> None:
    assert word_for(base) == word


@pytest.mark.parametrize(
    ("node", "word"),
    [
        ("SqrtBackward0", "sqrt"),
        ("SoftmaxBackward0", "softmax"),
        ("LogSoftmaxBackward0", "log_softmax"),
        ("DivBackward1", "division"),
        ("LinalgVectorNormBackward0", "norm"),
        ("NativeLayerNormBackward0", "layer norm"),
        ("ScaledDotProductFlashAttentionForCpuBackward0", "scaled_dot_product_attention"),
        ("MaskedFillBackward0", "masked_fill"),
        ("torch::autograd::AccumulateGrad", "accumulate_grad"),
    ],
)
def test_nodes(node: str, word: str) -> None:
    assert word_for_node(node) == word


@pytest.mark.parametrize(
    ("func", "names"),
    [
        (torch.ops.aten.scatter_add.default, ("scatter_add",)),
        (torch.ops.aten.index_add_.default, ("index_add",)),
        (torch.ops.aten.mm.default, ()),
        (torch.ops.aten.bernoulli.default, ()),
    ],
)
def test_on_an_accelerator(func: object, names: tuple[str, ...]) -> None:
    with FakeTensorMode():
        out = torch.ones(2, device="cuda")
    assert documented(op_of(func), out) == names


def test_on_the_cpu_there_is_none() -> None:
    assert documented(op_of(torch.ops.aten.scatter_add.default), torch.ones(2)) == ()
    model = nn.Embedding(4, 2)
    with Trace(model) as trace:
        model(torch.tensor([1, 1])).sum().backward()
    assert trace.nondeterministic == []
