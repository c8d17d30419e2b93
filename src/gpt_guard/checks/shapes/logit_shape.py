"""What a tensor of logits is, if it is not [B, T, V]: told from its sizes, with three sizes that differ."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn


class Layout(NamedTuple):
    """The layout in letters ("[B, V, T]"), and the cause key of GG640; the cause is empty where it is [B, T, V]."""

    letters: str
    cause: str


def layout_of(logits: Tensor, rows: int, length: int, vocab: int | None, widths: set[int]) -> Layout:
    """Which layout these sizes are; `widths` are the model's own widths, which a missing head would leave.

    Without `vocab` whatever stands in the last place is taken for it.
    """
    shape = tuple(logits.shape)
    known = vocab if vocab is not None else -1
    if shape[:2] == (rows, length) and len(shape) == 3:
        no_head = vocab is not None and shape[2] != vocab and shape[2] in widths
        return Layout("[B, T, C]", "no_head") if no_head else Layout("[B, T, V]", "")
    three: dict[tuple[int, ...], Layout] = {
        (rows, known, length): Layout("[B, V, T]", "class_first"),
        (length, rows, known): Layout("[T, B, V]", "time_first"),
        (known, rows, length): Layout("[V, B, T]", "class_first"),
        (rows, 1, known): Layout("[B, 1, V], the last position only", "last_only"),
        (rows, known): Layout("[B, V], one position only", "last_only"),
        (rows * length, known): Layout("[B * T, V]", "flattened"),
        (length, known): Layout("[T, V]", "squeezed"),
        (rows, length): Layout("[B, T]", "predictions"),
    }
    if shape in three:
        return three[shape]
    return _guess(shape, rows, length)


def _guess(shape: tuple[int, ...], rows: int, length: int) -> Layout:
    if len(shape) == 3 and (shape[0], shape[2]) == (rows, length):
        return Layout("[B, ?, T]", "class_first")
    if len(shape) == 3 and shape[:2] == (length, rows):
        return Layout("[T, B, ?]", "time_first")
    if len(shape) == 3 and shape[0] == rows:
        return Layout(f"[B, {shape[1]}, ?], with T {length}", "last_only" if shape[1] == 1 else "cropped")
    if len(shape) == 2 and shape[0] == rows * length:
        return Layout("[B * T, ?]", "flattened")
    return Layout(str(list(shape)), "last_only" if len(shape) == 2 and shape[0] == rows else "predictions")


def widths_of(model: nn.Module) -> set[int]:
    """The widths of the model's embeddings."""
    return {module.embedding_dim for module in model.modules() if isinstance(module, nn.Embedding)}


def distinct_sizes(length: int, vocab: int | None, taken: set[int]) -> tuple[int, int]:
    """A number of rows and a length no longer than `length`, different from each other and from V and widths."""
    avoid = taken | ({vocab} if vocab is not None else set())
    chosen = next((each for each in range(length, 3, -1) if each not in avoid), length)
    rows = next(each for each in (3, 2, 5) if each != chosen and each not in avoid | {1})
    return rows, chosen
