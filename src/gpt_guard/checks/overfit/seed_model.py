"""The model that has to learn one batch by heart: a small fresh one of the same class where that can be built."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpt_guard.checkpoint.fingerprint import unwrap
from gpt_guard.checks.gradients.backward import trainable
from gpt_guard.checks.runner.base import BATCH, MODEL, Subject
from gpt_guard.checks.runner.forward import call, in_form_of
from gpt_guard.checks.runner.gather import BLOCK_NAMES, setting, sizes
from gpt_guard.hooks.isolation.preserve import preserved

BLOCK, WIDTH, HEADS, LAYERS, ROWS = 32, 64, 4, 2, 8
"""The seed configuration: 300 steps of it take two or three seconds on a core, and random targets are learned by heart
in half of them, for vocabularies from 65 to 8000 (measured)."""
WIDTH_NAMES = ("embedding_dim", "n_embd", "embed_dim", "d_model", "hidden_size", "hidden_dim", "dim", "width")
HEAD_NAMES = ("num_heads", "n_head", "n_heads", "num_attention_heads", "nhead", "heads")
KEY_HEAD_NAMES = ("num_key_value_heads", "n_kv_heads", "n_kv_head", "num_kv_heads")
LAYER_NAMES = ("num_layers", "n_layer", "n_layers", "num_hidden_layers", "depth", "layers")
INNER_NAMES = ("intermediate_size", "n_inner", "d_ff", "dim_feedforward", "ffn_dim", "ff_dim", "mlp_dim")
DROPOUT_NAMES = (
    "dropout",
    "dropout_rate",
    "dropout_p",
    "p_drop",
    "drop_rate",
    "attn_dropout",
    "resid_dropout",
    "embd_dropout",
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
    "attention_dropout",
    "hidden_dropout",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
)


@dataclass
class Learner:
    """A way to get a model with a given dropout, in words, and whether it is the user's own with all its weights.

    `own` models are trained in place: keep their state around it. `share` is the trainable share of the elements.
    """

    make: Callable[[float], nn.Module]
    words: str
    block: int
    own: bool = False
    share: float = 1.0
    has_dropout: bool = True


def learner(subject: Subject) -> Learner:
    """The small model of the same class, the user's `make_model`, or the model as it is, in this order of preference.

    A `make_model` that the user gave goes first: it says what to build.
    """
    inputs, make = BATCH(subject), subject.make_model
    block = min(subject.block_size or inputs[0].size(-1), inputs[0].size(-1))
    if make is None:
        return own_learner(MODEL(subject), block)
    if "make_model" not in subject.sources or subject.model is None:
        return Learner(lambda p: _drop(make(), p), "a fresh model from make_model", block)
    if _freezes(make):
        # Adapters on fresh frozen weights have nothing to adapt: only the user's own model has weights worth it.
        return own_learner(subject.model, block)
    if (small := _small(unwrap(subject.model), subject.config, inputs)) is not None:
        return small
    words = f"a fresh {type(subject.model).__name__} of the same configuration"
    return Learner(lambda p: _drop(make(), p), words, block)


def own_learner(model: nn.Module, block: int) -> Learner:
    """The model as it is, with its weights and what is frozen in it."""
    inner = unwrap(model)
    total = sum(parameter.numel() for parameter in inner.parameters())
    share = sum(parameter.numel() for parameter in trainable(inner).values()) / max(1, total)
    words = f"this {type(inner).__name__} as it is"
    words += f", {1 - share:.0%} of it frozen" if share < 1 else ""
    return Learner(lambda p: _drop(inner, p), words, block, True, share, _has_dropout(inner))


def _freezes(make: Callable[[], nn.Module]) -> bool:
    """True where a fresh model comes with frozen parameters."""
    with preserved(), contextlib.suppress(Exception):  # one that cannot be built is spoken of where it is needed
        return not all(parameter.requires_grad for parameter in make().parameters())
    return False


def cut(x: Tensor, y: Tensor, block: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """At most 8 rows and `block` columns of a batch: those columns in which the most targets count."""
    x, y = x[:ROWS], y[:ROWS]
    if x.dim() != 2 or x.shape != y.shape or x.size(1) <= block:
        return x, y
    counts = (y != ignore_index).sum(0).cumsum(0)
    before = torch.cat([counts.new_zeros(1), counts])
    start = int((before[block:] - before[:-block]).argmax())
    return x[:, start : start + block].contiguous(), y[:, start : start + block].contiguous()


def _small(model: nn.Module, config: Any, inputs: tuple[Tensor, Tensor]) -> Learner | None:
    """A model of the class in the seed configuration, if the config has its fields and the result runs."""
    wanted = seed_settings(config)
    if wanted is None:
        return None
    block = next((int(wanted[name]) for name in BLOCK_NAMES if name in wanted), None)
    block = min(block or BLOCK, inputs[0].size(-1))

    def make(dropout: float) -> nn.Module:
        names = {name: dropout for name in DROPOUT_NAMES if setting(config, name) is not None}
        fresh = type(model)(changed(config, {**wanted, **names}))
        if dropout == 0.0 or not names:
            _drop(fresh, dropout)  # rates that are written into the class, too
        return in_form_of(fresh, model)

    # Settings that depend on each other in ways unknown here make the class refuse: then the full size is used.
    with preserved(), contextlib.suppress(Exception), torch.no_grad():
        fresh = make(0.0)
        call(fresh, inputs[0][:1, :block], inputs[1][:1, :block])
        figures = {"block": block, "width": _first(wanted, WIDTH_NAMES), "layers": _first(wanted, LAYER_NAMES)}
        shown = ", ".join(f"{name} {value}" for name, value in figures.items() if value is not None)
        has_dropout = any(setting(config, name) is not None for name in DROPOUT_NAMES) or _has_dropout(fresh)
        return Learner(make, f"a fresh {type(model).__name__} ({shown})", block, has_dropout=has_dropout)
    return None


def seed_settings(config: Any) -> dict[str, int] | None:
    """What to change in a config for the seed configuration, never upwards; None without a width and a depth."""
    widths, layers = sizes(config, WIDTH_NAMES), sizes(config, LAYER_NAMES)
    if not widths or not layers:
        return None
    wanted = {name: min(value, LAYERS) for name, value in layers.items()}
    wanted |= {name: min(value, BLOCK) for name, value in sizes(config, BLOCK_NAMES).items()}
    width = max(widths.values())
    if width > WIDTH:
        wanted |= dict.fromkeys(widths, WIDTH)
        heads = sizes(config, HEAD_NAMES)
        wanted |= {name: min(value, HEADS) if WIDTH % min(value, HEADS) == 0 else 1 for name, value in heads.items()}
        count = min((wanted[name] for name in heads), default=1)
        wanted |= dict.fromkeys(sizes(config, KEY_HEAD_NAMES), count)
        wanted |= {name: max(1, value * WIDTH // width) for name, value in sizes(config, INNER_NAMES).items()}
        wanted |= dict.fromkeys(sizes(config, ("head_dim", "head_size")), WIDTH // count)
    return wanted


def changed(config: Any, values: Mapping[str, Any]) -> Any:
    """A copy of a config with other values; dicts, dataclasses (frozen ones, too), pydantic models, plain objects."""
    if isinstance(config, Mapping):
        return {**config, **values}
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return dataclasses.replace(config, **values)
    if hasattr(config, "model_copy"):
        return config.model_copy(update=dict(values))
    other = copy.deepcopy(config)
    for name, value in values.items():
        setattr(other, name, value)
    return other


def _first(values: Mapping[str, int], names: tuple[str, ...]) -> int | None:
    return next((values[name] for name in names if name in values), None)


def _has_dropout(model: nn.Module) -> bool:
    return any(True for _ in _dropout_places(model))


def _drop(model: nn.Module, p: float) -> nn.Module:
    """Set every rate there is: of Dropout modules, and attributes of that name (attention, LSTM, hand-written code)."""
    for module, attribute in _dropout_places(model):
        setattr(module, attribute, p)
    return model


def _dropout_places(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            yield module, "p"
        for name in DROPOUT_NAMES:
            if isinstance(vars(module).get(name), float):
                yield module, name
