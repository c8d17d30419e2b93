"""What an aten operation is: how values pass through it, read from its schema once, and what a person calls it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor


def names(text: str) -> frozenset[str]:
    """The words of a text as a set of names."""
    return frozenset(text.split())


# They write the whole of their first argument and read nothing of it.
_OVERWRITES = names(
    "bernoulli_ cauchy_ copy_ exponential_ fill_ geometric_ log_normal_ normal_ random_ set_ uniform_ zero_"
)
# They put given values somewhere: a mask, a table that is filled.
FILLS = names(
    "constant_pad_nd fill full full_like index_fill lift_fresh masked_fill new_full scalar_tensor scatter threshold "
    "where"
)
EMPTY = names("empty empty_like empty_strided empty_permuted new_empty new_empty_strided resize")
# They move values and compute none.
MOVES = names(
    "_to_copy _unsafe_view alias as_strided_scatter cat clone contiguous copy diagonal_scatter flip gather index "
    "index_copy index_put index_select lift_fresh masked_scatter masked_select pixel_shuffle repeat roll scatter "
    "select_scatter slice_scatter sort split_with_sizes_copy stack take topk tril triu unfold unsafe_split where "
    "max_pool2d_with_indices amax amin max min maximum minimum nan_to_num neg masked_fill constant_pad_nd"
)
# They place whole tensors beside each other.
CARRIES = names("cat stack")
# They let through some of their input's values, or bring infinities back into range.
HIDES = MOVES | names("clamp clamp_max clamp_min exp relu sigmoid tanh _softmax")
# torch.logdet ends in a `where` over the sign that they give.
DETERMINANTS = names("_linalg_slogdet _linalg_det")
# They may give another result for the same inputs: the list in torch.use_deterministic_algorithms. All are so on CUDA
# only, by atomic additions in no fixed order.
_NONDETERMINISTIC = names(
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
# What people write where they do not write the operation's own name.
_WORDS = {
    name: word
    for word, text in {
        "addition": "add",
        "batch norm": "_batch_norm_with_update _native_batch_norm_legit batch_norm cudnn_batch_norm native_batch_norm",
        "bilinear": "_trilinear",
        "cast": "_to_copy",
        "cdist": "_cdist_forward _euclidean_dist",
        "convolution": "mkldnn_convolution",
        "cross entropy (nll_loss)": "nll_loss2d_forward nll_loss_forward",
        "division": "div",
        "dropout": "native_dropout",
        "embedding bag": "_embedding_bag",
        "empty (uninitialised memory)": "empty empty_like empty_permuted empty_strided new_empty new_empty_strided",
        "group norm": "native_group_norm",
        "indexed assignment": "index_put",
        "indexing": "index",
        "layer norm": "native_layer_norm",
        "matmul": "addbmm addmm addmv baddbmm bmm dot mm mv",
        "multi-head attention": "_native_multi_head_attention",
        "multiplication": "mul",
        "norm": "linalg_vector_norm",
        "recurrent layer": "_cudnn_rnn",
        "remainder": "fmod",
        "rms norm": "_fused_rms_norm",
        "scaled_dot_product_attention": "_fused_sdp_choice",
        "softmax": "_safe_softmax",
        "subtraction": "rsub sub",
        "variance": "var var_mean",
        "weight norm": "_weight_norm_interface",
    }.items()
    for name in text.split()
}
# Names of autograd's nodes that do not begin with the name of the forward operation.
_NODES = {"NllLoss2D": "cross entropy (nll_loss)", "ToCopy": "cast"}


class Op(NamedTuple):
    """An operation: `base` is its name without overload and without the underscore of the in-place form.

    `overwrites` are arguments of which nothing is read, `by_name` those that are given by keyword only. `whole` is
    False where it stands for one of many that run at once.
    """

    func: Any
    base: str
    aten: str
    arguments: tuple[str, ...]
    by_name: frozenset[str]
    writes: frozenset[str]
    overwrites: frozenset[str]
    pointwise: bool
    random: bool
    whole: bool = True

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments by name."""
        names = self.arguments or tuple(f"[{position}]" for position in range(len(args)))
        return {**dict(zip(names, args, strict=False)), **kwargs}


@cache
def op_of(func: Any) -> Op:
    """The operation behind a function that a dispatch mode is given."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        # An operation that is given functions, such as torch.cond: nothing is known of its arguments.
        nothing: frozenset[str] = frozenset()
        return Op(func, str(func), str(func), (), nothing, nothing, nothing, pointwise=False, random=True)
    writes = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    name = schema.name.rpartition("::")[2]
    outs = {a.name for a in schema.arguments if a.kwarg_only and a.name in writes}
    first = {schema.arguments[0].name} & writes if name in _OVERWRITES else set()
    base = name.removesuffix("_") if name.endswith("_") and not name.endswith("__") else name
    return Op(
        func=func,
        base=base,
        aten=str(func),
        arguments=tuple(a.name for a in schema.arguments),
        by_name=frozenset(a.name for a in schema.arguments if a.kwarg_only),
        writes=frozenset(writes),
        overwrites=frozenset(outs | first),
        pointwise=torch.Tag.pointwise in func.tags,
        random=torch.Tag.nondeterministic_seeded in func.tags,
    )


def single(op: Op, bound: dict[str, Any], position: int) -> tuple[Op, dict[str, Any]]:
    """Of a `_foreach_` operation, the one at `position` as the operation on single tensors; any other as it is."""
    if not op.base.startswith("_foreach_"):
        return op, bound
    one = {name: value[position] if isinstance(value, (list, tuple)) else value for name, value in bound.items()}
    return op._replace(base=op.base.removeprefix("_foreach_"), whole=False), one


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in an argument or a result: itself, or those in a list."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors(part)


def scalars(bound: dict[str, Any]) -> dict[str, float]:
    """The Python numbers among the arguments, flags left out."""
    return {name: float(v) for name, v in bound.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}


def documented(op: Op, out: Any) -> tuple[str, ...]:
    """The operation's name if it may give another result for the same inputs on the device it ran on.

    Random operations are not among them: with the RNG state restored they repeat.
    """
    if op.base in _NONDETERMINISTIC and any(tensor.is_cuda for tensor in tensors(out)):
        return (op.base,)
    return ()


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
