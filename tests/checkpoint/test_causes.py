from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

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
def test_a_wrappers_prefix_is_stripped_and_said(path: Path, build: Build, prefix: str, said: list[Finding]) -> None:
    model = build(1)
    torch.save({f"{prefix}{name}": weight for name, weight in build().state_dict().items()}, path)
    load_checkpoint(path, model, on_finding=said.append)
    finding = next(finding for finding in said if finding.code == "GG705")
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
