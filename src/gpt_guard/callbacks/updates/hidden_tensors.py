"""Trainable tensors that the loss depends on and that neither the model nor an optimizer knows."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_guard.callbacks.updates.sampling import Unchanged
from gpt_guard.catalogue import finding
from gpt_guard.hooks.autograd_graph.nodes import is_network_beside, leaves
from gpt_guard.hooks.tensors import walk
from gpt_guard.hooks.unregistered import Hidden, find_hidden, shapes_of
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Severity

_MOST_WALKS = 12
# Forward passes in a row that make new parameters of the same shapes.
_FRESH = 3
# Somebody's own update of them, as a centre loss makes it by hand, comes within so many steps; a short run has fewer.
_PATIENCE, _SHORT = 10, 3
# In the place of a name, where no attribute holds them.
_OUTSIDE, _MADE_ANEW = "outside", "fresh"


def unknown_to_model(reported: Iterable[str]) -> list[str]:
    """The attributes that hold trainable tensors unknown to the model, of what was reported."""
    names = (each.removeprefix("GG303 ") for each in reported if each.startswith("GG303 "))
    return sorted(name for name in names if name not in (_OUTSIDE, _MADE_ANEW))


class HiddenTensors:
    """Walks the graph of the first few losses that reach the model, and tells of a suspicion once it is proved.

    Proved is: the values have not changed since, and no optimizer of this process holds the tensors. What an attribute
    of the model holds is told one step later; what another object or nobody holds, after ten steps, since it may be
    trained now and then by somebody else, as the other model of a GAN is.
    """

    def __init__(self, watch: Watch, inspect_steps: int, reported: set[str]) -> None:
        self._watch = watch
        self._inspect = inspect_steps
        self._reported = reported
        self._walks = 0
        self._own_walks = 0
        self._hidden: dict[str, tuple[Hidden, Unchanged]] = {}
        self._outside: dict[int, nn.Parameter] = {}
        self._earlier: Unchanged | None = None
        self._twice: set[int] = set()
        # Whether those outside are a network that meets the model in the loss alone.
        self._beside = False
        self._fresh: list[tuple[int, ...]] = []
        self._fresh_walks = 0

    @property
    def settled(self) -> bool:
        """Whether enough losses have been looked at, and nothing is suspected: no later loss needs a look."""
        if self._watch.sharded:
            return True
        most = _MOST_WALKS * self._inspect
        waits = self._earlier is not None and self._walks < 2 * most
        looks = (self._own_walks < self._inspect or self._growing) and self._walks < most
        return not (self._hidden or waits or looks)

    @property
    def _growing(self) -> bool:
        """Whether the last walk met parameters that may be made anew each time."""
        return 0 < self._fresh_walks < _FRESH and self._own_walks < self._inspect + _FRESH

    def before_backward(self, loss: Tensor) -> Iterator[Finding]:
        """Look at a loss, and tell what was suspected some steps ago."""
        if self._watch.sharded:
            # Its leaves are what was gathered for a while, and are not there any more when they would be compared.
            return
        if self._hidden:
            yield from self._tell_hidden(self._watch.step, _PATIENCE)
        due = self._earlier is not None and self._watch.step >= self._earlier.step + _PATIENCE
        # Losses of other models pass here too, and a walk each for all of them would cost.
        left = _MOST_WALKS * self._inspect * (2 if due else 1) - self._walks
        if left > 0 and (due or self._growing or self._own_walks < self._inspect):
            self._walks += 1
            yield from self._walk(loss, due=due)

    def _walk(self, loss: Tensor, *, due: bool) -> Iterator[Finding]:
        found = leaves(loss)
        model = {id(parameter) for parameter in self._watch.model.parameters()}
        if not any(id(leaf) in model for leaf in found):
            return
        self._own_walks += 1
        foreign = [leaf for leaf in found if id(leaf) not in model and self._watch.name_of(leaf) is None]
        named: set[int] = set()
        for hidden in find_hidden(self._watch.model, foreign, deep=True) if foreign else ():
            named |= {id(tensor) for tensor in hidden.tensors}
            if f"GG303 {hidden.name}" not in self._reported:
                self._hidden.setdefault(hidden.name, (hidden, Unchanged(hidden.tensors, self._watch.step)))
        rest = [leaf for leaf in foreign if isinstance(leaf, nn.Parameter) and id(leaf) not in named]
        self._twice |= {id(leaf) for leaf in rest if id(leaf) in self._outside}
        self._beside = bool(rest) and is_network_beside(loss, rest, self._watch.model.parameters())
        yield from self._count_fresh([leaf for leaf in rest if id(leaf) not in self._outside])
        if due:
            self._outside = {id(leaf): leaf for leaf in rest if id(leaf) in self._outside}
            yield from self._tell_outside()
        elif f"GG303 {_OUTSIDE}" not in self._reported:
            self._outside |= {id(leaf): leaf for leaf in rest}
            if rest and self._earlier is None:
                self._earlier = Unchanged(rest, self._watch.step)

    # Held by an attribute.

    def _tell_hidden(self, step: int, patience: int) -> Iterator[Finding]:
        for name, (hidden, earlier) in list(self._hidden.items()):
            if step < earlier.step + (patience if hidden.indirect else 1):
                continue
            del self._hidden[name]
            if _referrers(hidden.tensors).stepped or not earlier.all():
                continue
            self._reported.add(f"GG303 {name}")
            yield self._hidden_finding(name, hidden, earlier.step)

    def _hidden_finding(self, name: str, hidden: Hidden, step: int) -> Finding:
        count, many = len(hidden.tensors), len(hidden.tensors) > 1
        size = sum(tensor.numel() for tensor in hidden.tensors)
        computed = "computed" in hidden.kind
        plain = not computed and ("tensor" in hidden.kind or "Parameter" in hidden.kind)
        place = f"{'behind' if computed else 'in'} attribute `{name}` ({hidden.kind}) of {hidden.module_class}"
        return finding(
            "GG303",
            f"The loss depends on {count} trainable leaf tensor{'s' if many else ''} ({hidden.shapes}; {size:,} "
            f"elements) that {'are' if many else 'is'} neither in model.parameters() nor in an optimizer. "
            f"{'They are' if many else 'It is'} {place}, and step {step} did not change {'them' if many else 'it'}.",
            step=step,
            moment=Moment.BEFORE_BACKWARD,
            module=hidden.module,
            module_class=hidden.module_class,
            parameter=name,
            likely=["computed"] if computed else ["plain_tensor"] if plain else [],
            evidence={"attribute": name, "tensors": count, "elements": size, "shapes": hidden.shapes},
        )

    # Held by nobody that the model knows.

    def _count_fresh(self, new: Sequence[nn.Parameter]) -> Iterator[Finding]:
        """Parameters that the graph alone keeps alive, others in each forward pass."""
        if new:
            given = {id(leaf) for _, tensor in walk(self._watch.tap.inputs) for leaf in leaves(tensor)}
            new = [leaf for leaf in new if id(leaf) not in given and leaf.grad is None]
        shapes = [tuple(leaf.shape) for leaf in new]
        self._fresh_walks = self._fresh_walks + 1 if new and shapes == self._fresh else int(bool(new))
        self._fresh = shapes
        if self._fresh_walks < _FRESH or f"GG303 {_MADE_ANEW}" in self._reported:
            return
        held = _referrers(new)
        if held.stepped or held.names:
            return
        self._reported.add(f"GG303 {_MADE_ANEW}")
        yield self._outside_finding(
            new,
            f"Each of the last {_FRESH} forward passes used {len(new)} new nn.Parameter object"
            f"{'s' if len(new) > 1 else ''} ({shapes_of(new)}) that no module and no optimizer holds by now: made "
            "anew in forward() or in the loss each time, and never trained.",
            "fresh",
        )

    def _tell_outside(self) -> Iterator[Finding]:
        """Persistent parameters of something beside the model."""
        outside, earlier = list(self._outside.values()), self._earlier
        self._outside, self._earlier = {}, None
        if not outside or earlier is None or f"GG303 {_OUTSIDE}" in self._reported:
            return
        held = _referrers(outside)
        if held.stepped:
            # By far the most usual: the other model of a GAN.
            outside = [leaf for leaf in outside if id(leaf) not in held.stepped]
            held = _referrers(outside) if outside else held
        outside = [leaf for leaf in outside if earlier.one(leaf)]
        if not outside:
            return
        self._reported.add(f"GG303 {_OUTSIDE}")
        names = f": {', '.join(held.names[:3])}" if held.names else ""
        size = sum(leaf.numel() for leaf in outside)
        aside = ""
        if held.resting:
            aside = " The modules that hold them are in eval mode, as those are that should not train."
        elif self._beside:
            aside = " They are a network that meets the model in the loss alone, as a target network or a teacher does."
        yield self._outside_finding(
            outside,
            f"The loss depends on {len(outside)} nn.Parameter object{'s' if len(outside) > 1 else ''} "
            f"({shapes_of(outside)}; {size:,} elements{names}) that no optimizer of this process and no attribute of "
            f"the model holds. No step since {earlier.step} changed {'them' if len(outside) > 1 else 'it'}.{aside}",
            "beside" if self._beside and not held.resting else "outside",
            severity=Severity.INFO if aside else Severity.WARNING,
        )

    def _outside_finding(
        self, tensors: Sequence[Tensor], seen: str, kind: str, severity: Severity = Severity.WARNING
    ) -> Finding:
        return finding(
            "GG303",
            seen,
            severity=severity,
            step=self._watch.step,
            moment=Moment.BEFORE_BACKWARD,
            cause_id=kind,
            likely=[kind],
            evidence={
                "tensors": len(tensors),
                "elements": sum(tensor.numel() for tensor in tensors),
                "shapes": shapes_of(tensors),
            },
        )

    def finish(self) -> Iterator[Finding]:
        """Tell what only waited for more steps: three are few, but all there are."""
        step = self._watch.step
        yield from self._tell_hidden(step, _SHORT)
        if self._earlier is not None and step >= self._earlier.step + _SHORT:
            self._outside = {key: leaf for key, leaf in self._outside.items() if key in self._twice}
            yield from self._tell_outside()

    def close(self) -> None:
        """Drop every reference to tensors."""
        self._hidden.clear()
        self._outside.clear()
        self._earlier = None


@dataclass
class _Referrers:
    """`stepped`: ids of the tensors that an optimizer holds; `names`: who has the others, e.g. `weight` of a Linear."""

    stepped: set[int] = field(default_factory=set)
    names: list[str] = field(default_factory=list)
    modes: list[bool] = field(default_factory=list)

    @property
    def resting(self) -> bool:
        """Whether modules hold them and all of those are in eval mode, as a teacher or a perceptual network is."""
        return bool(self.modes) and not any(self.modes)


def _referrers(tensors: Iterable[Tensor]) -> _Referrers:
    """The optimizers and modules of this process that hold any of these tensors directly; reads no values.

    One pass over all live objects, some tens of milliseconds: only under suspicion, and once for each.
    """
    wanted = {id(tensor) for tensor in tensors}
    found = _Referrers()
    everything = gc.get_objects()
    # By its type: isinstance may run code of the object, as a lazy proxy's, and takes far longer.
    kinds = {kind for kind in set(map(type, everything)) if issubclass(kind, (Optimizer, nn.Module))}
    for each in everything:
        kind = type(each)
        if kind not in kinds:
            continue
        if issubclass(kind, Optimizer):
            groups = vars(each).get("param_groups", ())
            found.stepped |= {id(tensor) for group in groups for tensor in group["params"]} & wanted
        else:
            for name, parameter in vars(each).get("_parameters", {}).items():
                if id(parameter) in wanted:
                    found.names.append(f"`{name}` of a {kind.__name__}")
                    found.modes.append(bool(vars(each).get("training", True)))
    return found
