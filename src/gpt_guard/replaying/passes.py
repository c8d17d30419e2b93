"""The ways to run a step again, up to the tensor that was bad: forward, loss function, backward, or all from inside.

The backward begins with the gradients that had reached the model's outputs. They carry whatever the loop does to its
loss: division by micro-batches, a GradScaler's scale, code of any kind.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from gpt_guard.hooks.tensors import describe, looks_bad, walk
from gpt_guard.replaying.recipe import LossRecipe, ReplayOutcome, TargetTensor, location
from gpt_guard.replaying.step_runner import StepRunner, module_at
from gpt_guard.replaying.values import described


class BadAgain(BaseException):
    """The tensor was seen to go bad again: the rest of the forward need not run. Never leaves this package."""


@dataclass
class TensorWatch:
    """Looks at one module's inputs or outputs while the step runs again.

    `tensor` is the first bad one; `last` the last finite one at this position, None if the module was not called.
    """

    target: TargetTensor
    tensor: Tensor | None = None
    last: Tensor | None = None

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Look while inside."""

        def called(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._look({**dict(enumerate(args)), **kwargs})

        def returned(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            self._look(output)

        if self.target.kind == "input":
            handle = module.register_forward_pre_hook(called, with_kwargs=True)
        else:
            handle = module.register_forward_hook(returned)
        try:
            yield
        except BadAgain:
            pass
        finally:
            handle.remove()

    def _look(self, value: Any) -> None:
        # What is computed here is no part of the step.
        with _disable_current_modes():
            for position, tensor in walk(value):
                if position != self.target.position:
                    continue
                if looks_bad(tensor) is not None:
                    self.tensor = tensor
                    raise BadAgain
                self.last = tensor


def forward_again(run: StepRunner, target: TargetTensor) -> ReplayOutcome:
    """Run until an output or input of a module goes bad."""
    watch = TensorWatch(target)
    module = module_at(run.model, target.module)
    if module is None:
        return ReplayOutcome(False, f"the model has no module `{target.module}`.")
    with run.traced(run.starts) as trace, watch.watching(module):
        run.call()
    if watch.tensor is not None:
        again = f"{target} is non-finite again"
        return ReplayOutcome(True, again, trace.origin(watch.tensor))
    if watch.last is None:
        return ReplayOutcome(False, f"{target} did not come up when the step was run again.")
    other = trace.first()
    elsewhere = "" if other is None else f" Elsewhere in it, {other.shows}."
    return ReplayOutcome(False, f"{target} is {described(watch.last)} in the replay.{elsewhere}")


def first_again(run: StepRunner) -> ReplayOutcome:
    """Run the whole forward of a step that nobody has found bad, and tell the first operation that is."""
    with run.traced(run.starts) as trace:
        output = run.call()
    operation = trace.first()
    if operation is not None:
        return ReplayOutcome(True, "The forward was run again.", operation)
    shown = _outputs_named(output, tuple(position for position, _ in walk(output)))
    return ReplayOutcome(False, f"Every operation of the forward gave finite values of finite ones; {shown}.")


def outside_again(run: StepRunner) -> ReplayOutcome:
    """The loss was computed by code that is not known: run the model's part, and say between which tensors it fails."""
    with run.traced(run.starts) as trace:
        output = run.call()
    reached = run.recipe.reached or tuple(position for position, _ in walk(output))
    named = _outputs_named(output, reached)
    bad = _first_bad(output, reached) or _first_infinite(output, reached)
    text = "The code between there and backward() made the loss non-finite."
    if bad is not None and bad[1].numel() == 1:
        # A single number is no mask: it is the loss, or a part of it.
        return ReplayOutcome(
            True, f"the loss that the model returned is {described(bad[1])} again", trace.origin(bad[1])
        )
    if bad is not None:
        origin = trace.origin(bad[1])
        made = "an operation that could not be followed" if origin is None else f"{origin.shows}{location(origin)}"
        text = (
            f"That comes from {made}. Unless the code between there and backward() leaves those elements out, they "
            f"made the loss non-finite."
        )
    wrap = "Wrap that code as guardian.watch_loss(function) to have its operation and line named."
    return ReplayOutcome(False, f"The model's part was run again: {named}. {text} {wrap}", decided=False)


def _first_infinite(output: Any, positions: tuple[str, ...]) -> tuple[str, Tensor] | None:
    """An output that holds -inf only, as a mask does, and so is not what a guard stops at; a single number first."""
    found = [each for each in walk(output) if each[0] in positions and describe(each[1]) is not None]
    return next((each for each in found if each[1].numel() == 1), found[0] if found else None)


def loss_again(run: StepRunner, loss: LossRecipe) -> ReplayOutcome:
    """Run the loss function on the very tensors that it was given."""
    with run.traced(loss.context) as trace:
        result = loss.function(*loss.args, **loss.kwargs)
    positions = tuple(position for position, _ in walk(result))
    infinite = _first_infinite(result, positions)
    # -inf in a single number is a loss; in more of them it may be a mask that is returned beside the loss.
    bad = _first_bad(result, positions) or (infinite if infinite is not None and infinite[1].numel() == 1 else None)
    if bad is not None:
        return ReplayOutcome(True, "the loss is non-finite again", trace.origin(bad[1]))
    shown = ", ".join(described(tensor) for _, tensor in walk(result)) or type(result).__name__
    return ReplayOutcome(False, f"the loss function returned {shown} when it was run again on the same tensors.")


def _first_bad(output: Any, positions: tuple[str, ...]) -> tuple[str, Tensor] | None:
    for position, tensor in walk(output):
        if position in positions and looks_bad(tensor) is not None:
            return position, tensor
    return None


def _outputs_named(output: Any, positions: Collection[str]) -> str:
    """What the model returned at these positions."""
    shown = [f"output{position} is {described(tensor)}" for position, tensor in walk(output) if position in positions]
    return ", ".join(shown[:4]) or f"it returned a {type(output).__name__}"


def backward_again(run: StepRunner, target: TargetTensor) -> ReplayOutcome:
    """Run loss function, forward and backward as far as they are known, in the order of backward."""
    recipe, loss = run.recipe, run.recipe.loss
    parameter = run.parameter(target.parameter)
    if parameter is None:
        return ReplayOutcome(False, f"`{target.parameter}` is not a parameter of the model.")
    through = loss is not None and loss.calls_model
    gradients = loss.gradients if loss is not None and through else recipe.gradients
    if loss is not None and not through:
        seen = _through_loss(run, loss)
        if seen is not None:
            return seen
    missing = [] if through else [position for position in recipe.reached if position not in gradients]
    if missing:
        text = f"Not replayed: the gradient that reached output{missing[0]} of the model is no longer held."
        return ReplayOutcome(False, text, decided=False)
    bad = [position for position, gradient in gradients.items() if describe(gradient) is not None]
    if bad:
        what = "the loss function's result" if through else f"output{bad[0]} of the model"
        return _outside(what, gradients[bad[0]])
    if not gradients:
        return ReplayOutcome(False, f"no gradient reached an output of the model; {target} comes from elsewhere.")
    seen = _through_model(run, target, parameter, gradients)
    if not seen.reproduced and (besides := _gradient_besides(run)) is not None:
        return besides
    return seen


def _gradient_besides(run: StepRunner) -> ReplayOutcome | None:
    """An output that others are computed from got a bad gradient, and not from those: from the loop, then."""
    for position, gradient in run.recipe.also.items():
        if describe(gradient) is not None:
            return _outside(f"output{position} of the model", gradient)
    return None


def _outside(what: str, gradient: Tensor) -> ReplayOutcome:
    text = (
        f"The gradient that reached {what} is {described(gradient)}: backward() made it in the code between there and "
        f"the loss, not in the model. Wrap that code as guardian.watch_loss(function) to have its operation and line "
        f"named."
    )
    return ReplayOutcome(False, text, decided=False)


def _through_model(
    run: StepRunner, target: TargetTensor, parameter: nn.Parameter, gradients: Mapping[str, Tensor]
) -> ReplayOutcome:
    try:
        seen = _gradient_again(run, target, parameter, gradients, plain=False)
    except RuntimeError as error:
        if "use_reentrant" not in str(error) or not _may_accumulate(run):
            raise
        seen = None
    # Reentrant checkpointing hides the parameters inside of it, and works with a plain backward() only.
    if seen is None and _may_accumulate(run):
        seen = _gradient_again(run, target, parameter, gradients, plain=True)
    return seen or ReplayOutcome(False, f"{target} does not depend on what the model returned.")


def _may_accumulate(run: StepRunner) -> bool:
    """Whether a plain backward() ends in this model and only adds to `.grad`, which is set aside."""
    parameters = list(run.model.parameters())
    acting = any(getattr(each, "_post_accumulate_grad_hooks", None) for each in parameters)
    own = run.model is run.plain or hasattr(run.model, "_orig_mod")
    return own and not acting and not any(tensor.grad_fn is not None for _, tensor in walk(run.given))


def _gradient_again(
    run: StepRunner, target: TargetTensor, parameter: nn.Parameter, gradients: Mapping[str, Tensor], *, plain: bool
) -> ReplayOutcome | None:
    with run.traced(run.starts) as trace:
        outputs = dict(walk(run.call()))
        pairs = [(outputs[place], gradient) for place, gradient in gradients.items() if place in outputs]
        if len(pairs) < len(gradients) or any(output.shape != gradient.shape for output, gradient in pairs):
            return ReplayOutcome(False, "the forward returned tensors of other shapes when it was run again.")
        roots, given = [output for output, _ in pairs], [gradient for _, gradient in pairs]
        if not plain:
            (parameter.grad,) = torch.autograd.grad(roots, [parameter], given, allow_unused=True)
        else:
            torch.autograd.backward(roots, given)
        if parameter.grad is None:
            return None
        gradient = parameter.grad.detach()
        with _disable_current_modes():
            operation = trace.origin_of_gradient(parameter)
    if describe(gradient) is None:
        return ReplayOutcome(False, f"{target} that backward gives is {described(gradient)} when it is run again.")
    return ReplayOutcome(True, f"{target} is non-finite again", operation)


def _through_loss(run: StepRunner, loss: LossRecipe) -> ReplayOutcome | None:
    """The backward of the loss function alone, on copies of what it was given; None if it only gives good gradients."""
    if not loss.gradients or any(describe(gradient) is not None for gradient in loss.gradients.values()):
        return None
    args, kwargs = tree_map(_leaf, (loss.args, loss.kwargs))
    leaves = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor) and each.requires_grad]
    if not leaves:
        return None
    with run.traced(loss.context) as trace:
        results = dict(walk(loss.function(*args, **kwargs)))
        roots = [results[place] for place in loss.gradients]
        found = torch.autograd.grad(roots, leaves, list(loss.gradients.values()), allow_unused=True)
    bad = next((each for each in found if each is not None and describe(each) is not None), None)
    text = "the gradient that the loss function gives back is non-finite again"
    return None if bad is None else ReplayOutcome(True, text, trace.origin(bad))


def _leaf(value: Any) -> Any:
    return value.detach().requires_grad_() if isinstance(value, Tensor) and value.requires_grad else value


def inside_again(run: StepRunner, target: TargetTensor) -> ReplayOutcome:
    """Run the forward until a `backward()` in it begins with a bad loss, or has left a bad gradient."""
    parameter = run.parameter(target.parameter)
    last: list[Tensor] = []

    def begins(losses: Any) -> None:
        # A loss is bad before its backward; what an earlier one has left is there by now.
        with _disable_current_modes(), torch.no_grad():
            gradient = [] if parameter is None or parameter.grad is None else [parameter.grad]
            for tensor in (*gradient, *(loss for _, loss in walk(losses) if target.kind == "loss")):
                last[:] = [tensor]
                if describe(tensor) is not None:
                    raise BadAgain

    with run.traced(run.starts, begins) as trace:
        try:
            try:
                run.call()
            finally:
                # At the end, and before a step that must not be made again.
                begins(())
        except BadAgain:
            with _disable_current_modes():
                if parameter is not None and parameter.grad is last[0]:
                    operation = trace.origin_of_gradient(parameter)
                else:
                    operation = trace.origin(last[0])
            return ReplayOutcome(True, f"{target} is non-finite again", operation)
    shown = described(last[0]) if last else "not made"
    return ReplayOutcome(False, f"{target} is {shown} when the forward, which calls backward() itself, is run again.")
