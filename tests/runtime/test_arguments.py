"""Arguments that cannot work are refused where they are written, in words that say what to write; others pass."""

from __future__ import annotations

import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from gpt_guard import (
    CheckpointFingerprint,
    ConsoleSink,
    EvalModeAssert,
    FiniteGuard,
    GradNormMonitor,
    Guardian,
    GuardUsageError,
    JsonlSink,
    LRTracker,
    ParamDeltaProbe,
    load_checkpoint,
    read_report,
    read_run,
    save_checkpoint,
)
from gpt_guard.testing import Recorder


def tiny() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1)


def named(x: int) -> int:
    return x


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "start_step text": ({"start_step": "5"}, "start_step='5' cannot work: give the number of optimizer steps"),
    "start_step float": ({"start_step": 1.5}, "start_step=1.5 cannot work"),
    "start_step negative": ({"start_step": -3}, "start_step=-3 cannot work"),
    "start_step bool": ({"start_step": True}, "start_step=True cannot work"),
    "scheduler name": ({"scheduler": "cos"}, r"scheduler='cos' cannot work: give the object whose step\(\)"),
    "scheduler function": ({"scheduler": named}, r"belongs in LRTracker\(expected=...\)"),
    "scheduler class": ({"scheduler": StepLR}, "give the object"),
    "scheduler in a list": ({"scheduler": [None, 3]}, "scheduler=3 cannot work"),
    "scheduler is an optimizer": ({"scheduler": sgd(tiny())}, "cannot work: give the object"),
    "tokenizer number": ({"tokenizer": 3}, "tokenizer=3 cannot work: give the tokenizer itself"),
    "tokenizer function": ({"tokenizer": named}, "cannot work: give the tokenizer itself"),
    "tokenizer path": ({"tokenizer": "gpt2.json"}, "tokenizer is 'gpt2.json', and there is no such file"),
    "config": ({"config": object()}, "config: a object is no config: give a dict"),
    "optimizer none of them": ({"optimizer": []}, "empty list.*None for evaluation only"),
    "optimizer scheduler": ({"optimizer": StepLR(sgd(tiny()), 3)}, "StepLR, which is a learning-rate scheduler"),
    "optimizer plateau": ({"optimizer": ReduceLROnPlateau(sgd(tiny()))}, r"scheduler=\.\.\."),
    "sinks function": ({"sinks": [print]}, "not a Sink instance; for an output of your own, subclass gpt_guard.Sink"),
    "sinks class": ({"sinks": [ConsoleSink]}, r"write ConsoleSink\(\.\.\.\)"),
    "sinks one": ({"sinks": ConsoleSink()}, r"it takes a list: sinks=\[ConsoleSink"),
    "sinks text": ({"sinks": "console"}, "sinks='console' cannot work"),
    "guards finite twice": ({"guards": [FiniteGuard(), FiniteGuard(ignore="a")]}, "two FiniteGuards"),
    "run_dir number": ({"run_dir": 3}, "run_dir=3 cannot work: give the path of a folder"),
    "run_dir empty": ({"run_dir": ""}, "run_dir='' cannot work"),
}


@pytest.mark.parametrize("case", BAD)
def test_guardian_refuses(case: str) -> None:
    given, message = BAD[case]
    with pytest.raises(GuardUsageError, match=message):
        Guardian(**({"model": tiny()} | given))


class Noam:
    """A wrapper that steps its optimizer and has nothing else of one, as the Annotated Transformer writes it."""

    def __init__(self, optimizer: SGD) -> None:
        self.optimizer = optimizer
        self._step = 0

    def step(self) -> None:
        self._step += 1
        self.optimizer.step()


class OwnScheduler:
    def step(self) -> None: ...


class OwnTokenizer:
    """Shows no vocabulary: the run is not named after it, and the report says so."""

    def encode(self, text: str) -> list[int]:
        return [0]


def test_what_can_work_is_taken(tmp_path: Path) -> None:
    model = tiny()
    optimizer = sgd(model)
    sinks = [Recorder(), JsonlSink(tmp_path)]
    assert Guardian(model, Noam(optimizer), start_step=np.int64(7)).step == 7  # type: ignore[arg-type]  # a wrapper
    assert Guardian(model, optimizer, start_step=torch.tensor(4)).step == 4  # type: ignore[arg-type]  # an index
    Guardian(model, (each for each in [optimizer]), scheduler=[StepLR(optimizer, 3), OwnScheduler(), None])
    Guardian(model, None, tokenizer=OwnTokenizer(), config={"n_layer": 2}, run_dir=tmp_path, sinks=sinks)
    Guardian(model, tokenizer=["a", "b"], guards=[GradNormMonitor(), GradNormMonitor(warn_above=3)], sinks=())


NUMBERS: dict[str, tuple[Any, float]] = {
    "int": (3, 3.0),
    "bool": (True, 1.0),
    "nan": (math.nan, math.nan),
    "numpy": (np.float32(2), 2.0),
    "tensor": (torch.tensor([1.5], dtype=torch.bfloat16), 1.5),
    "with a graph": (torch.tensor(2.0, requires_grad=True) * 2, 4.0),
}
NO_NUMBERS: dict[str, tuple[Any, str]] = {
    "none": (None, r"log\(val_loss=None\) cannot work: give a number"),
    "text": ("3.0", r"log\(val_loss='3.0'\)"),
    "list": ([1, 2], r"log\(val_loss=\[1, 2\]\)"),
    "two elements": (torch.ones(2), r"log\(val_loss=tensor of shape \[2\]\).*a tensor of one element"),
    "complex": (1 + 2j, r"log\(val_loss=\(1\+2j\)\)"),
    "too large": (10**400, r"log\(val_loss=...\) cannot work: it is too large for a float"),
}


@pytest.mark.parametrize("case", NUMBERS)
def test_log_takes_numbers(case: str) -> None:
    given, number = NUMBERS[case]
    guardian = Guardian(tiny(), sinks=[])
    guardian.log(val_loss=given)
    assert guardian.report().facts["metrics.val_loss"] == pytest.approx(number, nan_ok=True)


@pytest.mark.parametrize("case", NO_NUMBERS)
def test_log_names_the_metric_that_is_none(case: str) -> None:
    given, message = NO_NUMBERS[case]
    guardian = Guardian(tiny(), sinks=[])
    with pytest.raises(GuardUsageError, match=message):
        guardian.log(accuracy=0.5, val_loss=given)
    assert not guardian.report().facts


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GradNormMonitor(warn_above="10"), "warn_above='10'.*expected a number, or None"),  # type: ignore[arg-type]
        (lambda: GradNormMonitor(window=1e2), "window=100.0.*expected a whole number"),  # type: ignore[arg-type]
        (lambda: GradNormMonitor(spike_factor=True), "expected a number"),
        (lambda: LRTracker(rtol="0.1"), r"LRTracker\(rtol='0.1'\) cannot work"),  # type: ignore[arg-type]
        (lambda: ParamDeltaProbe(every="3"), "every='3'.*expected a whole number"),  # type: ignore[arg-type]
        (lambda: ParamDeltaProbe(exact=1), "exact=1.*expected True or False"),  # type: ignore[arg-type]
        (lambda: FiniteGuard(outputs="no"), "outputs='no'.*expected True or False"),  # type: ignore[arg-type]
        (lambda: FiniteGuard(ignore=[3]), "holds 3; expected patterns of module paths"),  # type: ignore[list-item]
        (lambda: EvalModeAssert(allow=4), "holds 4; expected patterns of module paths"),  # type: ignore[arg-type]
        (lambda: CheckpointFingerprint(data=3), "data holds 3; expected paths"),  # type: ignore[arg-type]
        (lambda: CheckpointFingerprint(texts="x"), "expected texts by name"),  # type: ignore[arg-type]
        (lambda: CheckpointFingerprint(weights=3), "expected True or False"),  # type: ignore[arg-type]
    ],
)
def test_guards_refuse_settings_of_a_wrong_type(make: Any, message: str) -> None:
    with pytest.raises(GuardUsageError, match=message):
        make()


def test_guards_take_any_kind_of_number() -> None:
    of_numpy: dict[str, Any] = {"warn_above": np.float32(3), "window": np.int64(50), "clip_window": np.int64(50)}
    GradNormMonitor(**of_numpy, spike_factor=20)
    FiniteGuard(ignore="0")
    ParamDeltaProbe(every=2, exact=True)
    LRTracker(rtol=0)
    CheckpointFingerprint(data="here", texts={"template": "x"})


def test_a_pattern_that_ignores_nothing_is_named() -> None:
    model = nn.ModuleDict({"head": nn.Linear(2, 2), "body": nn.Linear(2, 2)})
    with Guardian(model, guards=[FiniteGuard(ignore=["haed.*", "body", "h*"])], sinks=[]) as guardian:
        model["head"](torch.ones(1, 2))
        told = guardian.report().not_watched
    assert [line for line in told if "ignored by" in line] == [
        "FiniteGuard: nothing is ignored by 'haed.*': it matches no module; near it: head"
    ]


def test_files_given_the_wrong_way_round(tmp_path: Path) -> None:
    model: Any = tiny()
    path: Any = tmp_path / "checkpoint.pt"
    save_checkpoint(path, model)
    calls: list[Any] = [save_checkpoint, load_checkpoint]
    for call in calls:
        with pytest.raises(GuardUsageError, match=r"path and model are swapped\. Write .*\(\"checkpoint\.pt\", model"):
            call(model, path)
        with pytest.raises(GuardUsageError, match=r"model is a OrderedDict, no torch\.nn\.Module"):
            call(path, OrderedDict(model.state_dict()))
        with pytest.raises(GuardUsageError, match="path is empty"):
            call("", model)
    with pytest.raises(GuardUsageError, match=r"is a folder; give the name of a file in it, such as .*step_1000\.pt"):
        Guardian(model, sinks=[]).save(tmp_path)
    nothing: Any = None
    with pytest.raises(GuardUsageError, match=r"read_run\(None\) cannot work"):
        read_run(nothing)
    with pytest.raises(GuardUsageError, match=r"read_report\(None\) cannot work"):
        read_report(nothing)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["checkpoint.pt"]
