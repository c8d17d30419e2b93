"""A note on an exception that torch or Python has raised in the loop: where, with what, and what it most likely is."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gpt_guard.catalogue.raised import RaisedError, meaning_of
from gpt_guard.errors import GuardError
from gpt_guard.hooks.frames import RaisedIn, raised_in, tensor_in_words
from gpt_guard.records.render import some
from gpt_guard.replaying.in_place import named

if TYPE_CHECKING:
    from gpt_guard.hooks.watch import Watch
    from gpt_guard.replaying.service import Replayer

_LARGEST = 5
_MOST_WRITES = 3
# After one of these, nothing on that device answers any more.
_DEVICE_GONE = ("cuda error", "device-side assert", "cublas_status", "cudnn_status", "mps backend")
_SHAPE_WRITTEN = re.compile(r"modified by an inplace operation: \[[\w.]*Tensor \[([\d, ]*)\]\]")


def add_note(error: BaseException, watch: Watch, replayer: Replayer) -> None:
    """Add a note to an exception that leaves the watched loop; the exception stays what it is. Never raises.

    Strings only: no tensor and no frame outlives it by the note. Reads ids and labels on the CPU, and on other devices
    nothing.
    """
    if not isinstance(error, Exception) or isinstance(error, GuardError):
        return
    try:
        paths: dict[int, str] = {}
        for path, module in watch.model.named_modules():
            paths.setdefault(id(module), path)
        where = raised_in(error.__traceback__, paths)
        meaning = meaning_of(str(error))
        if meaning is None and where.path is None and where.optimizer is None:
            # The user's own, and nothing to add.
            return
        error.add_note(
            "\n".join(["", "gpt_guard:", *(f"  {line}" for line in _lines(error, where, meaning, watch, replayer))])
        )
    except Exception:  # a note that fails must not hide the error
        return


def _lines(
    error: Exception, where: RaisedIn, meaning: RaisedError | None, watch: Watch, replayer: Replayer
) -> Iterator[str]:
    if where.path is not None:
        given = ", ".join(tensor_in_words(f"input{position}", each) for position, each in where.given)
        yield f"raised in  {named(watch.model, where.path)}" + (f", given {given}" if given else "")
        yield from _weights(where.module)
    elif where.optimizer is not None:
        yield f"raised in  step() of {type(where.optimizer).__name__}"
    if where.line is not None:
        yield f"line       {where.line}"
    if meaning is None:
        return
    gone = any(text in str(error).lower() for text in _DEVICE_GONE)
    yield from () if gone else _evidence(str(error), where, meaning, watch, replayer)
    yield f"likely     {meaning.likely}"
    yield f"fix        {meaning.fix}"


def _weights(module: nn.Module | None) -> Iterator[str]:
    if module is None:
        return
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    if own:
        yield f"it holds   {', '.join(tensor_in_words(name, each) for name, each in own[:3])}"


def _evidence(message: str, where: RaisedIn, meaning: RaisedError, watch: Watch, replayer: Replayer) -> Iterable[str]:
    if meaning.key == "index":
        return _ids(where)
    if meaning.key == "in_place":
        return _in_place(message, watch, replayer)
    if meaning.key == "device":
        return _devices(where, watch)
    if meaning.key == "no_graph":
        return _no_graph(watch)
    return _largest() if meaning.key == "memory" else ()


def _ids(where: RaisedIn) -> Iterator[str]:
    """The first id that the table of an embedding has no row for."""
    table = where.module
    if not isinstance(table, nn.Embedding) or not where.given or where.given[0][1].device.type != "cpu":
        return
    ids = where.given[0][1]
    bad = ((ids < 0) | (ids >= table.num_embeddings)).nonzero()
    if not len(bad):
        return
    place = bad[0].tolist()
    yield (
        f"saw        id {int(ids[tuple(place)])} at {place}; the table has {table.num_embeddings} rows, 0 to "
        f"{table.num_embeddings - 1}. {len(bad)} of {ids.numel()} ids are outside."
    )
    length = ids.size(-1) if ids.dim() else 0
    if length > table.num_embeddings and bool((ids.reshape(-1, length)[0] == torch.arange(length)).all()):
        yield f"           They are positions: the row has {length}, the table {table.num_embeddings}."


def _in_place(message: str, watch: Watch, replayer: Replayer) -> Iterator[str]:
    """The lines that write to a tensor of that shape, from running the forward once more."""
    found = _SHAPE_WRITTEN.search(message)
    writes = replayer.in_place_writes() if found is not None else None
    if found is None or writes is None:
        return
    shape = tuple(int(size) for size in found[1].split(",") if size.strip())
    fitting = [each for each in writes if each.shape == shape]
    for each in fitting[:_MOST_WRITES]:
        module = named(watch.model, each.path)
        yield f"saw        {module} changes a tensor of that shape in place: {each.operation} at {each.line}"
    if not fitting:
        yield (
            f"saw        nothing inside of the model writes to a tensor of shape {list(shape)} in place: it happens "
            "between its output and backward()."
        )


def _devices(where: RaisedIn, watch: Watch) -> Iterator[str]:
    """What lies where, among the parameters, the input and the optimizer's state."""
    if where.optimizer is not None:
        far = [
            f"{key} of `{watch.name_of(tensor) or 'a tensor'}` is on {value.device}, the parameter on {tensor.device}"
            for tensor, state in where.optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, Tensor) and value.dim() and value.device != tensor.device
        ]
        if far:
            yield f"saw        {some(far, 2)}"
        return
    places: dict[str, list[str]] = {}
    for name, each in [*watch.model.named_parameters(), *watch.model.named_buffers()]:
        places.setdefault(str(each.device), []).append(name)
    told = [f"{len(names)} of the model's tensors on {device} ({some(names, 1)})" for device, names in places.items()]
    yield f"saw        {', '.join(told)}"


def _no_graph(watch: Watch) -> Iterator[str]:
    trainable = sum(each.requires_grad for each in watch.model.parameters())
    count = len(list(watch.model.parameters()))
    yield f"saw        {trainable} of {count} parameters require a gradient" + (
        "; the last forward of the model ran without gradients." if watch.evaluation else "."
    )


def _largest() -> Iterator[str]:
    """The largest tensors that are alive, by shape; an object that answers oddly is left out."""
    sizes: dict[str, tuple[int, int]] = {}
    for each in gc.get_objects():
        if not issubclass(type(each), Tensor):
            continue
        try:
            words, nbytes = tensor_in_words("", each).strip(), 0 if each.is_meta else each.untyped_storage().nbytes()
        except Exception:  # a kind that answers nothing
            continue
        count, size = sizes.get(words, (0, 0))
        sizes[words] = count + 1, size + nbytes
    largest = sorted(sizes.items(), key=lambda each: -each[1][1])[:_LARGEST]
    for place, (words, (count, size)) in enumerate(largest):
        label = "alive      " if place == 0 else "           "
        yield f"{label}{count} x {words}: {size / 2**20:,.0f} MiB"
