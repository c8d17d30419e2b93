from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpt_guard.catalogue import entry
from gpt_guard.checkpoint import load_checkpoint, save_checkpoint
from gpt_guard.checkpoint.fingerprint import weights_digest
from gpt_guard.errors import CheckpointError, FingerprintMismatch
from gpt_guard.records import Finding, Severity
from mini_gpt import MiniGPT

Build = Callable[..., MiniGPT]


State = dict[str, Any]


def refused(path: Path, model: nn.Module, untouched: Any, **options: Any) -> Finding:
    """The finding by which this load is refused, after which the model is as before."""
    before = untouched(model)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, model, on_finding=lambda finding: None, **options)
    before.check()
    assert not isinstance(caught.value, FingerprintMismatch)
    assert caught.value.finding.code == "GG705"
    return caught.value.finding


def likeliest(finding: Finding) -> str:
    return {cause.text: cause.key for cause in entry("GG705").causes}[finding.causes[0]]


def pair(bias: bool = True, tie: bool = False) -> nn.Sequential:
    model = nn.Sequential(OrderedDict(one=nn.Linear(4, 4, bias=bias), two=nn.Linear(4, 4, bias=bias)))
    if tie:
        two: Any = model.two
        two.weight = model.get_parameter("one.weight")
    return model


def changed(state: State, **changes: Any) -> State:
    return {name: changes.get(name.replace(".", "_"), value) for name, value in state.items()}


@pytest.mark.parametrize(
    ("state", "model", "cause"),
    [
        (pair().state_dict(), pair(bias=False), "bias"),
        (pair(bias=False).state_dict(), pair(), "bias"),
        (pair().state_dict(), pair(tie=True), "tied"),
        (changed(pair().state_dict(), one_weight=torch.ones(4, 4, dtype=torch.int8)), pair(), "integers"),
        ({**pair().state_dict(), "one.lora_A": torch.ones(2, 4)}, pair(), "adapter"),
        ({"weight": torch.ones(6, 2), "bias": torch.ones(2)}, nn.Linear(6, 2), "transposed"),
    ],
)
def test_other_differences_have_their_cause(
    path: Path, untouched: Any, state: State, model: nn.Module, cause: str
) -> None:
    torch.save(state, path)
    assert likeliest(refused(path, model, untouched)) == cause


def test_what_a_strict_load_of_torch_would_let_through_is_refused(path: Path, untouched: Any) -> None:
    """Two tensors for one tied weight: torch keeps whichever is copied last."""
    model = pair(tie=True)
    torch.save(pair().state_dict(), path)
    finding = refused(path, model, untouched, strict=False)
    assert "ties one.weight to two.weight" in finding.seen


def test_a_tied_weight_may_stand_once(path: Path) -> None:
    model, again = pair(tie=True), pair(tie=True)
    state = model.state_dict()
    del state["two.weight"]
    torch.save(state, path)
    load_checkpoint(path, again)
    assert weights_digest(again) == weights_digest(model)


def test_a_second_name_of_a_weight_that_is_loaded_anyway_is_no_finding(path: Path, reported: list[Finding]) -> None:
    model = nn.Linear(3, 3)
    torch.save({**model.state_dict(), "head.weight": model.weight.detach()}, path)
    load_checkpoint(path, nn.Linear(3, 3), on_finding=reported.append)
    assert [finding.code for finding in reported] == ["GG704"]


class Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mask", torch.zeros(2), persistent=False)


def test_a_buffer_the_model_makes_itself_is_named(path: Path, untouched: Any) -> None:
    torch.save({**Causal().state_dict(), "mask": torch.ones(2)}, path)
    assert likeliest(refused(path, Causal(), untouched)) == "buffer"


def test_part_of_a_model_is_loaded_only_when_asked_and_said(path: Path, build: Build, reported: list[Finding]) -> None:
    state = build().state_dict()
    del state["head.weight"]
    torch.save(state, path)
    model = build(1)
    head = model.head.weight.detach().clone()
    load_checkpoint(path, model, strict=False, on_finding=reported.append)
    assert [(finding.code, finding.severity) for finding in reported][-1] == ("GG705", Severity.WARNING)
    assert "head.weight" in reported[-1].seen
    assert torch.equal(model.head.weight, head)
    assert torch.equal(model.norm.weight, build().norm.weight)


def test_sizes_must_fit_even_then(path: Path, build: Build, untouched: Any) -> None:
    torch.save(build().state_dict(), path)
    refused(path, build(vocab_size=20), untouched, strict=False)


def test_a_batch_norm_from_before_it_counted_batches(path: Path) -> None:
    model, again = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model(torch.randn(8, 2))
    state = dict(model.state_dict())
    del state["1.num_batches_tracked"]
    torch.save(state, path)
    load_checkpoint(path, again)
    assert torch.equal(again.get_buffer("1.running_mean"), model.get_buffer("1.running_mean"))


def test_a_trial_that_fails_puts_every_weight_back(path: Path, untouched: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model(torch.randn(8, 2))
    state = dict(model.state_dict())
    for name in ("1.num_batches_tracked", "1.running_mean"):
        del state[name]
        state[f"{name}_was"] = torch.ones(3)
    torch.save(state, path)
    finding = refused(path, nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), untouched)
    assert "1.running_mean" in finding.evidence["missing"]  # type: ignore[operator]  # a list of names


def test_a_trial_does_not_let_integers_through(path: Path, untouched: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    state = {**model.state_dict(), "0.weight": torch.ones(3, 2, dtype=torch.int8)}
    del state["1.num_batches_tracked"]
    torch.save(state, path)
    assert "0.weight" in refused(path, model, untouched).evidence["kinds"]  # type: ignore[operator]  # a dict by name


def test_the_versions_that_torch_saved_are_kept(path: Path, untouched: Any) -> None:
    """A BatchNorm of today that lost its count is incomplete; only an old one never had it."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    state: Any = model.state_dict()
    del state["1.num_batches_tracked"]
    torch.save(state, path)
    finding = refused(path, nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), untouched)
    assert finding.evidence["missing"] == ["1.num_batches_tracked"]


class Migrating(nn.Module):
    """Reads its own old checkpoints, in which `new` was called `old`."""

    def __init__(self) -> None:
        super().__init__()
        self.new = nn.Linear(2, 2)
        self.register_load_state_dict_pre_hook(self._rename)  # type: ignore[no-untyped-call]  # torch has no types here

    @staticmethod
    def _rename(module: nn.Module, state: State, prefix: str, *_: Any) -> None:
        for name in [name for name in state if name.startswith(f"{prefix}old.")]:
            state[name.replace("old.", "new.")] = state.pop(name)


def test_a_model_that_reads_its_old_names_may_do_so(path: Path, reported: list[Finding], untouched: Any) -> None:
    model, again = Migrating(), Migrating()
    torch.save({name.replace("new.", "old."): weight for name, weight in model.state_dict().items()}, path)
    load_checkpoint(path, again, on_finding=reported.append)
    assert [finding.code for finding in reported] == ["GG704"]
    assert weights_digest(again) == weights_digest(model)
    torch.save({"other.weight": torch.ones(2, 2), "other.bias": torch.ones(2)}, path)
    refused(path, again, untouched)


def test_a_lazy_module_takes_its_shape_from_the_file(path: Path) -> None:
    torch.save(nn.Linear(3, 2).state_dict(), path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # older versions of torch say that lazy modules are new
        model = nn.LazyLinear(2)
    load_checkpoint(path, model)
    assert model.weight.shape == (2, 3)


def test_names_from_a_file_cannot_drive_the_terminal(path: Path, untouched: Any) -> None:
    torch.save({"\x1b[2Jweight": torch.ones(1), "x" * 5000: torch.ones(1)}, path)
    finding = refused(path, nn.Linear(1, 1), untouched)
    assert "\x1b" not in finding.model_dump_json().encode().decode("unicode_escape")
    assert len(finding.seen) < 1000


def test_a_file_of_very_many_names_is_refused_in_short_time(path: Path, build: Build, untouched: Any) -> None:
    one = torch.ones(16)
    torch.save({f"blocks.{index}.weight": one for index in range(20_000)}, path)
    finding = refused(path, build(), untouched)
    assert len(finding.evidence["unexpected"]) == 200  # type: ignore[arg-type]  # a list of names


def test_a_tensor_is_loaded_in_the_models_dtype(path: Path) -> None:
    model = nn.Linear(2, 2).bfloat16()
    weights: dict[str, Tensor] = {name: weight.float() for name, weight in nn.Linear(2, 2).state_dict().items()}
    torch.save(weights, path)
    load_checkpoint(path, model)
    assert torch.equal(model.weight, weights["weight"].bfloat16())


@pytest.mark.parametrize(
    ("sizes", "cause", "words"),
    [
        ({"num_layers": 4}, "layers", "the checkpoint has 2 of `blocks.N`, the model 4"),
        ({"num_layers": 1}, "layers", "the checkpoint has 2 of `blocks.N`, the model 1"),
        ({"vocab_size": 20}, "vocabulary", "vocabulary's size: 13 in the checkpoint, 20 in the model"),
        ({"block_size": 12}, "context", "number of positions: 8 in the checkpoint, 12 in the model"),
        ({"embedding_dim": 32}, "width", "embedding's width: 16 in the checkpoint, 32 in the model"),
        ({"expansion_factor": 2}, "other_size", "a size inside the layers: 64 in the checkpoint, 32 in the model"),
    ],
)
def test_another_size_is_named(
    path: Path, build: Build, untouched: Any, sizes: dict[str, int], cause: str, words: str
) -> None:
    torch.save(build().state_dict(), path)
    finding = refused(path, build(**sizes), untouched)
    assert likeliest(finding) == cause
    assert words in finding.seen


def test_the_config_key_that_explains_a_size_is_named(path: Path, build: Build, untouched: Any) -> None:
    save_checkpoint(path, build())
    finding = refused(path, build(vocab_size=20), untouched)
    assert "vocab_size is 13 in the checkpoint's config, 20 here" in finding.seen


def test_several_sizes_are_all_named(path: Path, build: Build, untouched: Any) -> None:
    torch.save(build().state_dict(), path)
    finding = refused(path, build(vocab_size=20, block_size=12, num_layers=3), untouched)
    assert [likeliest(finding.model_copy(update={"causes": (text,)})) for text in finding.causes[:3]] == [
        "layers",
        "vocabulary",
        "context",
    ]
    evidence: Any = finding.evidence
    assert evidence["sizes"]["head.weight"] == {"checkpoint": [13, 16], "model": [20, 16]}
    assert "blocks.2.mlp_norm.weight" in evidence["missing"]
    assert "blocks.1.mlp_norm.weight" not in evidence["missing"]


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_a_wrappers_prefix_is_stripped_and_said(path: Path, build: Build, prefix: str, reported: list[Finding]) -> None:
    model = build(1)
    torch.save({f"{prefix}{name}": weight for name, weight in build().state_dict().items()}, path)
    load_checkpoint(path, model, on_finding=reported.append)
    finding = next(finding for finding in reported if finding.code == "GG705")
    assert finding.severity is Severity.INFO
    assert f"`{prefix}`" in finding.seen
    assert weights_digest(model) == weights_digest(build())


def test_a_compiled_submodule_on_either_side_fits(path: Path, build: Build) -> None:
    torch.save(build().state_dict(), path)
    model = build(1)
    compiled: Any = torch.compile(model.blocks[0], backend="eager")
    model.blocks[0] = compiled
    load_checkpoint(path, model)
    assert sorted(map(str, model.state_dict())) != sorted(build().state_dict())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), build().parameters(), strict=True))


def test_a_prefix_that_does_not_make_all_fit_is_not_stripped_in_silence(
    path: Path, build: Build, untouched: Any
) -> None:
    state = {f"module.{name}": weight for name, weight in build().state_dict().items()}
    state["n_averaged"] = torch.tensor(3)
    torch.save(state, path)
    finding = refused(path, build(1), untouched)
    assert finding.evidence["unexpected"] == ["n_averaged"]
    assert finding.evidence["missing"] == []


@pytest.mark.parametrize("front", ["model", "net.inner"])
def test_a_foreign_prefix_is_named_with_the_line_that_strips_it(
    path: Path, build: Build, untouched: Any, front: str
) -> None:
    torch.save({f"{front}.{name}": weight for name, weight in build().state_dict().items()}, path)
    finding = refused(path, build(1), untouched)
    assert likeliest(finding) == "prefix"
    count = len(build().state_dict())
    assert f"{count} of the checkpoint's names fit but for the prefix `{front}.`" in finding.seen
    assert f'name.removeprefix("{front}.")' in finding.seen


def test_a_prefix_on_the_models_side_is_named(path: Path, build: Build, untouched: Any) -> None:
    torch.save(build().state_dict(), path)
    finding = refused(path, nn.ModuleDict({"gpt": build(1)}), untouched)
    assert likeliest(finding) == "prefix"
    assert '"gpt." + name' in finding.seen


@pytest.mark.parametrize(
    ("old", "new"), [("attention", "attn"), ("blocks", "layers"), ("mlp.up", "mlp.wide"), ("head", "lm_head")]
)
def test_a_renamed_submodule_is_named(path: Path, build: Build, untouched: Any, old: str, new: str) -> None:
    state = {f".{name}".replace(f".{old}.", f".{new}.")[1:]: weight for name, weight in build().state_dict().items()}
    torch.save(state, path)
    finding = refused(path, build(1), untouched)
    assert likeliest(finding) == "renamed"
    shown = new.rpartition(".")[2], old.rpartition(".")[2]
    count = len(finding.evidence["missing"])  # type: ignore[arg-type]  # a list of names
    assert f"`{shown[0]}` in the checkpoint fits `{shown[1]}` in the model: {count} of {count}" in finding.seen


def test_another_model_is_called_that(path: Path, build: Build, untouched: Any) -> None:
    torch.save(nn.Conv2d(3, 7, 5).state_dict(), path)
    assert likeliest(refused(path, build(), untouched)) == "other_model"
