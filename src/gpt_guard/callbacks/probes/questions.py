"""What a model is asked: does it answer twice alike, does it see what it predicts, do rows know of each other?"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn

from gpt_guard.callbacks.modes.dropout import dropout_in_eval
from gpt_guard.callbacks.probes.batch import ShiftedTargets
from gpt_guard.callbacks.probes.findings import Leak, Mixed, future_leak, growing, mixed_rows
from gpt_guard.callbacks.probes.runner import ProbeAnswer, ProbeRunner, by_place, by_row
from gpt_guard.hooks.isolation.compare import (
    FirstDifference,
    at_positions,
    at_row,
    difference,
    first_difference,
    traced,
)
from gpt_guard.hooks.tensors import walk
from gpt_guard.records import Finding

# A vocabulary or a data set, which takes a second to go through, and no cache of a few forwards.
_MOST_ITEMS = 10_000

# Do two eval passes of one batch agree? If not: dropout that is always on, noise, or something kept between calls.


class TwoPasses:
    """`answer` is the first pass; `unsteady` says why passes cannot be compared with each other, or is empty."""

    def __init__(self, runner: ProbeRunner) -> None:
        self.answer = ProbeAnswer({}, [], [])
        self.unsteady = ""
        self._runner = runner

    def findings(self) -> Iterator[Finding]:
        """GG505 for dropout, GG667 for what grows. Noise that a model draws on purpose is silent: a VAE samples."""
        runner, model = self._runner, self._runner.watch.model
        before = kept_sizes(model)
        self.answer = runner.ask(seed=0)
        halfway = kept_sizes(model)
        second = runner.ask(seed=1)
        after = kept_sizes(model)
        apart = runner.apart(self.answer, second)
        dropout = [*self.answer.dropout, *second.dropout]
        if not apart:
            return
        if runner.apart(self.answer, runner.ask(seed=0)):
            self.unsteady = "the model answers otherwise at every call: it keeps something from the call before"
            grown = [name for name in after if before.get(name, 0) < halfway.get(name, 0) < after[name]]
            if grown:
                name = grown[0]
                # A cache that only eval mode fills is cleared by who generates with it.
                meant = name not in runner.batch.grown
                sizes = [before.get(name, 0), halfway[name], after[name]]
                yield growing(runner.watch, grown, sizes, apart, meant=meant)
            return
        if not dropout:
            self.unsteady = "the model draws random numbers in eval mode, too"
        for each in dropout:
            if (found := dropout_in_eval(runner.watch, each, apart=apart)) is not None:
                yield found


def kept_sizes(model: nn.Module) -> dict[str, int]:
    """Elements of what each module keeps beside its parameters, by `path:attribute`; single numbers are statistics."""
    found: dict[str, int] = {}
    for path, module in model.named_modules():
        for name, value in [*vars(module).items(), *module.named_buffers(recurse=False)]:
            if name in ("_parameters", "_buffers", "_modules") or isinstance(value, nn.Module):
                continue
            # Objects of the user's own, such as a cache, hold their tensors as attributes.
            inside = vars(value) if _is_object(value) else value
            if isinstance(inside, (list, tuple, dict)) and len(inside) > _MOST_ITEMS:
                continue
            if tensors := [tensor for _, tensor in walk(inside) if tensor.dim() > 1]:
                found[f"{path}:{name}"] = sum(tensor.numel() for tensor in tensors)
    return found


def _is_object(value: object) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, (Tensor, type)) and not callable(value)


# Does a model that is trained to predict the next token see it? Asked by changing the last token alone.


def future_findings(runner: ProbeRunner, shift: ShiftedTargets, first: ProbeAnswer) -> Iterator[Finding]:
    """GG660 where logits that have a target change with a token that comes later.

    Only positions whose target counts in the loss are compared: the prefix of a prefix language model may see all of
    itself. So may padding on the left, the last of which predicts the first token. In a row the last token that is
    predicted is changed, padding never.
    """
    # [B, T], wherever the model has them.
    valid = shift.valid if shift.time == 1 else shift.valid.t()
    columns = valid.any(0).nonzero().flatten()
    if not columns.numel():
        return
    source = int(columns[-1]) + 1
    where = torch.zeros_like(valid)
    where[:, source] = valid[:, source - 1]
    changed = runner.batch.other(shift.position, where if shift.time == 1 else where.t(), seed=0)
    if changed is None:
        return
    second = runner.ask({shift.position: changed})
    padding = runner.batch.begun_by_padding(shift.position, shift.time)
    leak = None
    for one, other in zip(_logits(runner, first, shift), _logits(runner, second, shift), strict=False):
        leak = leak or _leak(runner, one, other, valid & ~padding, source)
    if leak is None:
        return
    yield future_leak(runner.watch, runner.batch, shift, leak, _future_blame(runner, shift, changed, padding, source))


def _logits(runner: ProbeRunner, answer: ProbeAnswer, shift: ShiftedTargets) -> list[Tensor]:
    """The one output that is logits `[B, T, V]`; else what losses inside of forward compared.

    Of several outputs (a model that reads both ways has two) none is known to be the one that must not see ahead.
    """
    ids = runner.batch.tokens[shift.position]
    rows, length = ids.shape
    highest = int(ids.max())
    for tensors in (list(answer.outputs.values()), answer.scores):
        placed = [each for tensor in tensors if (each := by_place(tensor, rows, length)) is not None]
        placed = [each for each in placed if each.dim() == 3 and each.size(-1) > highest]
        if len(placed) == 1:
            return [placed[0] if shift.time == 1 else placed[0].transpose(0, 1)]
    return []


def _leak(runner: ProbeRunner, one: Tensor, other: Tensor, valid: Tensor, source: int) -> Leak | None:
    if one.shape != other.shape:
        return None
    apart = difference(one, other).amax(-1)
    length = apart.size(1)
    before = apart[:, : min(source, length)]
    before = before.masked_fill(~valid[:, : before.size(1)], 0.0)
    change = float(before.max())
    if change <= runner.allowed(one):
        return None
    place = int(before.argmax())
    readers = (before.amax(0) > runner.allowed(one)).nonzero().flatten().tolist()
    own = float(apart[:, source:].max()) if source < length else 0.0
    return Leak(
        change,
        float(one.abs().max()),
        place // before.size(1),
        place % before.size(1),
        source,
        readers,
        change / own if own else 1.0,
    )


def _future_blame(
    runner: ProbeRunner, shift: ShiftedTargets, changed: Tensor, padding: Tensor, source: int
) -> FirstDifference | None:
    model = runner.watch.model
    one = traced(model, lambda: runner.ask(regardless=True))
    other = traced(model, lambda: runner.ask({shift.position: changed}, regardless=True))
    rows, length = padding.shape
    begun = int(padding.any(0).sum())
    return first_difference(
        model, one, other, at_positions(rows, length, slice(begun if begun < source else 0, source))
    )


# Do rows of a batch know of each other? Asked by changing some rows and looking at the rest.


def may_be_a_graph(runner: ProbeRunner, rows: int) -> bool:
    """Whether rows may be nodes, which know of each other by design: a square of their number, or a list of edges."""
    ids = {tensor.shape for tensor in runner.batch.tokens.values()}
    for _, tensor in walk(runner.batch.inputs):
        # Ids of two rows, and their targets, look like edges, too.
        other = tensor.dim() == 2 and tensor.shape not in ids
        if other and (tuple(tensor.shape) == (rows, rows) or _edges(tensor)):
            return True
    held = [*runner.watch.model.parameters(), *runner.watch.model.buffers()]
    plain = [value for module in runner.watch.model.modules() for _, value in walk(list(vars(module).values()))]
    return any(tuple(tensor.shape) == (rows, rows) for tensor in (*held, *plain))


def _edges(tensor: Tensor) -> bool:
    return tensor.size(0) == 2 and tensor.size(1) > 2 and not tensor.is_floating_point()


def row_findings(runner: ProbeRunner, first: ProbeAnswer, leaking: Collection[str | None] = ()) -> Iterator[Finding]:
    """GG661 for a model of token ids whose rows leak into each other.

    Which dimension is the batch is known from targets that are shifted along the other, or from an output that has one
    entry for each row. Where nothing tells, time-major data would look like a wrong batch_first: then it is reported
    only if both dimensions mix, since a healthy model keeps one of them apart. Where the future leaks in the same
    module (`leaking`), positions and rows are mixed up, as a view in place of a transpose does.
    """
    ids = next(iter(runner.batch.tokens.values()))
    rows, length = ids.shape
    batch = _batch_dimension(runner, first, rows, length)
    if batch is None and rows == length:
        return
    if runner.batch.viewed and runner.batch.shift is None:
        # Pairs are cut apart like that.
        return
    for dimension in (0, 1) if batch is None else (batch,):
        if ids.size(dimension) < 2 or may_be_a_graph(runner, ids.size(dimension)):
            return
    mixed = _mixed(runner, first, batch or 0)
    if mixed is None or (batch is None and _mixed(runner, first, 1) is None):
        return
    count, time = (rows, length) if not batch else (length, rows)
    blame, joined = _row_blame(runner, mixed, count, time)
    reshaped = blame is not None and blame.path in leaking
    yield mixed_rows(runner.watch, mixed, blame, count, reshaped=reshaped, joined=joined)


def _batch_dimension(runner: ProbeRunner, first: ProbeAnswer, rows: int, length: int) -> int | None:
    shift = runner.batch.shift
    if shift is not None:
        return 1 - shift.time
    if rows == length:
        return None
    pooled = [tensor for tensor in first.tensors if by_place(tensor, rows, length) is None and tensor.dim() in (1, 2)]
    sizes = {tensor.size(0) for tensor in pooled} & {rows, length}
    return None if len(sizes) != 1 else int(sizes == {length})


def _mixed(runner: ProbeRunner, first: ProbeAnswer, batch: int) -> Mixed | None:
    """Every other row is changed, then half of them: what leaks from one part into the other is seen."""
    ids = next(iter(runner.batch.tokens.values()))
    count = ids.size(batch)
    numbers = torch.arange(count, device=ids.device)
    for turn, chosen in enumerate((numbers % 2 == 1, numbers < count // 2)):
        replaced: dict[str, Tensor] = {}
        for position, each in runner.batch.tokens.items():
            if each.size(batch) == count:
                where = (chosen[:, None] if batch == 0 else chosen[None]).expand_as(each)
                if (changed := runner.batch.other(position, where, seed=turn)) is not None:
                    replaced[position] = changed
        if not replaced:
            return None
        worst = _compare(runner, first, runner.ask(replaced), ids.shape, batch, ~chosen)
        if worst is not None:
            change, scale, row = worst
            return Mixed(change, scale, row, replaced)
    return None


def _compare(
    runner: ProbeRunner, first: ProbeAnswer, second: ProbeAnswer, shape: torch.Size, batch: int, kept: Tensor
) -> tuple[float, float, int] | None:
    sure = runner.batch.shift is not None
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
            if change > runner.allowed(one) and (worst is None or change > worst[0]):
                worst = (change, float(one.abs().max()), int(apart.argmax()))
        if compared:
            return worst
    return None


def recurrent_findings(runner: ProbeRunner, first: ProbeAnswer) -> Iterator[Finding]:
    """GG661 for float inputs `[B, T, F]` that a recurrent layer takes for `[T, B, F]`.

    Sure only where the output has one entry for each row of the first dimension and none for the second.
    """
    model = runner.watch.model
    layers = [m for m in model.modules() if isinstance(m, nn.RNNBase) and not m.batch_first]
    position, x = next(iter(walk(runner.batch.inputs)), ("", torch.empty(0)))
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
    second = runner.ask({position: changed})
    for one, other in zip(first.tensors, second.tensors, strict=False):
        if one.shape != other.shape or one.size(0) != rows:
            continue
        apart = difference(one, other).reshape(rows, -1).amax(1).masked_fill(~kept.to(one.device), 0.0)
        if float(apart.max()) > runner.allowed(one):
            mixed = Mixed(float(apart.max()), float(one.abs().max()), int(apart.argmax()), {position: changed})
            blame, _ = _row_blame(runner, mixed, rows, length)
            if blame is not None and blame.module in layers:
                yield mixed_rows(runner.watch, mixed, blame, rows)
            return


def _row_blame(runner: ProbeRunner, mixed: Mixed, count: int, length: int) -> tuple[FirstDifference | None, bool]:
    """Which module mixed the rows, and whether any was given them as one sequence: `[1, B, C]` or `[B, 1, C]`.

    Sentences of a document are rows of that kind.
    """
    model = runner.watch.model
    one = traced(model, lambda: runner.ask(regardless=True))
    other = traced(model, lambda: runner.ask(mixed.replaced, regardless=True))
    blame = first_difference(model, one, other, at_row(count, length, mixed.row))
    given = (tensor for event in one if event.entering for tensor in event.tensors if tensor.dim() == 3)
    return blame, any({1, count} == set(tensor.shape[:2]) for tensor in given)
