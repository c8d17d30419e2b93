"""What an aten operation is, read from its schema once: its arguments' names, which it writes, and how values pass."""

from __future__ import annotations

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
RANDOM = torch.Tag.nondeterministic_seeded


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
        random=RANDOM in func.tags,
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
