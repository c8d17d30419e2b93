"""One training in many set-ups: a small language model, a trial of it, and what a trial has shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard import Guardian
from gpt_guard.errors import GuardError
from gpt_guard.records import Finding

VOCABULARY, WIDTH, LENGTH, BATCH = 32, 16, 12, 4
STEPS, BREAKS_AT = 6, 3

COLUMNS = ("silent when healthy", "NaN: halts before the update", "silent bug found", "true norm", "detached",
           "bit-identical")  # fmt: skip


@dataclass
class Trial:
    """One run of a set-up: whether it is watched, and what is wrong with it.

    A set-up calls `watch` for its Guardian, or gives a framework its `callback`; `begin_step` at the beginning of each
    step, `norm` with the gradients as they were before clipping, and `end` with the model.
    """

    watched: bool = True
    breaks: bool = False
    leaks: bool = False
    guardian: Guardian | None = None
    halted: Finding | None = None
    step: int = -1
    norms: list[float] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    before: list[Tensor] = field(default_factory=list)
    model: nn.Module = field(default_factory=nn.Module)
    optimizers: tuple[Any, ...] = ()
    _callback: Any = None

    @property
    def broken_now(self) -> bool:
        return self.breaks and self.step == BREAKS_AT

    @contextmanager
    def watch(self, model: nn.Module, optimizers: Any, **options: Any) -> Iterator[None]:
        self.optimizers = optimizers if isinstance(optimizers, tuple) else (optimizers,)
        if not self.watched:
            yield
            return
        self.guardian = Guardian(model, optimizers, sinks=[], **options)
        with self.guardian:
            yield

    def callback(self, make: Callable[..., Any]) -> list[Any]:
        """A framework's callback for this trial, if it is watched."""
        if not self.watched:
            return []
        self._callback = make(sinks=[])
        return [self._callback]

    def begin_step(self, model: nn.Module, step: int | None = None) -> None:
        self.step = self.step + 1 if step is None else step
        self.model = model
        if self.broken_now:
            self.before = _weights(model)

    def norm(self, grads: Iterable[Tensor | None], scale: float = 1.0) -> None:
        """Note the norm over all of these, as torch computes it."""
        self.norms.append(float(nn.utils.get_total_norm([grad.float() for grad in grads if grad is not None])) / scale)

    def norm_of(self, model: nn.Module, scale: float = 1.0) -> None:
        self.norm((parameter.grad for parameter in model.parameters()), scale)

    def run(self, train: Callable[[Trial], nn.Module]) -> Trial:
        torch.manual_seed(0)
        try:
            self.weights = _weights(train(self))
        except GuardError as halt:
            self.halted = halt.finding
        if self._callback is not None:
            self.guardian = self._callback.guardian
        return self


def _weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


class Breakable(nn.Module):
    """A layer that gives NaN in the one step that is to fail."""

    def __init__(self, trial: Trial, inner: nn.Module) -> None:
        super().__init__()
        self.trial, self.inner = trial, inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out / 0.0 * 0.0 if self.trial.broken_now else out


class Leak(nn.Module):
    """Adds to each position the one behind it, which it is to predict: a silent bug."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.roll(-1, dims=1)


class Layer(nn.Module):
    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), Breakable(trial, nn.Linear(2 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return out


Call = Callable[[nn.Module, Tensor], Tensor]


def directly(layer: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = layer(x)
    return out


class Model(nn.Module):
    """Reads each token for itself, so that it is causal unless it leaks; `call` is how its layers are called."""

    def __init__(self, trial: Trial, call: Call = directly) -> None:
        super().__init__()
        self.call = call
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Layer(trial), Layer(trial)])
        self.leak = Leak() if trial.leaks else nn.Identity()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.leak(self.embedding(ids))
        for layer in self.layers:
            x = self.call(layer, x)
        logits: Tensor = self.head(x)
        return logits


def texts(step: int, rows: int = BATCH) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


@dataclass(frozen=True, eq=False)
class Setup:
    """A set-up: what trains it, which layer is broken first, and what Guardian cannot see of it.

    `how` is what watches it. `why` gives, by column, the reason of what is not a plain yes. `missing` is a package
    without which it cannot be tried.
    """

    name: str
    train: Callable[[Trial], nn.Module]
    how: str = "`Guardian(model, optimizer)`"
    place: str = "layers.0.down"
    why: Mapping[str, str] = field(default_factory=dict)
    missing: str | None = None


def true(norm: float | None, expected: float) -> bool:
    """The two agree to what float32 sums in another order differ by."""
    return norm is not None and math.isclose(norm, expected, rel_tol=2e-3)
