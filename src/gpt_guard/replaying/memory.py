"""Which tensors hold non-finite values, and who made them: kept for each storage, since views and writes share it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gpt_guard.catalogue.operation_causes import likely
from gpt_guard.records import OperationSeen, SourceLine
from gpt_guard.replaying.values import Flags, flags

_PRUNE = 4096
_MOST_ORIGINS = 4
_WIDEST = 64

Region = tuple[Any, tuple[int, ...], tuple[int, ...], Any]


@dataclass(slots=True, eq=False)
class NonFiniteOrigin:
    """What made non-finite values; `deliberate` for a mask or a fill, which is no fault by itself.

    `seen` is what is said about it. `node` is the number of the node of the backward that it was made in. `cause` is
    the key of a cause that belongs to the values themselves, such as two masks that were added. `hidden` is a line that
    has masked them away, and `idle` is True while no later operation has met them.
    """

    seen: OperationSeen
    deliberate: bool = False
    cause: str | None = None
    node: int | None = None
    hidden: SourceLine | None = None
    idle: bool = False

    def put_first(self, key: str) -> None:
        """Put a cause in front of those it has."""
        self.seen = self.seen.model_copy(update={"causes": likely((key, *(c.key for c in self.seen.causes)))})


class Maker(NamedTuple):
    """The operation that wrote a storage, its number, and those that wrote its inputs: what a divisor comes from."""

    name: str
    scalars: tuple[float, ...]
    inputs: tuple[Maker, ...]

    def behind(self, names: Collection[str], depth: int = 4) -> Maker | None:
        """The nearest operation of one of these names behind this one, itself included; None within `depth` steps."""
        return next((maker for maker in self._back(depth) if maker.name in names), None)

    def numbers(self, names: Collection[str], depth: int = 4) -> list[float]:
        """The Python numbers given to operations of these names behind this one."""
        return [number for maker in self._back(depth) if maker.name in names for number in maker.scalars]

    def _back(self, depth: int) -> Iterator[Maker]:
        level: list[Maker] = [self]
        for _ in range(depth):
            yield from level
            level = [maker for known in level for maker in known.inputs][:_WIDEST]


class Bad(NamedTuple):
    """The non-finite values that a tensor holds, and who made them, first in time first."""

    flags: Flags
    origins: tuple[NonFiniteOrigin, ...]

    @property
    def deliberate(self) -> bool:
        """Whether all of them were put there on purpose."""
        return all(origin.deliberate for origin in self.origins)


@dataclass(slots=True)
class _Cell:
    """One storage: what was written to it, region by region, and which regions are known to be finite."""

    weak: Any
    born: bool
    maker: Maker | None = None
    taints: list[tuple[Region, tuple[NonFiniteOrigin, ...]]] = field(default_factory=list)
    owner: Tensor | None = None
    owners: tuple[NonFiniteOrigin, ...] = ()
    tested: set[Region] = field(default_factory=set)


class Memory:
    """What is known of every storage that an operation has read or written.

    A storage is held weakly: its memory is freed as without a trace, but its address is not given to another one while
    it is remembered here.
    """

    def __init__(self) -> None:
        self._cells: dict[int, _Cell] = {}
        self._most = _PRUNE

    def key(self, tensor: Tensor) -> int | None:
        """What stands for the tensor's storage; None for a kind of tensor without one."""
        try:
            return int(_storage(tensor)._cdata)
        except RuntimeError:
            return None

    def maker(self, tensor: Tensor) -> Maker | None:
        """The operation that wrote the tensor's storage last."""
        cell = self._cells.get(_storage(tensor)._cdata)
        return cell.maker if cell is not None else None

    def bad(self, tensor: Tensor) -> Bad | None:
        """The non-finite values of a tensor and who made them; no origins for those made before anything was seen.

        Values are read only where it is not known that they are finite.
        """
        cell = self._cell(tensor)
        region = _region(tensor)
        if region in cell.tested or (cell.born and not cell.taints):
            return None
        found = flags(tensor)
        if found is None:
            cell.tested.add(region)
            # What is read here lies beside the bad values.
            _pass_by(cell)
            return None
        return Bad(found, _owned(cell, tensor) or _origins(cell, region))

    def wrote(
        self,
        tensor: Tensor,
        origins: tuple[NonFiniteOrigin, ...],
        maker: Maker | None,
        *,
        born: bool,
        owner: Tensor | None = None,
    ) -> None:
        """An operation wrote a tensor: who made its non-finite values, none if all are finite.

        `owner` tells it for each element where there are several: 1 + the place among `origins`, or 0.
        """
        storage = _storage(tensor)
        if born:
            self._cells.pop(storage._cdata, None)
        cell = self._cell(tensor)
        region = _region(tensor)
        cell.born = cell.born or born
        cell.maker = maker or cell.maker
        cell.tested.clear()
        if _covers(tensor, storage):
            _pass_by(cell)
            cell.taints.clear()
        else:
            cell.taints = [taint for taint in cell.taints if taint[0] != region]
        cell.owner, cell.owners = None, origins
        if origins:
            cell.taints.append((region, origins[:_MOST_ORIGINS]))
        if owner is not None and tensor.layout is torch.strided:
            cell.owner = torch.zeros(storage.nbytes() // tensor.element_size(), dtype=owner.dtype, device=owner.device)
            _seen_as(cell.owner, tensor).copy_(owner)

    def blame(self, tensor: Tensor, origin: NonFiniteOrigin) -> None:
        """Record who made the values of a tensor that was not written by any operation."""
        self._cell(tensor).taints.append((_region(tensor), (origin,)))

    def _cell(self, tensor: Tensor) -> _Cell:
        storage = _storage(tensor)
        cell = self._cells.get(storage._cdata)
        if cell is None:
            if len(self._cells) >= self._most:
                self._cells = {key: known for key, known in self._cells.items() if not known.weak.expired()}
                self._most = 2 * len(self._cells) + _PRUNE
            cell = self._cells[storage._cdata] = _Cell(StorageWeakRef(storage), born=False)
        return cell


def _seen_as(owner: Tensor, tensor: Tensor) -> Tensor:
    """What is kept for each element of a storage, seen as a tensor sees that storage."""
    return owner.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _owned(cell: _Cell, tensor: Tensor) -> tuple[NonFiniteOrigin, ...]:
    """Of several origins, those of the elements that are bad in a view; none where it is not known for each."""
    if cell.owner is None or tensor.layout is not torch.strided:
        return ()
    bad = ~torch.isfinite(tensor.detach())
    owner = _seen_as(cell.owner, tensor)
    if bool(((owner == 0) & bad).any()):
        return ()
    return tuple(origin for place, origin in enumerate(cell.owners, 1) if bool(((owner == place) & bad).any()))


def _pass_by(cell: _Cell) -> None:
    for _, origins in cell.taints:
        for origin in origins:
            origin.idle = True


def _origins(cell: _Cell, region: Region) -> tuple[NonFiniteOrigin, ...]:
    exact = [origins for known, origins in cell.taints if known == region]
    return merged(exact[-1:] or [origins for _, origins in reversed(cell.taints)])


def merged(groups: Iterable[tuple[NonFiniteOrigin, ...]]) -> tuple[NonFiniteOrigin, ...]:
    """Several lists of origins as one, each once."""
    return tuple(dict.fromkeys(origin for group in groups for origin in group))[:_MOST_ORIGINS]


def _values(tensor: Tensor) -> Tensor:
    if tensor.is_sparse:
        return tensor._values()
    return tensor if tensor.layout is torch.strided else tensor.values()


def _storage(tensor: Tensor) -> Any:
    return _values(tensor).untyped_storage()


def _region(tensor: Tensor) -> Region:
    values = _values(tensor)
    return values.storage_offset(), tuple(values.shape), values.stride(), values.dtype


def _covers(tensor: Tensor, storage: Any) -> bool:
    return bool(_values(tensor).numel() * tensor.element_size() >= storage.nbytes())
