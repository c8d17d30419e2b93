"""Whether model and optimizers belong together: which trainable tensors nobody steps, and which are not the model's.

Looks hard in the first steps and rarely later. A suspicion is confirmed by the values one step later: a tensor that
moved meanwhile is stepped by somebody else, and nothing is said about it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_guard.callbacks.updates.findings import listed, unheld_causes
from gpt_guard.callbacks.updates.hidden_tensors import HiddenTensors
from gpt_guard.callbacks.updates.sampling import Unchanged, address
from gpt_guard.catalogue import finding
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Severity

_LOOK_AGAIN = 50
_GONE_STEPS = 3
# A model that uses its parts by chance has fewer gradients now and then.
_MOST_LOOKS_AGAIN = 5
_ONLY_SCALES = "little trains"


class Ownership:
    """Suspicions about who holds what, and what was reported already; all tensors are dropped by `close`."""

    def __init__(self, watch: Watch, inspect_steps: int, reported: set[str]) -> None:
        self._watch = watch
        self._inspect = inspect_steps
        self._reported = reported
        self._hidden = HiddenTensors(watch, inspect_steps, reported)
        self._steps = 0
        self._looked_at: set[int] = set()
        self._most: dict[int, int] = {}
        self._fewer: dict[int, int] = {}
        self._looks_again = 0
        self._again = False
        # The count of steps at which there is something to look at; in between a call costs next to nothing.
        self._next = 0
        self._unheld: dict[str, tuple[Tensor, Unchanged]] = {}
        self._got_grad: set[str] = set()

    # Tensors that the loss depends on and torch does not know as parameters.

    def before_backward(self, loss: Tensor) -> Iterator[Finding]:
        """Look at the first few losses that reach the model; tell what was suspected some steps ago."""
        if not loss.requires_grad:
            yield from self._nothing_to_train(Moment.BEFORE_BACKWARD)
            return
        if not self._hidden.settled:
            yield from self._hidden.before_backward(loss)

    # Parameters and optimizers.

    def after_step(self, optimizer: Optimizer) -> Iterable[Finding]:
        """Compare what the model has with what the optimizers hold, in the first steps and now and then."""
        self._steps += 1
        return [*self._look(optimizer)] if self._steps >= self._next else ()

    def _look(self, optimizer: Optimizer) -> Iterator[Finding]:
        watch = self._watch
        many = len(watch.optimizers)
        if id(optimizer) not in self._looked_at:
            self._looked_at.add(id(optimizer))
            yield from self._fresh(aliases(watch, optimizer))
        if self._unheld:
            yield from self._tell_unheld(watch.step)
        if self._steps <= self._inspect * many or self._steps % _LOOK_AGAIN == 0 or self._again:
            self._again = False
            yield from self._compare()
        if self._steps >= self._inspect * many and len(self._looked_at) == many and not self._unheld:
            self._next = self._steps - self._steps % _LOOK_AGAIN + _LOOK_AGAIN

    def _fresh(self, findings: Iterable[Finding]) -> Iterator[Finding]:
        for found in findings:
            if (key := f"{found.code} alias {found.parameter}") not in self._reported:
                self._reported.add(key)
                yield found

    def count_gradients(self, index: int, count: int) -> None:
        """Look again soon where parameters that had a gradient have none for three steps, as replaced ones have not."""
        if count >= self._most.get(index, 0):
            self._most[index], self._fewer[index] = count, 0
            return
        self._fewer[index] += 1
        if self._fewer[index] == _GONE_STEPS and self._looks_again < _MOST_LOOKS_AGAIN:
            self._looks_again += 1
            self._again, self._next = True, 0

    def _compare(self) -> Iterator[Finding]:
        watch = self._watch
        model = dict(watch.model.named_parameters())
        ids = {id(parameter) for parameter in model.values()}
        held = {id(t): t for each in watch.optimizers for group in each.param_groups for t in group["params"]}
        foreign = {id_: tensor for id_, tensor in held.items() if id_ not in ids}
        self._got_grad |= {str(id_) for id_, tensor in foreign.items() if tensor.grad is not None}
        if not any(tensor.requires_grad for tensor in held.values()):
            yield from self._nothing_to_train(Moment.AFTER_STEP)
            return
        if held and len(foreign) == len(held):
            yield from self._tell_stale(model, foreign)
            return
        if _ONLY_SCALES not in self._reported and (little := list(only_scales(model, watch.step))):
            self._reported.add(_ONLY_SCALES)
            yield from little
        for name, parameter in model.items():
            if id(parameter) in held or not parameter.requires_grad or parameter.grad is None:
                continue
            if f"GG302 {name}" not in self._reported and name not in self._unheld:
                self._unheld[name] = (parameter, Unchanged([parameter], watch.step))
        # Where something has taken the place of these tensors, that is said first.
        if self._steps >= self._inspect and not self._unheld:
            yield from self._tell_foreign(foreign, model)

    def _tell_unheld(self, step: int) -> Iterator[Finding]:
        ripe = {name: pair for name, pair in self._unheld.items() if step > pair[1].step}
        if not ripe:
            return
        names = []
        for name, (parameter, earlier) in ripe.items():
            del self._unheld[name]
            self._reported.add(f"GG302 {name}")
            if earlier.all() and parameter.grad is not None:
                names.append(name)
        if names:
            sizes = {name: ripe[name][0].numel() for name in names}
            yield self._unheld_finding(names, sizes, min(pair[1].step for pair in ripe.values()))

    def _unheld_finding(self, names: list[str], sizes: Mapping[str, int], step: int) -> Finding:
        watch = self._watch
        own = [(name, watch.model.get_parameter(name)) for name in names]
        replaced = [name for name, tensor in own if name in watch.exchanged or watch.name_of(tensor) is None]
        path, kind = watch.owner_of(names[0])
        many = len(names) > 1
        extra = len(watch.extra)
        held = [
            name for index in range(len(watch.optimizers)) for name in watch.held_by(index) if name in watch.parameters
        ]
        return finding(
            "GG302",
            f"{len(names)} trainable parameter{'s' if many else ''} of the model with a gradient "
            f"{'are' if many else 'is'} in no optimizer given to Guardian: {listed(names)} ({sum(sizes.values()):,} "
            f"elements). No step changed {'them' if many else 'it'}."
            + (f" The optimizers hold {extra} tensors that are not the model's." if extra else ""),
            likely=["replaced"] if replaced or extra else unheld_causes(held, names),
            step=step,
            moment=Moment.AFTER_STEP,
            module=path,
            module_class=kind,
            parameter=names[0],
            evidence={"parameters": list(names[:50]), "count": len(names), "replaced": list(replaced[:50])},
        )

    def _tell_stale(self, model: Mapping[str, Tensor], foreign: Mapping[int, Tensor]) -> Iterator[Finding]:
        """All tensors of the optimizers are strangers: those of another model, unless they train by themselves."""
        grads = [name for name, parameter in model.items() if parameter.requires_grad and parameter.grad is not None]
        trained = any(tensor.grad is not None for tensor in foreign.values())
        if self._steps < 2 or not grads or trained or "GG307 stale" in self._reported:
            return
        self._reported.add("GG307 stale")
        yield finding(
            "GG307",
            f"None of the {len(foreign)} tensors that the optimizer steps is a parameter of the model, and none of "
            f"them has a gradient. The model has {len(grads)} parameters with a gradient ({listed(grads, 3)}), which "
            f"nothing steps.",
            severity=Severity.ERROR,
            likely=["rebuilt"],
            step=self._watch.step,
            moment=Moment.AFTER_STEP,
            cause_id="stale",
            evidence={"foreign": len(foreign), "parameters_with_gradient": len(grads)},
        )

    def _tell_foreign(self, foreign: Mapping[int, Tensor], model: Mapping[str, Tensor]) -> Iterator[Finding]:
        watch = self._watch
        names = {id_: watch.name_of(tensor) or "a tensor added later" for id_, tensor in foreign.items()}
        idle = [names[id_] for id_ in foreign if str(id_) not in self._got_grad]
        active = [names[id_] for id_ in foreign if str(id_) in self._got_grad]
        trained = any(parameter.grad is not None for parameter in model.values())
        # What took their place has been named then, and this is the other half of the same trouble.
        told = any(key.startswith("GG302 ") for key in self._reported)
        for kind, found in (("idle", idle if trained else []), ("active", active)):
            if not found or f"GG307 {kind}" in self._reported:
                continue
            self._reported.add(f"GG307 {kind}")
            what = "get no gradient" if kind == "idle" else "do get gradients, as a criterion or a prompt does"
            yield finding(
                "GG307",
                f"The optimizer holds {len(found)} tensors that are not the model's ({listed(found, 3)}). They {what}.",
                severity=Severity.WARNING if kind == "idle" and not told else Severity.INFO,
                likely=["rebuilt" if kind == "idle" else "own_parameters"],
                step=watch.step,
                moment=Moment.AFTER_STEP,
                parameter=found[0],
                cause_id=kind,
                evidence={"tensors": list(found[:50]), "count": len(found)},
            )

    def _nothing_to_train(self, moment: Moment) -> Iterator[Finding]:
        watch = self._watch
        model = list(watch.model.parameters())
        free = [name for name, parameter in watch.parameters.items() if parameter.requires_grad]
        if not watch.optimizers or not watch.tap.calls or not model or "GG310" in self._reported:
            return
        if moment is Moment.BEFORE_BACKWARD and free:
            return
        self._reported.add("GG310")
        yield finding(
            "GG310",
            f"Every tensor that the optimizer holds has requires_grad=False; {len(free)} other parameters of the model "
            f"are trainable: {listed(free)}."
            if free
            else f"All {len(model)} parameters of the model have requires_grad=False: no gradient, no training.",
            likely=["head_not_held"] if free else ["all_frozen"],
            step=watch.step,
            moment=moment,
            evidence={"parameters": len(model), "trainable": list(free[:50])},
        )

    def finish(self) -> Iterator[Finding]:
        """Tell what only waited for one more step."""
        last = self._watch.step
        if self._steps:
            yield from self._hidden.finish()
        if self._unheld:
            yield from self._tell_unheld(last)

    def close(self) -> None:
        """Drop every reference to tensors."""
        self._hidden.close()
        self._unheld.clear()


def aliases(watch: Watch, optimizer: Optimizer) -> Iterator[Finding]:
    """GG320 and GG306; looks at identities and addresses only, once for each optimizer."""
    yield from _twice(watch, optimizer)
    yield from _on_one_storage(watch, optimizer)


def held_twice(optimizer: Optimizer) -> list[Tensor]:
    """The tensors that stand more than once in the parameter groups."""
    held = {id(tensor): tensor for group in optimizer.param_groups for tensor in group["params"]}
    counts = Counter(id(tensor) for group in optimizer.param_groups for tensor in group["params"])
    return [tensor for key, tensor in held.items() if counts[key] > 1]


def tied_names(model: nn.Module) -> dict[int, list[str]]:
    """All names of each parameter that has several, by the parameter's id."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {key: several for key, several in names.items() if len(several) > 1}


def twice_cause(twice: Iterable[Tensor], ties: Container[int]) -> str:
    """Why tensors stand twice in an optimizer: listed under each of their names, or by groups that overlap."""
    return "tied" if any(id(tensor) in ties for tensor in twice) else "groups_overlap"


def _twice(watch: Watch, optimizer: Optimizer) -> Iterator[Finding]:
    tensors = held_twice(optimizer)
    if not tensors:
        return
    twice = [watch.name_of(tensor) or "a tensor added later" for tensor in tensors]
    path, kind = watch.owner_of(twice[0])
    yield finding(
        "GG320",
        f"{len(twice)} parameter{'s stand' if len(twice) > 1 else ' stands'} more than once in the parameter groups of "
        f"{type(optimizer).__name__}: {listed(twice)}.",
        likely=[twice_cause(tensors, tied_names(watch.model))],
        step=watch.step,
        moment=Moment.AFTER_STEP,
        module=path,
        module_class=kind,
        parameter=twice[0],
        evidence={"parameters": list(twice[:50]), "count": len(twice)},
    )


def _on_one_storage(watch: Watch, optimizer: Optimizer) -> Iterator[Finding]:
    held = {id(tensor): tensor for group in optimizer.param_groups for tensor in group["params"]}
    frozen = {
        name: tensor
        for name, tensor in watch.model.named_parameters()
        if not tensor.requires_grad and id(tensor) not in held
    }
    if not frozen:
        return
    trained = {at: tensor for tensor in held.values() if tensor.requires_grad and (at := address(tensor))}
    # The same values, from the first to the last: flat parameters keep different ones in one storage.
    shared = {name: trained[at] for name, tensor in frozen.items() if (at := address(tensor)) in trained}
    if not shared:
        return
    names = list(shared)
    pairs = [f"`{name}` with `{watch.name_of(tensor) or 'a tensor added later'}`" for name, tensor in shared.items()]
    path, kind = watch.owner_of(names[0])
    many = len(names) > 1
    yield finding(
        "GG306",
        f"{len(names)} parameter{'s' if many else ''} with requires_grad=False share{'' if many else 's'} storage with "
        f"what {type(optimizer).__name__} trains, and {'move' if many else 'moves'} along with it: "
        f"{', '.join(pairs[:3])}.",
        likely=["shared"],
        step=watch.step,
        moment=Moment.AFTER_STEP,
        module=path,
        module_class=kind,
        parameter=names[0],
        evidence={"parameters": list(names[:50]), "count": len(names)},
    )


def only_scales(model: Mapping[str, Tensor], step: int) -> Iterator[Finding]:
    """GG310, as a note, where every trainable parameter has fewer than two dimensions and frozen matrices exist.

    Methods that train no more than that (BitFit, (IA)^3, TENT) do it on purpose, so it is only worth knowing. Looks at
    shapes and flags alone.
    """
    free = {name: tensor for name, tensor in model.items() if tensor.requires_grad}
    frozen = [name for name, tensor in model.items() if not tensor.requires_grad and tensor.dim() >= 2]
    if not free or not frozen or any(tensor.dim() >= 2 for tensor in free.values()):
        return
    trained = sum(tensor.numel() for tensor in free.values())
    total = sum(tensor.numel() for tensor in model.values())
    matrices = f"All {len(frozen)} weight matrices of the model are" if len(frozen) > 1 else "Its only weight matrix is"
    yield finding(
        "GG310",
        f"{trained:,} of {total:,} elements are trained, biases and scales alone ({listed(free)}). {matrices} frozen "
        f"({listed(frozen, 3)}).",
        title="No weight matrix is trainable",
        severity=Severity.INFO,
        likely=["frozen_by_name"],
        step=step,
        moment=Moment.AFTER_STEP,
        parameter=frozen[-1],
        cause_id=_ONLY_SCALES,
        evidence={"trained": trained, "elements": total, "frozen": frozen[:50]},
    )
