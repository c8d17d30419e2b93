"""Bugs of environment and files."""

from __future__ import annotations

import json

import torch

from gpt_guard.checks.environment import stage as environment

from .project import BLOCK, Project, encode
from .table import mutant


@mutant("environment", "GG611")
def a_gpu_is_there_and_the_model_is_on_the_cpu(project: Project) -> None:
    project.patch(environment, "accelerators", lambda: ["cuda:0 Some GPU"])
    project.given["device"] = None


@mutant("environment", "GG612")
def a_device_that_this_torch_does_not_have(project: Project) -> None:
    project.patch(torch.backends.mps, "is_available", lambda: False)
    project.given["device"] = "mps"


@mutant("environment", "GG618")
def one_buffer_stayed_on_another_device(project: Project) -> None:
    project.model.register_buffer("left_behind", torch.empty(3, device="meta"))
    project.given["make_model"] = lambda: project.model_class(project.config)


@mutant("environment", "GG614")
def torch_is_too_old(project: Project) -> None:
    project.patch(environment, "torch_version", lambda: (1, 13))


@mutant("files", "GG707")
def the_checkpoint_is_empty(project: Project) -> None:
    project.write_files()
    (project.folder / "checkpoint.pt").write_bytes(b"")


@mutant("files", "GG707")
def the_checkpoint_is_cut_off(project: Project) -> None:
    project.write_files()
    path = project.folder / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@mutant("files", "GG615")
def the_tokenizer_is_cut_off(project: Project) -> None:
    project.write_files()
    path = project.folder / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8")[:40], encoding="utf-8")


@mutant("files", "GG615")
def the_training_data_is_a_dict(project: Project) -> None:
    project.write_files()
    torch.save({"ids": encode("abc")}, project.folder / "train.pt")


@mutant("files", "GG615")
def the_training_data_is_missing(project: Project) -> None:
    project.write_files()
    (project.folder / "train.pt").unlink()


@mutant("files", "GG616")
def training_and_validation_are_swapped(project: Project) -> None:
    project.data = {"train": project.data["val"], "val": project.data["train"]}
    project.write_files()


@mutant("files", "GG616")
def validation_is_shorter_than_a_row(project: Project) -> None:
    project.data["val"] = project.data["val"][:BLOCK]
    project.write_files()


@mutant("files", "GG615")
def the_tokenizer_has_no_token(project: Project) -> None:
    project.write_files()
    (project.folder / "tokenizer.json").write_text(json.dumps({"chars": []}), encoding="utf-8")
