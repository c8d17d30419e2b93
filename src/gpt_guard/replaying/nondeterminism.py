"""Operations that torch documents as nondeterministic: why a step may not repeat although everything else is equal."""

from __future__ import annotations

from typing import Any

from gpt_guard.replaying.schema import Op, names, tensors

# The list in torch.use_deterministic_algorithms; all are so on CUDA only, by atomic additions in no fixed order.
_ON_CUDA = names(
    "_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward _ctc_loss_backward _embedding_bag_dense_backward "
    "_scaled_dot_product_efficient_attention_backward _scaled_dot_product_flash_attention_backward "
    "adaptive_max_pool2d_backward avg_pool3d_backward bincount convolution_backward cudnn_convolution cumsum "
    "embedding_dense_backward fractional_max_pool2d_backward fractional_max_pool3d_backward grid_sampler_2d_backward "
    "grid_sampler_3d_backward histc index_add index_put index_reduce kthvalue max_pool3d_with_indices_backward "
    "max_unpool2d max_unpool3d median nll_loss2d_backward nll_loss2d_forward put reflection_pad1d_backward "
    "reflection_pad2d_backward reflection_pad3d_backward replication_pad1d_backward replication_pad2d_backward "
    "replication_pad3d_backward scatter_add scatter_reduce upsample_bicubic2d_backward upsample_bilinear2d_backward "
    "upsample_linear1d_backward upsample_trilinear3d_backward"
)


def documented(op: Op, out: Any) -> tuple[str, ...]:
    """The operation's name if it may give another result for the same inputs on the device it ran on.

    Random operations are not among them: with the RNG state restored they repeat.
    """
    if op.base in _ON_CUDA and any(tensor.is_cuda for tensor in tensors(out)):
        return (op.base,)
    return ()
