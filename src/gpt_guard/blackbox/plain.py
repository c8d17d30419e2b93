"""Turn what a model was called with into plain data: tensors on the CPU, numbers, texts, lists, dicts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gpt_guard.blackbox.manifest import LeftOut
from gpt_guard.records.render import printable

MAX_DEPTH = 32
"""Nesting deeper than this is taken for a cycle."""

_AS_IT_IS = (type(None), str, bytes, torch.dtype, torch.device, torch.Size)
_TENSORS = (Tensor, nn.Parameter, nn.Buffer) if hasattr(nn, "Buffer") else (Tensor, nn.Parameter)


class Plain:
    """Makes values plain; what has no plain form becomes None and is named in `left_out`, by its path.

    `devices` says where each tensor was that did not lie on the CPU. A tensor that comes twice stays one.
    """

    def __init__(self) -> None:
        self.left_out: list[LeftOut] = []
        self.holes: list[str] = []
        self.devices: dict[str, str] = {}
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def take(self, value: Any, path: str, depth: int = 0) -> Any:
        """The value as plain data; reads the device where a tensor lies on one."""
        if depth > MAX_DEPTH:
            return self._leave_out(path, "nested too deep")
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, (bool, int, float, complex)):
            return _number(value)
        if type(value) in _AS_IT_IS:
            return value
        if isinstance(value, str):
            return str(value)
        if isinstance(value, Mapping):
            return self._mapping(value, path, depth)
        if isinstance(value, (list, tuple, set, frozenset)):
            return self._sequence(value, path, depth)
        return self._leave_out(path, "not plain data; it would have to be pickled")

    def _leave_out(self, path: str, why: str) -> None:
        self.holes.append(path)
        self.left_out.append(LeftOut(what=printable(path, 300), why=why))

    def _mapping(self, value: Mapping[Any, Any], path: str, depth: int) -> dict[Any, Any]:
        plain: dict[Any, Any] = OrderedDict() if type(value) is OrderedDict else {}
        if type(value) not in (dict, OrderedDict):
            self._note(path, value, "a dict")
        for key, item in value.items():
            if type(key) in (str, int, float, bool, type(None)):
                plain[key] = self.take(item, joined(path, key), depth + 1)
            else:
                self._leave_out(joined(path, key), f"its key is a {type(key).__qualname__}")
        return plain

    def _sequence(self, value: Any, path: str, depth: int) -> Any:
        items = [self.take(item, joined(path, place), depth + 1) for place, item in enumerate(value)]
        kind = next(kind for kind in (list, tuple, set, frozenset) if isinstance(value, kind))
        kept = set if kind is frozenset else kind
        if type(value) is not kept:
            self._note(path, value, f"a {kept.__name__}")
        return kept(items)

    def _note(self, path: str, value: Any, kept: str) -> None:
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        self.left_out.append(LeftOut(what=printable(f"{path}: the class {name}", 300), why=f"kept as {kept}"))

    def _tensor(self, tensor: Tensor, path: str) -> Tensor | None:
        if type(tensor) not in _TENSORS or tensor.is_meta or tensor.is_nested:
            self._leave_out(path, f"a tensor of the kind {type(tensor).__qualname__}, which has no plain form")
            return None
        if tensor.device.type != "cpu":
            self.devices[path] = str(tensor.device)
        if id(tensor) not in self._copies:
            # The original is kept too: its id must not be given to another tensor meanwhile.
            self._copies[id(tensor)] = (tensor, host_copy(tensor))
        return self._copies[id(tensor)][1]


def _number(value: complex) -> complex:
    """An IntEnum or a numpy.float64 is kept as the number that it is."""
    kinds: tuple[Any, ...] = (bool, int, float, complex)
    number: complex = next(kind(value) for kind in kinds if isinstance(value, kind))
    return number


def joined(path: str, key: Any) -> str:
    """The path of an item: the one way in which both the writer and the reader name it."""
    return f"{path}[{key!r}]"


def host_copy(tensor: Tensor) -> Tensor:
    """The tensor on the CPU with its strides, which decide about kernels, and without what else its storage holds.

    On the CPU nothing is copied, unless the storage is much larger: a batch is often a slice of the whole data set.
    """
    with torch.no_grad():
        kept = tensor.detach()
        if kept.layout is not torch.strided or kept.is_quantized:
            return kept.cpu()
        kept = kept.resolve_conj().resolve_neg()
        if kept.numel() == 0:
            return kept.cpu().clone().requires_grad_(tensor.requires_grad)
        extent = 1 + sum((size - 1) * stride for size, stride in zip(kept.shape, kept.stride(), strict=True))
        if kept.device.type != "cpu" or kept.untyped_storage().nbytes() > 2 * extent * kept.element_size():
            flat = kept.as_strided((extent,), (1,))
            flat = flat.clone() if kept.device.type == "cpu" else flat.cpu()
            kept = flat.as_strided(kept.shape, kept.stride(), 0)
        return kept.requires_grad_(tensor.requires_grad)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested lists and dicts, each as often as it stands there."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from tensors_in(item)


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in nested lists and dicts; one that comes twice counts once. Reads no device."""
    different = {id(tensor): tensor for tensor in tensors_in(value)}
    return sum(tensor.numel() * tensor.element_size() for tensor in different.values())
