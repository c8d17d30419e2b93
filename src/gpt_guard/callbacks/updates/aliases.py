"""One tensor in two places: twice in an optimizer, or as a frozen parameter on the storage of a trained one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator

from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_guard.callbacks.updates.param_plan import listed
from gpt_guard.callbacks.updates.param_sample import local
from gpt_guard.catalogue import finding
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment


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
    trained = {_address(tensor): tensor for tensor in held.values() if tensor.requires_grad and _address(tensor)}
    # The same values, from the first to the last: flat parameters keep different ones in one storage.
    shared = {name: trained[at] for name, tensor in frozen.items() if (at := _address(tensor)) in trained}
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


def _address(tensor: Tensor) -> tuple[int, int] | None:
    values = local(tensor)
    return None if values is None else (values.data_ptr(), values.numel())
