"""What EvalModeAssert says of a part that began in eval mode and was put into training mode by a call on the whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import nn

from gpt_guard.callbacks.modes.eval_words import call
from gpt_guard.callbacks.modes.mode_sensitive import Sensitive, described
from gpt_guard.catalogue import finding
from gpt_guard.hooks.copies import Uncopiable, Uncopied
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment


class BeganInEval:
    """The modules that were in eval mode in the first training step, while the model itself was not.

    `.train()` at the top of the loop comes before that step: of frozen normalisation the mode on entry counts as well,
    and of frozen dropout that runs without gradients alone, as a teacher does. Dropout of a frozen body that was loaded
    in eval mode, and through which gradients flow, is to train in training mode.
    """

    def __init__(self) -> None:
        # Whether their parameters were frozen then.
        self._frozen: dict[str, bool] | None = None
        self._entered: set[str] = set()
        self._teachers: dict[str, _Calls] = {}
        self._handles: list[Uncopiable] = []

    def enter(self, watch: Watch, modules: Sequence[Sensitive]) -> None:
        """Note the modes on entry; modules that may be a teacher's get a hook until the first step is judged."""
        kept = [each for each in modules if watch.model.training and not each.module.training]
        for each in (each for each in kept if _is_frozen(watch.model, each.path)):
            if each.buffers:
                self._entered.add(each.path)
            elif each.path in watch.tap.names:
                calls = self._teachers[each.path] = _Calls(each.module)
                self._handles.append(Uncopiable(each.module.register_forward_pre_hook(calls)))

    def detach(self) -> None:
        """Take the hooks away; may run twice."""
        while self._handles:
            self._handles.pop().remove()
        self._teachers.clear()

    def judge(
        self, watch: Watch, step: int, modules: Sequence[Sensitive], modes: Sequence[bool], *, first: bool
    ) -> Iterator[Finding]:
        """Told once for each module: in the first step after its mode has changed. `first`: none has trained before."""
        pairs = list(zip(modules, modes, strict=True))
        known = self._frozen
        if known is None:
            off = [each.path for each, training in pairs if first and not training]
            self._frozen = {path: _is_frozen(watch.model, path) for path in off}
            entered = self._entered | {path for path, calls in self._teachers.items() if calls.quiet}
            self.detach()
            on = [each for each, training in pairs if first and training and each.path in entered]
            if on and (found := _unfrozen(watch, step, on, entered, "on entry")) is not None:
                yield found
        elif known and (on := [each for each, training in pairs if training and each.path in known]):
            was_frozen = {each.path for each in on if known.pop(each.path)}
            if (found := _unfrozen(watch, step, on, was_frozen)) is not None:
                yield found


class _Calls(Uncopied):
    """Notes how one module is called: `quiet` where that was always without gradients."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._modes: set[bool] = set()

    def __call__(self, module: nn.Module, args: Any) -> None:
        if module is self._module and not torch.compiler.is_compiling():
            self._modes.add(torch.is_grad_enabled())

    @property
    def quiet(self) -> bool:
        return self._modes == {False}


def _unfrozen(
    watch: Watch, step: int, modules: list[Sensitive], was_frozen: set[str], began: str = "in the first training step"
) -> Finding | None:
    """GG506, or None where it seems to be meant: `.train()` was called on the part itself, or unfroze it as a whole.

    A call on the whole model means the part too only if its parameters train from then on; one of normalisation whose
    statistics alone were kept has had trainable parameters all along, and is told.
    """
    who = watch.modes.who(training=True, of=modules[0].path)
    frozen = [each for each in modules if _is_frozen(watch.model, each.path)]
    told = frozen or [each for each in modules if each.buffers and each.path not in was_frozen]
    if who is None or not told or _on_the_part(who[0], [each.path for each in modules]):
        return None
    if who[0] and _is_frozen(watch.model, who[0]):
        # A call on what is frozen as a whole reaches nothing else.
        return None
    statistics = sum(each.buffers for each in told)
    one = len(told) == 1
    what = "1 mode-sensitive module was" if one else f"{len(told)} mode-sensitive modules were"
    seen = (
        f"{what} in eval mode {began} and {'is' if one else 'are'} in training mode in this step ({described(told)}). "
        f"{call('train', who)}"
    )
    if frozen:
        seen += f" {'Its' if one else 'Their'} parameters are frozen."
    if statistics:
        seen += f" {'Its running statistics' if one else f'The running statistics of {statistics} of them'} now move"
        seen += " with each batch."
    return finding(
        "GG506",
        seen,
        likely=["blanket_train"],
        step=step,
        moment=Moment.AFTER_BACKWARD,
        module=told[0].path,
        module_class=type(told[0].module).__name__,
        where=who[1],
        evidence={"modules": [each.path for each in told[:50]], "count": len(told), "statistics": statistics},
    )


def _is_frozen(model: nn.Module, path: str) -> bool:
    """Whether the module, or the innermost one around it that has parameters, has none that is trainable."""
    while True:
        parameters = list(model.get_submodule(path).parameters())
        if parameters or not path:
            return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)
        path = path.rpartition(".")[0]


def _on_the_part(called: str, part: list[str]) -> bool:
    """Whether a call on the module `called` was one on the part, or inside of it, and not on what is around it."""
    split = [path.split(".") for path in part]
    common = ".".join(parts[0] for parts in takewhile(lambda names: len(set(names)) == 1, zip(*split, strict=False)))
    return called != "" and (called == common or called.startswith(f"{common}."))
