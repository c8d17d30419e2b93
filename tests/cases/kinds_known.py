"""The cases that other tests keep as data - losses, models, batches, workers - as instances of the kinds."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from gpt_guard import Guardian
from gpt_guard.callbacks.attention.embedding import IndexCalls
from gpt_guard.callbacks.attention.guard import AttentionCalls
from gpt_guard.callbacks.data.guard import DataWatch
from gpt_guard.callbacks.defaults import default_guards
from gpt_guard.callbacks.modes.guard import EvalModeAssert
from gpt_guard.callbacks.probes.guard import ModelProbe
from gpt_guard.records import Finding

from . import data_batches, data_forms, data_workers, loss_inputs, loss_parts, model_probes
from .data_watch import CASES as DATA
from .data_watch import Case as DataCase
from .data_watch import Loop
from .kinds import INSTANCES, Instance, watched

FILES = (data_batches, data_forms)


def words(name: str) -> str:
    return name.replace("_", " ")


def loss_case(case: loss_parts.Case) -> list[Finding]:
    return list(loss_parts.run(case, guards=default_guards()).findings)


for _case in loss_inputs.CASES:
    INSTANCES.append(
        Instance(
            f"loss inputs: {_case.kind}",
            words(_case.name),
            partial(loss_case, _case),
            _case.code,
            _case.line,
            cause=_case.cause,
            module=_case.module,
            line=True,
        )
    )

# By the code of the finding, and, for a twin, by the section that it stands in.
MODEL = {
    "GG660": "not causal",
    "GG661": "information crosses batch rows",
    "GG697": "mask polarity inverted",
    "GG669": "mask polarity inverted",
    "GG699": "fully masked rows",
    "GG505": "functional dropout active in eval",
    "GG695": "position table too short",
    "GG631": "token id out of range",
}


OTHER = "another attention mask or state"


def model_case(case: model_probes.Case, steps: int = 3) -> list[Finding]:
    """Twins, whose toy models have parts that are never called, are asked by the guards of these kinds alone."""
    model = case.make()
    of_models = [ModelProbe(), AttentionCalls(), IndexCalls(), EvalModeAssert()]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loop(_: Guardian) -> None:
        case.loop(model, optimizer, steps)

    return watched(model, optimizer, loop, guards=of_models if case.code is None else None)


def _model_cases(section: Iterable[model_probes.Case]) -> None:
    cases = list(section)
    codes = [case.code for case in cases if case.code is not None]
    for case in cases:
        # A twin is one of each kind in its section.
        for kind in {MODEL.get(code, OTHER) for code in codes if case.code in (None, code)}:
            run = partial(model_case, case)
            name, line = words(case.name), case.line or ""
            INSTANCES.append(Instance(f"model: {kind}", name, run, case.code, line, module=case.module))


for _section in ("_futures", "_rows", "_masks", "_modes", "_lookups"):
    _model_cases(getattr(model_probes, _section)())


def data_case(case: DataCase) -> list[Finding]:
    """Twins, in which other things may be odd, are asked by DataWatch alone."""
    loop: Loop = case.make()
    guard = DataWatch(**loop.options)
    others = [each for each in default_guards() if not isinstance(each, DataWatch)]
    return watched(loop.model, loop.optimizer, loop.run, guards=[guard, *(others if case.code is not None else ())])


# The step in which it begins, and after how many more it is told, where that is not the first and two.
BEGINS = {
    "the_last_batch_is_squeezed": 4,
    "the_validation_loader_took_the_name": 13,
    "splits_that_overlap": 5,
    "documents_on_both_sides": 4,
}
# Whether one batch is learned by heart on purpose takes longer to tell.
WITHIN = {"a_seed_in_the_function_that_draws": 19}

for _data in (*DATA, *data_workers.CASES):
    INSTANCES.append(
        Instance(
            f"data: {_data.kind}",
            words(_data.name),
            partial(data_case, _data),
            _data.code,
            _data.line,
            begins=BEGINS.get(_data.name, 0),
            within=WITHIN.get(_data.name, 2),
            cause=_data.cause,
            line=_data.code not in (None, "GG600"),
        )
    )
