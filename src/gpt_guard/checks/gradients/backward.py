"""Backward passes on one batch: what each leaves, and which trainable parameters no pass ever gives a gradient.

One pass is not enough to say so. At step 0 a zero-initialised projection (the B of LoRA, the last layer of a residual
branch) makes the gradients before it exactly zero, and a router sends no token to some of its experts. So the model
is trained for a few steps, and then given other inputs and other weights; what is left after that is not an accident.
"""

from __future__ import annotations

import math
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from gpt_guard.callbacks.gradients.calls import ModuleCalls
from gpt_guard.checks.runner.base import LossFunction, Subject
from gpt_guard.checks.runner.forward import loss_of
from gpt_guard.hooks.autograd_graph.nodes import leaves
from gpt_guard.hooks.gradients import Gradients, exact_norm, total_norm
from gpt_guard.hooks.isolation.preserve import preserved

STEPS = 6
"""Each step frees one more zero-initialised factor in a row: B of LoRA, an output projection, the head before it."""
TOKENS = 256
"""Tokens of a trial on other inputs."""
PATIENCE = {"one of several": 24, "alone": 6}
"""Trials in a row that reach nothing new, for parameters of a ModuleList and for others. 64 experts, each token going
to one by its id alone, of 23 ids, were all reached in each of 300 runs."""
_STEP = 1e-3


@dataclass
class Pass:
    """What one backward pass gave: `norms` by parameter, None where there is no gradient; exact about 0 and NaN."""

    loss: float
    has_graph: bool
    norms: dict[str, float | None] = field(default_factory=dict)
    calls: ModuleCalls = field(default_factory=ModuleCalls)
    leaves: list[Tensor] = field(default_factory=list)

    @property
    def norm(self) -> float:
        """L2 norm over all gradients."""
        return total_norm([norm for norm in self.norms.values() if norm is not None])

    @property
    def missing(self) -> list[str]:
        """Parameters without a gradient."""
        return [name for name, norm in self.norms.items() if norm is None]

    @property
    def zero(self) -> list[str]:
        """Parameters whose gradient is exactly zero."""
        return [name for name, norm in self.norms.items() if norm == 0.0]

    @property
    def reached(self) -> set[str]:
        """Parameters whose gradient is not zero."""
        return {name for name, norm in self.norms.items() if norm}

    @property
    def nonfinite(self) -> list[str]:
        """Parameters with NaN or infinity in their gradient."""
        return [name for name, norm in self.norms.items() if norm is not None and not math.isfinite(norm)]


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that can learn, by name: not frozen, not empty; a tied one once, under its first name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel()}


@dataclass
class Task:
    """A batch `(x, y)` and how its loss is computed."""

    x: Tensor
    y: Tensor
    loss_fn: LossFunction | None = None
    ignore_index: int = -100

    @classmethod
    def of(cls, subject: Subject) -> Task | None:
        """The batch of a subject, on its model's device; None where it has none."""
        return None if subject.inputs is None else cls(*subject.inputs, subject.loss_fn, subject.ignore_index)

    def loss(self, model: nn.Module) -> Tensor:
        """The scalar loss of this batch; one that the model left unreduced is averaged."""
        loss = loss_of(model, self.x, self.y, self.loss_fn, self.ignore_index)
        return loss if loss.dim() == 0 else loss.mean()


def run_backward(model: nn.Module, task: Task) -> Pass:
    """Clear the gradients, run forward and backward in the modes as they are, and measure. Reads the device.

    Errors of the model pass through; a loss without a graph is no error, but `has_graph=False`.
    """
    parameters = trainable(model)
    for parameter in model.parameters():
        parameter.grad = None
    holders = [(path, module) for path, module in model.named_modules() if list(module.parameters(recurse=False))]
    with torch.enable_grad(), closing(ModuleCalls().listen(holders)) as calls:
        loss = task.loss(model)
        result = Pass(float(loss.detach()), loss.requires_grad, calls=calls)
        if loss.requires_grad:
            result.leaves = leaves(loss)
            loss.backward()
    result.norms = gradient_norms(dict(parameters))
    return result


def gradient_norms(parameters: dict[str, Tensor]) -> dict[str, float | None]:
    """The norm of each gradient, None where there is none; 0 only if every element is, infinite only if one is."""
    measured = Gradients(parameters).measure(None, immediate=True)
    norms: dict[str, float | None] = dict.fromkeys(parameters)
    for name, norm in zip(measured.names, measured.norms, strict=True):
        grad = parameters[name].grad
        if grad is not None and (norm == 0.0 or not math.isfinite(norm)):
            norm = exact_norm(grad)  # squares of finite values overflow, and those of tiny ones vanish
        norms[name] = norm
    return norms


@dataclass
class Search:
    """The first pass, what is without a gradient after all passes, and what only later passes reached."""

    first: Pass
    missing: list[str]
    zero: list[str]
    late: list[str]
    calls: ModuleCalls
    reached: set[str]

    @property
    def left(self) -> set[str]:
        """What no pass so far gave a gradient other than zero."""
        return {*self.missing, *self.zero}

    def add(self, later: Pass) -> None:
        """Count one more pass; one that is not finite shows nothing."""
        if later.nonfinite or not math.isfinite(later.loss):
            return
        self.calls.merge(later.calls)
        reached = later.reached
        present = later.norms.keys() - later.missing
        self.late += [name for name in (*self.missing, *self.zero) if name in reached]
        self.reached |= reached
        # What had no gradient and now has zeros is in the graph: it is called, and multiplied by zero.
        self.zero = [name for name in self.zero if name not in reached]
        self.zero += [name for name in self.missing if name in present - reached]
        self.missing = [name for name in self.missing if name not in present]


def search(model: nn.Module, task: Task, vocab_size: int | None) -> Search:
    """Look for gradients; the model's tensors, modes and the random state are as before afterwards.

    A model in eval mode is put in training mode as a whole, as a loop would do; otherwise each module keeps its mode.
    Reads the device. Errors of the model in the first pass go through.
    """
    with preserved(model):
        if not model.training:
            model.train()
        first = run_backward(model, task)
        found = Search(first, first.missing, first.zero, [], first.calls, first.reached)
        if first.has_graph and not first.nonfinite:
            _search_on(model, task, vocab_size, found)
    return found


def _search_on(model: nn.Module, task: Task, vocab_size: int | None, found: Search) -> None:
    """More passes, as long as there is something left to find."""
    task = _fewer_rows(task)
    for _ in range(STEPS):
        if not found.zero:  # no step puts into the graph what is not in it
            break
        _descend(model)
        found.add(run_backward(model, task))
    left, vain = found.left, 0
    while left and vain < PATIENCE["one of several" if _one_of_several(left) else "alone"]:
        _shake(model, found.reached)
        later = _try_other(model, _more_rows(task), vocab_size) or _try_other(model, task, vocab_size)
        if later is not None:
            found.add(later)
        vain = 0 if found.left < left else vain + 1
        left = found.left


def _one_of_several(names: set[str]) -> bool:
    return any(part.isdecimal() for name in names for part in name.split("."))


def _try_other(model: nn.Module, task: Task, vocab_size: int | None) -> Pass | None:
    """A pass on random ids; None for a model that refuses them, or so many rows: it has had its chance."""
    with suppress(Exception):
        return run_backward(model, replace(task, x=_other(task.x, vocab_size)))
    return None


def _more_rows(task: Task) -> Task:
    """The batch several times over, up to about 256 tokens, so that few of many experts are left out by chance."""
    times = max(1, TOKENS // max(1, task.x.numel()))
    if times == 1 or task.y.shape[:1] != task.x.shape[:1]:
        return task
    return replace(task, x=torch.cat([task.x] * times), y=torch.cat([task.y] * times))


def _fewer_rows(task: Task) -> Task:
    """The rows with the most targets that count, as many as give about 256 tokens: a large model has to wait less."""
    rows = max(1, TOKENS // max(1, task.x[0].numel()))
    if task.x.size(0) <= rows or task.y.shape[:1] != task.x.shape[:1]:
        return task
    counted = (task.y != task.ignore_index).flatten(1).sum(1)
    chosen = counted.argsort(descending=True, stable=True)[:rows]
    return replace(task, x=task.x[chosen], y=task.y[chosen])


@torch.no_grad()
def _descend(model: nn.Module) -> None:
    """Move each element by the sign of its gradient, which is Adam's first step; works for any layout and dtype."""
    for parameter in trainable(model).values():
        if parameter.grad is not None:
            parameter.sub_(_STEP * parameter.grad.to_dense().sign())


@torch.no_grad()
def _shake(model: nn.Module, reached: set[str]) -> None:
    """Other weights of the same size for what has a gradient: elements in another order, constant ones with noise.

    The rest stays as it is: noise would bring to life what is zero for good.
    """
    for name, parameter in trainable(model).items():
        if name in reached and parameter.is_floating_point():
            flat = parameter.detach().flatten()
            mixed = flat[torch.randperm(flat.numel(), device=flat.device)].view_as(parameter)
            still = bool((flat == flat[0]).all())
            parameter.copy_(mixed + 0.02 * torch.randn_like(mixed) if still else mixed)


def _other(x: Tensor, vocab_size: int | None) -> Tensor:
    if x.is_floating_point():
        return torch.randn_like(x)
    size = vocab_size or int(x.max()) + 1
    return torch.randint(size, x.shape, device=x.device).to(x.dtype)
