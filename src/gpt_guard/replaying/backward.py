"""The backward again, from the gradients that had reached the model's outputs to the one that was bad.

They carry whatever the loop does to its loss: division by micro-batches, a GradScaler's scale, code of any kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from gpt_guard.hooks.tensors import describe, walk
from gpt_guard.records import OperationSeen
from gpt_guard.replaying.bench import Bench, Seen
from gpt_guard.replaying.recipe import LossRecipe
from gpt_guard.replaying.target import Target
from gpt_guard.replaying.text import figures
from gpt_guard.replaying.trace import Trace


def backward_again(bench: Bench, target: Target) -> Seen:
    """Run loss function, forward and backward as far as they are known, in the order of backward."""
    recipe, loss = bench.recipe, bench.recipe.loss
    parameter = dict(bench.model.named_parameters(remove_duplicate=False)).get(target.parameter)
    if parameter is None:
        return Seen(False, f"`{target.parameter}` is not a parameter of the model.")
    through = loss is not None and loss.calls_model
    gradients = loss.gradients if loss is not None and through else recipe.gradients
    if loss is not None and not through:
        seen = _through_loss(bench, loss)
        if seen is not None:
            return seen
    missing = [] if through else [position for position in recipe.reached if position not in gradients]
    if missing:
        said = f"Not replayed: the gradient that reached output{missing[0]} of the model is no longer held."
        return Seen(False, said, place=True)
    bad = [position for position, gradient in gradients.items() if describe(gradient) is not None]
    if bad:
        what = "the loss function's result" if through else f"output{bad[0]} of the model"
        return _outside(what, gradients[bad[0]])
    if not gradients:
        return Seen(False, f"no gradient reached an output of the model; {target} comes from elsewhere.")
    seen = _through_model(bench, target, parameter, gradients)
    if not seen.reproduced and (besides := _besides(bench)) is not None:
        return besides
    return seen


def _besides(bench: Bench) -> Seen | None:
    """An output that others are computed from got a bad gradient, and not from those: from the loop, then."""
    for position, gradient in bench.recipe.also.items():
        if describe(gradient) is not None:
            return _outside(f"output{position} of the model", gradient)
    return None


def _outside(what: str, gradient: Tensor) -> Seen:
    said = (
        f"The gradient that reached {what} is {figures(gradient)}: backward() made it in the code between there and "
        f"the loss, not in the model. Wrap that code as guardian.watch_loss(function) to have its operation and line "
        f"named."
    )
    return Seen(False, said, place=True)


def _through_model(bench: Bench, target: Target, parameter: nn.Parameter, gradients: Mapping[str, Tensor]) -> Seen:
    try:
        seen = _gradient_again(bench, target, parameter, gradients, plain=False)
    except RuntimeError as error:
        if "use_reentrant" not in str(error) or not _may_accumulate(bench):
            raise
        seen = None
    # Reentrant checkpointing hides the parameters inside of it, and works with a plain backward() only.
    if seen is None and _may_accumulate(bench):
        seen = _gradient_again(bench, target, parameter, gradients, plain=True)
    return seen or Seen(False, f"{target} does not depend on what the model returned.")


def _may_accumulate(bench: Bench) -> bool:
    """Whether a plain backward() ends in this model and only adds to `.grad`, which is set aside."""
    parameters = list(bench.model.parameters())
    acting = any(getattr(each, "_post_accumulate_grad_hooks", None) for each in parameters)
    own = bench.model is bench.plain or hasattr(bench.model, "_orig_mod")
    return own and not acting and not any(tensor.grad_fn is not None for _, tensor in walk(bench.given))


def _gradient_again(
    bench: Bench, target: Target, parameter: nn.Parameter, gradients: Mapping[str, Tensor], *, plain: bool
) -> Seen | None:
    with bench.traced(bench.starts) as trace:
        outputs = dict(walk(bench.call()))
        pairs = [(outputs[place], gradient) for place, gradient in gradients.items() if place in outputs]
        if len(pairs) < len(gradients) or any(output.shape != gradient.shape for output, gradient in pairs):
            return Seen(False, "the forward returned tensors of other shapes when it was run again.")
        roots, given = [output for output, _ in pairs], [gradient for _, gradient in pairs]
        if not plain:
            (parameter.grad,) = torch.autograd.grad(roots, [parameter], given, allow_unused=True)
        else:
            torch.autograd.backward(roots, given)
        if parameter.grad is None:
            return None
        gradient = parameter.grad.detach()
        operation = _origin(trace, parameter)
    if describe(gradient) is None:
        return Seen(False, f"{target} that backward gives is {figures(gradient)} when it is run again.")
    return Seen(True, f"{target} is non-finite again", operation)


def _origin(trace: Trace, parameter: nn.Parameter) -> OperationSeen | None:
    with _disable_current_modes():
        return trace.origin_of_gradient(parameter)


def _through_loss(bench: Bench, loss: LossRecipe) -> Seen | None:
    """The backward of the loss function alone, on copies of what it was given; None if it only gives good gradients."""
    if not loss.gradients or any(describe(gradient) is not None for gradient in loss.gradients.values()):
        return None
    args, kwargs = tree_map(_leaf, (loss.args, loss.kwargs))
    leaves = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor) and each.requires_grad]
    if not leaves:
        return None
    with bench.traced(loss.ambient) as trace:
        results = dict(walk(loss.function(*args, **kwargs)))
        roots = [results[place] for place in loss.gradients]
        found = torch.autograd.grad(roots, leaves, list(loss.gradients.values()), allow_unused=True)
    bad = next((each for each in found if each is not None and describe(each) is not None), None)
    said = "the gradient that the loss function gives back is non-finite again"
    return None if bad is None else Seen(True, said, trace.origin(bad))


def _leaf(value: Any) -> Any:
    return value.detach().requires_grad_() if isinstance(value, Tensor) and value.requires_grad else value
