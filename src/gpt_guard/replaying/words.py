"""What an operation is called by the person who wrote it: `division`, not `aten.div.Tensor`."""

from __future__ import annotations

import re

_WORDS = {
    "_batch_norm_with_update": "batch norm",
    "_cdist_forward": "cdist",
    "_convolution": "convolution",
    "_cudnn_rnn": "recurrent layer",
    "_embedding_bag": "embedding bag",
    "_euclidean_dist": "cdist",
    "_fused_rms_norm": "rms norm",
    "_fused_sdp_choice": "scaled_dot_product_attention",
    "_log_softmax": "log_softmax",
    "_native_batch_norm_legit": "batch norm",
    "_native_multi_head_attention": "multi-head attention",
    "_safe_softmax": "softmax",
    "_softmax": "softmax",
    "_to_copy": "cast",
    "_trilinear": "bilinear",
    "_weight_norm_interface": "weight norm",
    "add": "addition",
    "addbmm": "matmul",
    "addmm": "matmul",
    "addmv": "matmul",
    "baddbmm": "matmul",
    "batch_norm": "batch norm",
    "binary_cross_entropy": "binary_cross_entropy",
    "bmm": "matmul",
    "convolution": "convolution",
    "cudnn_batch_norm": "batch norm",
    "div": "division",
    "dot": "matmul",
    "empty": "empty (uninitialised memory)",
    "empty_like": "empty (uninitialised memory)",
    "empty_permuted": "empty (uninitialised memory)",
    "empty_strided": "empty (uninitialised memory)",
    "fmod": "remainder",
    "index": "indexing",
    "index_put": "indexed assignment",
    "linalg_vector_norm": "norm",
    "mkldnn_convolution": "convolution",
    "mm": "matmul",
    "mul": "multiplication",
    "mv": "matmul",
    "new_empty": "empty (uninitialised memory)",
    "new_empty_strided": "empty (uninitialised memory)",
    "native_batch_norm": "batch norm",
    "native_dropout": "dropout",
    "native_group_norm": "group norm",
    "native_layer_norm": "layer norm",
    "nll_loss2d_forward": "cross entropy (nll_loss)",
    "nll_loss_forward": "cross entropy (nll_loss)",
    "rsub": "subtraction",
    "special_log_ndtr": "log_ndtr",
    "special_xlog1py": "xlog1py",
    "sub": "subtraction",
    "var_mean": "variance",
    "var": "variance",
}
# Names of autograd's nodes that do not begin with the name of the forward operation.
_NODES = {
    "LogSoftmax": "log_softmax",
    "NllLoss": "cross entropy (nll_loss)",
    "NllLoss2D": "cross entropy (nll_loss)",
    "LinalgVectorNorm": "norm",
    "NativeLayerNorm": "layer norm",
    "NativeBatchNorm": "batch norm",
    "NativeGroupNorm": "group norm",
    "ToCopy": "cast",
    "Div": "division",
    "Mul": "multiplication",
    "Addmm": "matmul",
    "Bmm": "matmul",
    "Mm": "matmul",
}


def word_for(base: str) -> str:
    """The word for an operation: `softmax` for `_softmax`; its own name where that is what people write."""
    if base.startswith("_scaled_dot_product"):
        return "scaled_dot_product_attention"
    plain = base.removeprefix("_foreach_").removesuffix("_backward_data").removesuffix("_backward")
    known = _WORDS.get(base) or _WORDS.get(plain) or _WORDS.get(f"{plain}_forward")
    return known or plain.removeprefix("_").removeprefix("special_").removeprefix("linalg_")


def word_for_node(node: str) -> str:
    """The word for the forward operation that a node of autograd is the derivative of: `sqrt` for SqrtBackward0."""
    name = re.sub(r"Backward\d*$", "", node.rpartition("::")[2])
    if name in _NODES:
        return _NODES[name]
    if name.startswith("ScaledDotProduct"):
        return "scaled_dot_product_attention"
    return word_for(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())
