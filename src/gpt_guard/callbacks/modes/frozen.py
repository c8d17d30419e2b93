"""Parts that are kept frozen: put into training mode by a call on the whole, or frozen by a train() nobody calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.modes.no_grad_forwards import described_call
from gpt_guard.callbacks.modes.sensitive import Sensitive, described
from gpt_guard.callbacks.updates.findings import listed
from gpt_guard.catalogue import finding
from gpt_guard.hooks.copies import HookSet, Uncopied
from gpt_guard.hooks.modes import own_train, sets_modes
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Observation


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
        self._hooks = HookSet()

    def enter(self, watch: Watch, modules: Sequence[Sensitive]) -> None:
        """Note the modes on entry; modules that may be a teacher's get a hook until the first step is judged."""
        kept = [each for each in modules if watch.model.training and not each.module.training]
        for each in (each for each in kept if _is_frozen(watch.model, each.path)):
            if each.buffers:
                self._entered.add(each.path)
            elif each.path in watch.tap.names:
                calls = self._teachers[each.path] = _Calls(each.module)
                self._hooks.before_forward(each.module, calls)

    def detach(self) -> None:
        """Take the hooks away; may run twice."""
        self._hooks.close()
        self._teachers.clear()

    def judge(
        self, watch: Watch, step: int, modules: Sequence[Sensitive], modes: Sequence[bool], *, first: bool
    ) -> Iterator[Finding]:
        """Report each module once, in the first step after its mode has changed. `first`: none has trained before."""
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
    statistics alone were kept has had trainable parameters all along, and is reported.
    """
    who = watch.modes.who(training=True, of=modules[0].path)
    frozen = [each for each in modules if _is_frozen(watch.model, each.path)]
    moved = frozen or [each for each in modules if each.buffers and each.path not in was_frozen]
    if who is None or not moved or _on_the_part(who[0], [each.path for each in modules]):
        return None
    if who[0] and _is_frozen(watch.model, who[0]):
        # A call on what is frozen as a whole reaches nothing else.
        return None
    statistics = sum(each.buffers for each in moved)
    one = len(moved) == 1
    what = "1 mode-sensitive module was" if one else f"{len(moved)} mode-sensitive modules were"
    seen = (
        f"{what} in eval mode {began} and {'is' if one else 'are'} in training mode in this step ({described(moved)}). "
        f"{described_call('train', who)}"
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
        module=moved[0].path,
        module_class=type(moved[0].module).__name__,
        where=who[1],
        evidence={"modules": [each.path for each in moved[:50]], "count": len(moved), "statistics": statistics},
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


class FreezeInTrain(Guard):
    """Asks modules with a `train(mode)` of their own, in the first inspected step, what that would freeze.

    It is called with the mode that the module is in anyway; flags, modes and whatever else it sets are put back.
    Parameters that train now and would not after that call are reported. A model whose `train()` has been called has
    nothing to change and is silent. A method of this name that is something else, such as one that trains, is never
    called. Runs once after the first step of each inspected stretch; reads nothing from the device.
    """

    inspects: ClassVar[bool] = True

    def __init__(self) -> None:
        self._reported = False
        self._clear()

    def _clear(self) -> None:
        self._asked = False
        self._found: Finding | None = None
        self._failed: str | None = None

    def attach(self, watch: Watch) -> None:
        super().attach(watch)
        self._clear()
        watch.inspection.on_begin(self._ask_again)

    def _ask_again(self) -> None:
        self._asked = False

    def before_step(self, optimizer: Optimizer) -> None:
        if self._asked or self._reported or not self.watch.inspection.active:
            return
        self._asked = True
        own = [(path, each) for path, each in self.watch.model.named_modules() if own_train(each) is not None]
        other = {id(each) for _, each in own if not sets_modes(own_train(each))}
        # A call on a module reaches what is inside of it.
        own = [(path, each) for path, each in own if not any(id(inner) in other for inner in each.modules())]
        if own:
            with self.watch.inspection.probing("train() called again"), self.watch.modes.ignoring():
                self._ask(own)

    def _ask(self, own: list[tuple[str, nn.Module]]) -> None:
        trained = {name for name, each in self.watch.parameters.items() if each.requires_grad and each.grad is not None}
        for path, module in own:
            try:
                module.train(module.training)
            except Exception as error:
                self._failed = f"what train() of {type(module).__name__} freezes: it raised {type(error).__name__}"
                continue
            frozen = [name for name in sorted(trained) if not self.watch.parameters[name].requires_grad]
            if frozen:
                self._found = self._finding(path, module, frozen)
                return

    def _finding(self, path: str, module: nn.Module, frozen: list[str]) -> Finding:
        kind = type(module).__name__
        return finding(
            "GG511",
            f"`{path or 'the model'}` ({kind}) has a train() of its own that freezes {len(frozen)} parameters "
            f"({listed(frozen)}); they have gradients in this step, so it has not been called.",
            likely=["not_called"],
            step=self.watch.step,
            moment=Moment.BEFORE_STEP,
            module=path,
            module_class=kind,
            parameter=frozen[0],
            evidence={"parameters": frozen[:50], "count": len(frozen)},
        )

    def judge(self, seen: Observation) -> Iterable[Finding]:
        found, self._found = self._found, None
        if found is not None:
            self._reported = True
            yield found

    def blind_spots(self) -> Iterable[str]:
        return () if self._failed is None else (self._failed,)

    def state_dict(self) -> dict[str, Any]:
        return {"said": self._reported}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._reported = bool(state["said"])
