"""Do two eval passes of one batch agree? If not: dropout that is always on, noise, or something kept between calls."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from gpt_guard.callbacks.modes.dropout import dropout_in_eval
from gpt_guard.callbacks.probes.probe_ask import Answer, Asker
from gpt_guard.catalogue import finding
from gpt_guard.hooks.tensors import walk
from gpt_guard.records import Finding, Moment, Severity


class Repeated:
    """`answer` is the first pass; `unsteady` says why passes cannot be compared with each other, or is empty."""

    def __init__(self, asker: Asker) -> None:
        self.answer = Answer({}, [], [])
        self.unsteady = ""
        self._asker = asker

    def findings(self) -> Iterator[Finding]:
        """GG505 for dropout, GG667 for what grows. Noise that a model draws on purpose is silent: a VAE samples."""
        asker, model = self._asker, self._asker.watch.model
        before = kept_sizes(model)
        self.answer = asker.ask(seed=0)
        between = kept_sizes(model)
        second = asker.ask(seed=1)
        after = kept_sizes(model)
        apart = asker.largest(self.answer, second)
        dropout = [*self.answer.dropout, *second.dropout]
        if not apart:
            return
        if not asker.same(self.answer, asker.ask(seed=0)):
            self.unsteady = "the model answers otherwise at every call: it keeps something from the call before"
            yield from _grown(asker, before, between, after, apart)
            return
        if not dropout:
            self.unsteady = "the model draws random numbers in eval mode, too"
        for each in dropout:
            if (found := dropout_in_eval(asker.watch, each, apart=apart)) is not None:
                yield found


def _grown(
    asker: Asker, before: dict[str, int], between: dict[str, int], after: dict[str, int], apart: float
) -> Iterator[Finding]:
    grown = [name for name in after if before.get(name, 0) < between.get(name, 0) < after[name]]
    if not grown:
        return
    name = grown[0]
    path = name.rpartition(":")[0]
    attribute = name.rpartition(":")[2]
    sizes = [before.get(name, 0), between[name], after[name]]
    # A cache that only eval mode fills is cleared by who generates with it.
    fields = {} if name in asker.batch.grown else {"severity": Severity.INFO}
    yield finding(
        "GG667",
        f"`{attribute}` of {f'`{path}`' if path else 'the model'} holds {', then '.join(f'{n:,}' for n in sizes)} "
        f"elements after one forward more of the same batch each, and the answers differ by {apart:.3g}.",
        likely=["cache"],
        step=asker.watch.step,
        moment=Moment.BEFORE_STEP,
        module=path,
        module_class=type(asker.watch.model.get_submodule(path)).__name__,
        **fields,
        evidence={"sizes": sizes, "attributes": [each.replace(":", ".") for each in grown[:20]]},
    )


# A vocabulary or a data set, which takes a second to go through, and no cache of a few forwards.
_MOST_ITEMS = 10_000


def kept_sizes(model: nn.Module) -> dict[str, int]:
    """Elements of what each module keeps beside its parameters, by `path:attribute`; single numbers are statistics."""
    found: dict[str, int] = {}
    for path, module in model.named_modules():
        for name, value in [*vars(module).items(), *module.named_buffers(recurse=False)]:
            if name in ("_parameters", "_buffers", "_modules") or isinstance(value, nn.Module):
                continue
            # Objects of the user's own, such as a cache, hold their tensors as attributes.
            inside = vars(value) if _is_object(value) else value
            if isinstance(inside, (list, tuple, dict)) and len(inside) > _MOST_ITEMS:
                continue
            if tensors := [tensor for _, tensor in walk(inside) if tensor.dim() > 1]:
                found[f"{path}:{name}"] = sum(tensor.numel() for tensor in tensors)
    return found


def _is_object(value: object) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, (Tensor, type)) and not callable(value)
