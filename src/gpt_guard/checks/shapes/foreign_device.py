"""Would forward run on an accelerator? Asked without one: every tensor of the model claims to be on one.

torch follows shapes, dtypes and devices through the whole forward without computing anything, and refuses what a GPU
would refuse, at the same line. It is execution, not a search for calls without `device=`: a CPU scalar that torch
lets pass on a GPU passes here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call

from gpt_guard.catalogue import finding
from gpt_guard.checks.runner.forward import user_line
from gpt_guard.hooks.isolation.preserve import quiet
from gpt_guard.hooks.unregistered import plain_attributes
from gpt_guard.records import Finding

_ELSEWHERE = torch.device("lazy:0")
"""A device type that every build of torch knows without hardware. The others (cuda, xpu, mps) have no device guard in
a build that lacks them, and an indexing by None or a list already asks for it (torch 2.13)."""
_SIGNS = ("same device", "two devices", "different devices", "device mismatch")


class CannotFollow(Exception):
    """A forward that needs values: `.item()`, shapes that depend on data."""


def stays_behind(model: nn.Module, x: Tensor) -> Finding | None:
    """GG645 where forward on ids `[B, T]` would stop, were all that `model.to(device)` and `x.to(device)` move moved.

    Computes nothing and changes nothing. Raises CannotFollow where that cannot be asked.
    """
    try:
        _forward(model, x)
    except Exception as error:  # anything that a fake device cannot do is no fault of the model
        message = " ".join(str(error).split())
        if "cpu" not in message or not any(sign in message.lower() for sign in _SIGNS):
            raise CannotFollow(f"{type(error).__name__}: {message[:160]}") from error
        message = message.replace(str(_ELSEWHERE), "an accelerator")[:300]
        seen = f"With the model on another device forward would stop: {message}"
        where = user_line(error.__traceback__)
    else:
        return None
    line = where.text if where is not None else ""
    plain = next((name for name in _plain_tensors(model) if f"self.{name.rpartition('.')[2]}" in line), "")
    if plain:
        seen += f" `{plain}` is a plain attribute, which model.to(device) leaves behind."
    likely = "attribute" if plain else "hard_coded" if "cpu" in line else "factory"
    return finding("GG645", seen, likely=[likely], where=where)


def _forward(model: nn.Module, x: Tensor) -> None:
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
            functional_call(model, claimed, (claim(x),), tie_weights=False)


def _plain_tensors(model: nn.Module) -> list[str]:
    """Attributes that hold a tensor which is neither parameter nor buffer."""
    return [name for name, value, *_ in plain_attributes(model) if isinstance(value, Tensor)]
