"""Operations and nodes of autograd are called by what people write."""

from __future__ import annotations

import pytest

from gpt_guard.replaying.words import word_for, word_for_node


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
