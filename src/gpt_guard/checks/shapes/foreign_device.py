"""Would forward run on an accelerator? Asked without one: every tensor of the model claims to be on one.

torch follows shapes, dtypes and devices through the whole forward without computing anything, and refuses what a GPU
would refuse, at the same line. It is execution, not a search for calls without `device=`: a CPU scalar that torch
lets pass on a GPU passes here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call

from gpt_guard.checks.runner.forward import user_line
from gpt_guard.hooks.isolation.eval_no_grad import quiet
from gpt_guard.records import SourceLine

_ELSEWHERE = torch.device("lazy:0")
"""A device type that every build of torch knows without hardware. The others (cuda, xpu, mps) have no device guard in
a build that lacks them, and an indexing by None or a list already asks for it (torch 2.13)."""
_CALLED = "an accelerator"
_SIGNS = ("same device", "two devices", "different devices", "device mismatch")


class Elsewhere(NamedTuple):
    """What happened: it ran, it would fail for the device (message and line), or it could not be asked."""

    ran: bool
    mismatch: str = ""
    where: SourceLine | None = None
    why_not: str = ""
    plain: tuple[str, ...] = ()


def run_elsewhere(model: nn.Module, x: Tensor) -> Elsewhere:
    """Run forward on ids `[B, T]` as if everything that `model.to(device)` and `x.to(device)` move were elsewhere.

    Computes nothing and changes nothing. A forward that reads a value (`.item()`, data-dependent shapes) cannot be
    followed, and is said not to have been asked.
    """
    try:
        _forward(model, x)
    except Exception as error:  # anything that a fake device cannot do is no fault of the model
        message = " ".join(str(error).split())
        if any(sign in message.lower() for sign in _SIGNS) and "cpu" in message:
            message = message.replace(str(_ELSEWHERE), _CALLED)
            return Elsewhere(False, message[:300], user_line(error.__traceback__), plain=plain_tensors(model))
        return Elsewhere(False, why_not=f"{type(error).__name__}: {message[:160]}")
    return Elsewhere(True)


def _forward(model: nn.Module, x: Tensor) -> Any:
    # Tensors that are plain attributes stay real, and on the CPU, as model.to(device) would leave them.
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:

        def claim(tensor: Tensor) -> Tensor:
            with torch.utils._python_dispatch._disable_current_modes():
                empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
                return FakeTensor(mode, empty, _ELSEWHERE)

        moved: dict[int, Tensor] = {}
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        claimed = {name: moved.setdefault(id(tensor), claim(tensor)) for name, tensor in named}
        with quiet(model):
            return functional_call(model, claimed, (claim(x),), tie_weights=False)


def plain_tensors(model: nn.Module) -> tuple[str, ...]:
    """Attributes that hold a floating-point, Boolean or integer tensor which is neither parameter nor buffer."""
    return tuple(
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    )
