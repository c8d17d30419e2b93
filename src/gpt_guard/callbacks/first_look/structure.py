"""Modules whose settings a careful reader of print(model) would query, with the reason for each; reads no tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import nn

from gpt_guard.callbacks.first_look.oddity import OddModule
from gpt_guard.records import Severity

Odd = tuple[str, str, Severity]
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Video models drop 0.8 before their head (TSN, L. Wang et al. 2016); 0.9 and 0.95 are what others keep.
_MOST_DROPPED = 0.9
# 1e-3 is the largest default (Keras); on normalised inputs of variance 1 a tenth takes 5 % of the scale away.
_NORM_EPS, _NORM_EPS_NOTED = 0.1, 0.01
_NORM_MOMENTUM = 0.9
_HEADS = ("n_head", "n_heads", "num_heads", "num_attention_heads", "heads", "nhead")
_ANY_HEADS = frozenset(_HEADS)
_WIDTHS = ("n_embd", "embed_dim", "hidden_size", "d_model", "dim", "n_embed", "emb_dim")
_HEAD_WIDTHS = ("head_dim", "head_size", "d_head", "dim_head", "head_width")
_OUTPUTS = frozenset({"lm_head", "head", "output", "decoder", "unembed", "to_logits", "output_projection"})
# A vocabulary that is a few ids short or padded: other differences are other vocabularies.
_NEARLY = 0.02


def odd_modules(model: nn.Module) -> Iterator[OddModule]:
    """Every module with an odd setting, in the order of registration; then what two of them say together."""
    for path, module in model.named_modules():
        for look in _LOOKS:
            for key, what, severity in look(module):
                yield OddModule(key, what, severity, path, type(module).__name__)
    yield from _vocabularies(model)
    yield from _mixed_layouts(model)


def _dropped(module: nn.Module) -> Iterator[Odd]:
    p = getattr(module, "p", None) if isinstance(module, _DROPOUTS) else None
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
        p = module.dropout
    if not isinstance(p, (int, float)) or p <= 0.5:
        return
    if p is True:
        yield (
            "dropout",
            "p is True, which is 1: everything is dropped (inplace=True was meant, perhaps)",
            Severity.WARNING,
        )
    elif p == 1:
        yield "dropout", "p is 1: everything is dropped in training", Severity.WARNING
    else:
        severity = Severity.WARNING if p >= _MOST_DROPPED else Severity.INFO
        yield "dropout", f"p is {p:g}, the share that is dropped; {1 - p:.2g} is kept", severity


def _norm_eps(module: nn.Module) -> Iterator[Odd]:
    if "norm" not in type(module).__name__.lower():
        return
    eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))
    if not isinstance(eps, (int, float)) or 0 < eps < _NORM_EPS_NOTED:
        return
    if eps <= 0:
        yield "norm_eps", f"eps is {eps:g}: inputs that are all equal have no variance to divide by", Severity.INFO
    else:
        severity = Severity.WARNING if eps >= _NORM_EPS else Severity.INFO
        yield "norm_eps", f"eps is {eps:g}, added to the variance: small inputs are not normalised", severity


def _norm_momentum(module: nn.Module) -> Iterator[Odd]:
    momentum = module.momentum if isinstance(module, _BATCH_NORMS) and module.track_running_stats else None
    if momentum is None or 0 <= momentum < _NORM_MOMENTUM:
        return
    what = f"momentum is {momentum:g}, the weight of the newest batch"
    if 0 <= momentum <= 1:
        yield "norm_momentum", what, Severity.INFO
    else:
        yield "norm_momentum", f"{what}: outside of 0 to 1 the running statistics diverge", Severity.WARNING


def _slope(module: nn.Module) -> Iterator[Odd]:
    if not isinstance(module, nn.LeakyReLU):
        return
    slope = module.negative_slope
    if slope is True or slope == 1:
        meant = " (inplace=True was meant, perhaps)" if slope is True else ""
        yield "slope", f"negative_slope is {slope}: it returns what it gets{meant}", Severity.WARNING
    elif slope > 1 or slope < 0:
        yield "slope", f"negative_slope is {slope:g}, outside of 0 to 1", Severity.INFO


def _whole(module: nn.Module, names: Sequence[str]) -> int | None:
    values = (vars(module).get(name) for name in names)
    return next((value for value in values if type(value) is int and value > 0), None)


def _heads(module: nn.Module) -> Iterator[Odd]:
    # Every module of the model passes here, and hardly one has heads.
    if _ANY_HEADS.isdisjoint(vars(module)):
        return
    heads, width = _whole(module, _HEADS), _whole(module, _WIDTHS)
    # A width of each head that is written down makes the heads as wide as it likes.
    if heads is None or width is None or heads < 2 or _whole(module, _HEAD_WIDTHS) is not None:
        return
    if width % heads:
        yield "heads", f"{heads} heads do not divide a width of {width}", Severity.WARNING
    elif width >= 64 and width // heads < 4:
        yield "heads", f"{heads} heads of a width of {width} have {width // heads} elements each", Severity.WARNING


def _repeated(module: nn.Module) -> Iterator[Odd]:
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return
    entries = [each for each in module if next(each.parameters(), None) is not None]
    different = {id(each) for each in entries}
    if len(different) == len(entries):
        return
    what = f"{len(entries)} entries with weights are {len(different)} module{'s' if len(different) > 1 else ''}"
    # A head that each of several outputs shares is meant; a layer of a stack, which normalises or attends, hardly.
    block = len(different) == 1 and any(
        "norm" in name or "attention" in name for name in _class_names(next(iter(entries)))
    )
    yield "repeated", f"{what}, held several times", Severity.WARNING if block else Severity.INFO


def _class_names(module: nn.Module) -> list[str]:
    return [type(each).__name__.lower() for each in module.modules()]


def _stack_dtypes(module: nn.Module) -> Iterator[Odd]:
    if not isinstance(module, nn.ModuleList) or len(module) < 3 or len({type(each) for each in module}) > 1:
        return
    dtypes = [frozenset(p.dtype for p in each.parameters() if p.dtype.is_floating_point) for each in module]
    (usual, count), *others = Counter(dtypes).most_common()
    if others and count > len(dtypes) / 2 and usual:
        at = next(place for place, each in enumerate(dtypes) if each != usual)
        named = ", ".join(sorted(str(each).removeprefix("torch.") for each in dtypes[at]))
        plain = ", ".join(sorted(str(each).removeprefix("torch.") for each in usual))
        yield (
            "dtypes",
            f"entry {at} is in {named or 'no float at all'}, where {count} others are in {plain}",
            Severity.INFO,
        )


def _linear_twice(module: nn.Module) -> Iterator[Odd]:
    if not isinstance(module, nn.Sequential):
        return
    layers = [each for each in module if not isinstance(each, (*_DROPOUTS, nn.Identity))]
    for one, other in pairwise(layers):
        if type(one) is nn.Linear and type(other) is nn.Linear:
            wide = one.out_features
            # A narrow middle is a low rank, which is meant.
            if wide == other.in_features and wide >= max(one.in_features, other.out_features):
                what = f"two Linear layers follow each other ({one.in_features} to {wide} to {other.out_features})"
                yield "linear_twice", f"{what} with nothing between: together they are one", Severity.INFO
                return


def _softmax_dim(module: nn.Module) -> Iterator[Odd]:
    if isinstance(module, (nn.Softmax, nn.LogSoftmax)) and module.dim in (0, None):
        yield "softmax_dim", f"dim is {module.dim}; the first dimension is mostly that of the batch", Severity.INFO


def _stride(module: nn.Module) -> Iterator[Odd]:
    if isinstance(module, _CONVOLUTIONS):
        pairs = zip(module.kernel_size, module.stride, strict=False)
        if any(1 < kernel < stride for kernel, stride in pairs):
            what = f"stride {module.stride} is above the kernel's {module.kernel_size}: inputs between are never read"
            yield "stride", what, Severity.INFO


_LOOKS: tuple[Callable[[nn.Module], Iterator[Odd]], ...] = (
    _dropped,
    _norm_eps,
    _norm_momentum,
    _slope,
    _heads,
    _repeated,
    _stack_dtypes,
    _linear_twice,
    _softmax_dim,
    _stride,
)


def _vocabularies(model: nn.Module) -> Iterator[OddModule]:
    """An output layer with nearly as many rows as the one table of ids."""
    tables = [
        (path, each)
        for path, each in model.named_modules()
        if isinstance(each, nn.Embedding) and not any(word in path.lower() for word in ("pos", "type", "seg"))
    ]
    if len(tables) != 1:
        return
    path, table = tables[0]
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear) or name.rpartition(".")[2] not in _OUTPUTS:
            continue
        rows, ids = layer.out_features, table.num_embeddings
        if layer.in_features == table.embedding_dim and 0 < abs(rows - ids) <= _NEARLY * ids:
            what = f"it gives {rows} scores, and `{path}` has {ids} rows"
            yield OddModule("vocabulary", what, Severity.INFO, name, type(layer).__name__)


def _mixed_layouts(model: nn.Module) -> Iterator[OddModule]:
    """Modules of torch of which some take the batch first and others second."""
    asked = (nn.RNNBase, nn.MultiheadAttention)
    found = [(path, each) for path, each in model.named_modules() if isinstance(each, asked)]
    by_first = {bool(each.batch_first): (path, each) for path, each in reversed(found)}
    if len(by_first) == 2:
        path, module = by_first[False]
        what = f"batch_first is False, and True in `{by_first[True][0]}`"
        yield OddModule("layout", what, Severity.INFO, path, type(module).__name__)


def is_plain_loss(node: torch.autograd.graph.Node | None, *, most: int = 4) -> str | None:
    """The name of torch's loss that a number is, times or divided by something; None where it is anything else."""
    for _ in range(most):
        if node is None:
            return None
        name = node.name()
        if name.startswith(_LOSS_NODES):
            return name.partition("Backward")[0]
        if not name.startswith(("DivBackward", "MulBackward")):
            return None
        node = next((each for each, _ in node.next_functions if each is not None), None)
    return None


# All of them are above zero, whatever they are given.
_LOSS_NODES = ("MseLoss", "SmoothL1Loss", "HuberLoss", "NllLoss", "BinaryCrossEntropy")
