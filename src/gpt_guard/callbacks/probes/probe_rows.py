"""Do rows of a batch know of each other? Asked by changing some rows and looking at the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gpt_guard.callbacks.probes.leak_words import likely_rows
from gpt_guard.callbacks.probes.probe_ask import Answer, Asker, by_place, by_row
from gpt_guard.catalogue import finding
from gpt_guard.hooks.isolation.compare import FirstDifference, at_row, difference, first_difference, traced
from gpt_guard.hooks.tensors import walk
from gpt_guard.records import Finding, Moment, Severity
from gpt_guard.records.render import number


class Mixed(NamedTuple):
    """The largest change of a row that stayed the same itself, and the inputs that made it."""

    change: float
    scale: float
    row: int
    replaced: dict[str, Tensor]


def may_be_a_graph(asker: Asker, rows: int) -> bool:
    """Whether rows may be nodes, which know of each other by design: a square of their number, or a list of edges."""
    ids = {tensor.shape for tensor in asker.batch.tokens.values()}
    for _, tensor in walk(asker.batch.inputs):
        # Ids of two rows, and their targets, look like edges, too.
        other = tensor.dim() == 2 and tensor.shape not in ids
        if other and (tuple(tensor.shape) == (rows, rows) or _edges(tensor)):
            return True
    held = [*asker.watch.model.parameters(), *asker.watch.model.buffers()]
    plain = [value for module in asker.watch.model.modules() for _, value in walk(list(vars(module).values()))]
    return any(tuple(tensor.shape) == (rows, rows) for tensor in (*held, *plain))


def _edges(tensor: Tensor) -> bool:
    return tensor.size(0) == 2 and tensor.size(1) > 2 and not tensor.is_floating_point()


def row_findings(asker: Asker, first: Answer, leaking: Collection[str | None] = ()) -> Iterator[Finding]:
    """GG661 for a model of token ids whose rows leak into each other.

    Which dimension is the batch is known from targets that are shifted along the other, or from an output that has one
    entry for each row. Where nothing tells, time-major data would look like a wrong batch_first: then it is told only
    if both dimensions mix, since a healthy model keeps one of them apart. Where the future leaks in the same module
    (`leaking`), positions and rows are mixed up, as a view in place of a transpose does.
    """
    ids = next(iter(asker.batch.tokens.values()))
    rows, length = ids.shape
    batch = _batch_dimension(asker, first, rows, length)
    if batch is None and rows == length:
        return
    if asker.batch.viewed and asker.batch.shift is None:
        # Pairs are cut apart like that.
        return
    for dimension in (0, 1) if batch is None else (batch,):
        if ids.size(dimension) < 2 or may_be_a_graph(asker, ids.size(dimension)):
            return
    mixed = _mixed(asker, first, batch or 0)
    if mixed is None or (batch is None and _mixed(asker, first, 1) is None):
        return
    count, time = (rows, length) if not batch else (length, rows)
    blame, joined = _blame(asker, mixed, count, time)
    reshaped = blame is not None and blame.path in leaking
    yield _finding(asker, mixed, blame, count, reshaped=reshaped, joined=joined)


def _batch_dimension(asker: Asker, first: Answer, rows: int, length: int) -> int | None:
    shift = asker.batch.shift
    if shift is not None:
        return 1 - shift.time
    if rows == length:
        return None
    pooled = [tensor for tensor in first.tensors if by_place(tensor, rows, length) is None and tensor.dim() in (1, 2)]
    sizes = {tensor.size(0) for tensor in pooled} & {rows, length}
    return None if len(sizes) != 1 else int(sizes == {length})


def _mixed(asker: Asker, first: Answer, batch: int) -> Mixed | None:
    """Every other row is changed, then half of them: what leaks from one part into the other is seen."""
    ids = next(iter(asker.batch.tokens.values()))
    count = ids.size(batch)
    numbers = torch.arange(count, device=ids.device)
    for turn, chosen in enumerate((numbers % 2 == 1, numbers < count // 2)):
        replaced: dict[str, Tensor] = {}
        for position, each in asker.batch.tokens.items():
            if each.size(batch) == count:
                where = (chosen[:, None] if batch == 0 else chosen[None]).expand_as(each)
                if (changed := asker.batch.other(position, where, seed=turn)) is not None:
                    replaced[position] = changed
        if not replaced:
            return None
        worst = _compare(asker, first, asker.ask(replaced), ids.shape, batch, ~chosen)
        if worst is not None:
            change, scale, row = worst
            return Mixed(change, scale, row, replaced)
    return None


def _compare(
    asker: Asker, first: Answer, second: Answer, shape: torch.Size, batch: int, kept: Tensor
) -> tuple[float, float, int] | None:
    sure = asker.batch.shift is not None
    # What a loss in forward compares may be flattened in another order than the model's own answer: that comes first.
    for given, again in ((first.outputs.values(), second.outputs.values()), (first.scores, second.scores)):
        worst, compared = None, False
        for one, other in zip(given, again, strict=False):
            if one.shape != other.shape:
                continue
            a, b = (by_row(each, shape[0], shape[1], batch, sure=sure) for each in (one, other))
            if a is None or b is None or a.size(0) != kept.numel():
                continue
            compared = True
            apart = difference(a, b).flatten(1).amax(1) if a.dim() > 1 else difference(a, b)
            apart = apart.masked_fill(~kept.to(apart.device), 0.0)
            change = float(apart.max())
            if change > asker.allowed(one) and (worst is None or change > worst[0]):
                worst = (change, float(one.abs().max()), int(apart.argmax()))
        if compared:
            return worst
    return None


def recurrent_findings(asker: Asker, first: Answer) -> Iterator[Finding]:
    """GG661 for float inputs `[B, T, F]` that a recurrent layer takes for `[T, B, F]`.

    Sure only where the output has one entry for each row of the first dimension and none for the second.
    """
    model = asker.watch.model
    layers = [m for m in model.modules() if isinstance(m, nn.RNNBase) and not m.batch_first]
    position, x = next(iter(walk(asker.batch.inputs)), ("", torch.empty(0)))
    if not layers or x.dim() != 3 or not x.is_floating_point() or x.size(0) < 2 or x.size(0) == x.size(1):
        return
    rows, length = x.shape[:2]
    outputs = list(first.outputs.values())
    pooled = [tensor for tensor in outputs if tensor.dim() in (1, 2) and tensor.size(0) == rows]
    if not pooled or any(length in tensor.shape[:2] or tuple(tensor.shape) == (rows, rows) for tensor in outputs):
        return
    changed = x.clone()
    # A recurrent layer carries what it sees on to later steps: the first rows are changed, the last ones looked at.
    changed[: rows // 2] = x[: rows // 2].flip(1)
    kept = torch.arange(rows) >= rows // 2
    second = asker.ask({position: changed})
    for one, other in zip(first.tensors, second.tensors, strict=False):
        if one.shape != other.shape or one.size(0) != rows:
            continue
        apart = difference(one, other).reshape(rows, -1).amax(1).masked_fill(~kept.to(one.device), 0.0)
        if float(apart.max()) > asker.allowed(one):
            mixed = Mixed(float(apart.max()), float(one.abs().max()), int(apart.argmax()), {position: changed})
            blame, _ = _blame(asker, mixed, rows, length)
            if blame is not None and blame.module in layers:
                yield _finding(asker, mixed, blame, rows)
            return


def _blame(asker: Asker, mixed: Mixed, count: int, length: int) -> tuple[FirstDifference | None, bool]:
    """Which module mixed the rows, and whether any was given them as one sequence: `[1, B, C]` or `[B, 1, C]`.

    Sentences of a document are rows of that kind.
    """
    model = asker.watch.model
    one = traced(model, lambda: asker.ask(regardless=True))
    other = traced(model, lambda: asker.ask(mixed.replaced, regardless=True))
    blame = first_difference(model, one, other, at_row(count, length, mixed.row))
    given = (tensor for event in one if event.entering for tensor in event.tensors if tensor.dim() == 3)
    return blame, any({1, count} == set(tensor.shape[:2]) for tensor in given)


def _finding(
    asker: Asker,
    mixed: Mixed,
    blame: FirstDifference | None,
    count: int,
    *,
    reshaped: bool = False,
    joined: bool = False,
) -> Finding:
    watch = asker.watch
    likely = likely_rows(watch.model, blame, "others")
    # Experts with a capacity share it between the rows of a batch: true of them by construction.
    fields = {"severity": Severity.INFO} if joined or likely[:1] == ["capacity"] else {}
    return finding(
        "GG661",
        f"What the model answers for row {mixed.row} of {count} changes by {number(mixed.change)} when only other rows "
        f"change (the largest value is {number(mixed.scale)}).",
        likely=["reshape", *likely] if reshaped and likely[:1] != ["capacity"] else likely,
        step=watch.step,
        moment=Moment.BEFORE_STEP,
        evidence={"change": mixed.change, "row": mixed.row},
        **fields,
        **(blame.named if blame is not None else {}),
    )
