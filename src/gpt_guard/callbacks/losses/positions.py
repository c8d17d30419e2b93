"""Which position of a model's output each score of a loss belongs to, read back through the views between the two.

A view never moves a number without saying so in the graph: its node keeps sizes and dimensions. Coordinates of a few
elements are pulled back through those nodes, so that nothing as large as the scores is ever made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt_guard.hooks.autograd_graph.nodes import name_of, signed

Coordinates = list[Tensor]
"""One tensor of indices for each dimension, all of one length."""

_FAR = 200
_MOST_ROWS = 2**18
_SAME_ORDER = frozenset({"View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze"})
# Each number stays where it is.
_IN_PLACE = frozenset(
    {
        *("Clone", "ToCopy", "Alias", "Mul", "Div", "Add", "Sub", "Neg", "Tanh", "Exp", "Log", "Sigmoid"),
        *("Clamp", "ClampMin", "ClampMax", "Softmax", "LogSoftmax", "MaskedFill"),
    }
)
# Rows stay rows where features are mixed.
_BY_ROW = frozenset({"Relu", "Gelu", "Silu", "NativeDropout", "NativeLayerNorm", "FusedRmsNorm"})
_PRODUCTS = {"Addmm": 1, "Mm": 0, "Linear": 0}
"""Operations that a linear layer is made of, and which of their inputs has the rows."""


class ScorePositions(NamedTuple):
    """Rows of scores as positions of what the model computed, `[d0, d1]`: (d0[i], d1[i]) is that of row i.

    `classes` is "whole" where the classes of a row are the features of one position, "positions" where they run over
    positions instead, "mixed" otherwise; `features` is how many the output layer has.
    """

    shape: tuple[int, int]
    first: Tensor
    second: Tensor
    classes: str
    features: int

    @property
    def flat(self) -> Tensor:
        """Positions counted row by row, `[N]`."""
        return self.first * self.shape[1] + self.second


class _Elements(NamedTuple):
    node: Any
    shape: tuple[int, ...]
    at: Coordinates


def positions_of(scores: Tensor, dim: int) -> ScorePositions | None:
    """Where the rows of scores (classes along `dim`) come from; None where the graph does not tell. Reads no scores."""
    start = _start(scores, dim)
    if start is None:
        return None
    place, rows = start
    trail = [place]
    place = _folded(_walk(place, _IN_PLACE, trail))
    classes = _classes(place, rows)
    lead = _features(place)
    if classes is None or lead is None:
        return None
    features = place.shape[lead]
    below = [each for each in trail if len(each.shape) == 3 and each.shape[2] == features]
    base = _three(place, below)
    if base is None:
        return None
    # One coordinate is that of a feature, the same for all rows.
    fixed = [k for k in (2, 1, 0) if bool((base.at[k][:rows] == base.at[k][0]).all())]
    lead = lead if base is place else fixed[0] if fixed else 2
    first, second = (dimension for dimension in range(3) if dimension != lead)
    shape = base.shape[first], base.shape[second]
    return ScorePositions(shape, base.at[first][:rows], base.at[second][:rows], classes, features)


def _folded(place: _Elements) -> _Elements:
    """What a convolution computed, `[B, C, H, W]` or with more dimensions, as `[B, C, H * W]`."""
    if place.node is None or name_of(place.node) != "Convolution" or len(place.shape) <= 3:
        return place
    sizes = place.shape[2:]
    return _Elements(place.node, (*place.shape[:2], prod(sizes)), [*place.at[:2], _ravel(place.at[2:], sizes)])


def _three(place: _Elements, known: list[_Elements]) -> _Elements | None:
    """The deepest tensor of three dimensions to be found below, through linear layers on rows `[N, C]`."""
    while len(place.shape) == 2:
        name = name_of(place.node)
        below = _below_product(place) if name in _PRODUCTS else _back(place.node, place.shape, place.at, _BY_ROW)
        if below is None:
            break
        trail = [below]
        place = _walk(below, _IN_PLACE, trail)
        known += [each for each in trail if len(each.shape) == 3]
    return place if len(place.shape) == 3 else known[-1] if known else None


def moved_along(scores: Tensor, dim: int, names: Sequence[str]) -> tuple[Any, set[int]] | None:
    """The nearest operation called one of `names` above these scores, and its dimensions along which classes run."""
    start = _start(scores, dim)
    if start is None:
        return None
    place = _walk(start[0], _IN_PLACE - set(names))
    if place.node is None or name_of(place.node) not in names:
        return None
    rows = start[1]
    return place.node, {k for k, at in enumerate(place.at) if bool((at[:rows] != at[rows : 2 * rows]).any())}


def _start(scores: Tensor, dim: int) -> tuple[_Elements, int] | None:
    """Coordinates of all rows at the first class, then at the second, then at the last."""
    classes, node = scores.size(dim), scores.grad_fn
    rows = scores.numel() // max(1, classes)
    if node is None or classes < 2 or not 0 < rows <= _MOST_ROWS:
        return None
    sizes = [size for dimension, size in enumerate(scores.shape) if dimension != dim % scores.dim()]
    others = _unravel(torch.arange(rows), sizes)
    chosen = torch.tensor([0, 1, classes - 1]).repeat_interleave(rows)
    at = [each.repeat(3) for each in others]
    at.insert(dim % scores.dim(), chosen)
    return _Elements(node, tuple(scores.shape), at), rows


def _classes(place: _Elements, rows: int) -> str | None:
    features = _features(place)
    if features is None:
        return None
    one, two, last = (([each[k * rows : (k + 1) * rows] for each in place.at]) for k in range(3))
    elsewhere = [k for k in range(len(place.shape)) if k != features]
    apart = any(bool((one[k] != other[k]).any()) for k in elsewhere for other in (two, last))
    if not apart:
        return "whole" if bool((two[features] != one[features]).all()) else "mixed"
    return "positions" if all(bool((one[features] == other[features]).all()) for other in (two, last)) else "mixed"


def _features(place: _Elements) -> int | None:
    """Along which dimension the features of one position lie in the output of an operation, if that is known."""
    if place.node is None:
        return None
    name = name_of(place.node)
    if name == "Convolution":
        return 1
    return len(place.shape) - 1 if name in _PRODUCTS or name == "Embedding" else None


def _below_product(place: _Elements) -> _Elements | None:
    node = place.node.next_functions[_PRODUCTS[name_of(place.node)]][0]
    shape = _shape(node)
    if node is None or shape is None or len(shape) != 2 or shape[0] != place.shape[0]:
        return None
    return _Elements(node, shape, [place.at[0], torch.zeros_like(place.at[0])])


def _walk(place: _Elements, passing: frozenset[str], trail: list[_Elements] | None = None) -> _Elements:
    """Pull coordinates back as far as it is certain where each number comes from."""
    for _ in range(_FAR):
        node = place.node
        above = None if node is None else _back(node, place.shape, place.at, passing)
        if above is None:
            return place
        place = above
        if trail is not None:
            trail.append(place)
    return place


def _back(node: Any, shape: tuple[int, ...], at: Coordinates, passing: frozenset[str]) -> _Elements | None:
    name = name_of(node)
    shapes = [(parent, _shape(parent)) for parent, _ in node.next_functions if parent is not None]
    if name in passing:
        # A bias, or the weights of a norm, are broadcast: the number itself comes from the parent of the same shape.
        same = [parent for parent, below in shapes if below == shape]
        wide = [below for _, below in shapes if below is None or len(below) >= len(shape)]
        return _Elements(same[0], shape, at) if len(same) == 1 and len(wide) == 1 else None
    if len(shapes) != 1 or shapes[0][1] is None:
        return None
    rule = _RULES.get(name)
    moved = None if rule is None else rule(node, shape, shapes[0][1], at)
    return None if moved is None else _Elements(shapes[0][0], shapes[0][1], moved)


def _shape(node: Any) -> tuple[int, ...] | None:
    known = getattr(node, "_input_metadata", ())
    return tuple(known[0].shape) if known else None


def _ravel(at: Coordinates, shape: Sequence[int]) -> Tensor:
    flat = torch.zeros_like(at[0])
    for index, size in zip(at, shape, strict=True):
        flat = flat * size + index
    return flat


def _unravel(flat: Tensor, shape: Sequence[int]) -> Coordinates:
    return [flat // prod(shape[k + 1 :]) % size for k, size in enumerate(shape)]


def _reshaped(node: Any, shape: tuple[int, ...], below: tuple[int, ...], at: Coordinates) -> Coordinates | None:
    return _unravel(_ravel(at, shape), below) if prod(shape) == prod(below) else None


def _transposed(node: Any, shape: tuple[int, ...], below: tuple[int, ...], at: Coordinates) -> Coordinates:
    one, other = (signed(node._saved_dim0), signed(node._saved_dim1)) if hasattr(node, "_saved_dim0") else (0, 1)
    moved = list(at)
    moved[one], moved[other] = at[other], at[one]
    return moved


def _permuted(node: Any, shape: tuple[int, ...], below: tuple[int, ...], at: Coordinates) -> Coordinates:
    moved = list(at)
    for place, source in enumerate(node._saved_dims):
        moved[signed(source) % len(at)] = at[place]
    return moved


def _sliced(node: Any, shape: tuple[int, ...], below: tuple[int, ...], at: Coordinates) -> Coordinates:
    dim = signed(node._saved_dim) % len(shape)
    start = signed(node._saved_start)
    start = min(max(start + below[dim] if start < 0 else start, 0), below[dim])
    return [each * signed(node._saved_step) + start if k == dim else each for k, each in enumerate(at)]


def _selected(node: Any, shape: tuple[int, ...], below: tuple[int, ...], at: Coordinates) -> Coordinates:
    dim = signed(node._saved_dim) % len(below)
    index = signed(node._saved_index)
    fixed = torch.full_like(at[0], index + below[dim] if index < 0 else index)
    return [*at[:dim], fixed, *at[dim:]]


def _indexed(node: Any, shape: tuple[int, ...], below: tuple[int, ...], at: Coordinates) -> Coordinates | None:
    """Rows chosen by one mask or one tensor of indices, at the front."""
    chosen = [each.cpu() for each in node._saved_indices if isinstance(each, Tensor)]
    if len(chosen) != 1 or (chosen[0].dtype is not torch.bool and chosen[0].dim() != 1):
        return None
    rows = chosen[0].nonzero() if chosen[0].dtype is torch.bool else chosen[0].unsqueeze(1)
    return [*rows[at[0]].unbind(1), *at[1:]] if rows.size(1) + len(at) - 1 == len(below) else None


_RULES: dict[str, Callable[[Any, tuple[int, ...], tuple[int, ...], Coordinates], Coordinates | None]] = {
    **dict.fromkeys(_SAME_ORDER, _reshaped),
    "Transpose": _transposed,
    "T": _transposed,
    "Permute": _permuted,
    "Slice": _sliced,
    "Select": _selected,
    "Index": _indexed,
}
