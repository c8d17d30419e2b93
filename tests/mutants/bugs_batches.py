"""Bugs of the function that draws batches."""

from __future__ import annotations

import torch
from torch import Tensor

from .project import BLOCK, ROWS, TEXT, TOKENIZER, Project, encode
from .table import mutant


def rows(length: int) -> Tensor:
    ids = encode(TEXT)
    return ids[torch.randint(len(ids) - length, (ROWS, 1)) + torch.arange(length)]


@mutant("batches", "GG603")
def targets_are_not_shifted(project: Project) -> None:
    def get_batch() -> tuple[Tensor, Tensor]:
        x = rows(BLOCK)
        return x, x.clone()

    project.get_batch = get_batch


@mutant("batches", "GG603")
def targets_are_shifted_by_two(project: Project) -> None:
    def get_batch() -> tuple[Tensor, Tensor]:
        window = rows(BLOCK + 2)
        return window[:, :-2], window[:, 2:]

    project.get_batch = get_batch


@mutant("batches", "GG603")
def targets_are_shifted_into_the_past(project: Project) -> None:
    def get_batch() -> tuple[Tensor, Tensor]:
        window = rows(BLOCK + 1)
        return window[:, 1:], window[:, :-1]

    project.get_batch = get_batch


@mutant("batches", "GG603")
def targets_of_other_rows(project: Project) -> None:
    def get_batch() -> tuple[Tensor, Tensor]:
        x, y = project.healthy_batch()
        return x, y.roll(1, 0)

    project.get_batch = get_batch


@mutant("batches", "GG603")
def inputs_and_targets_are_drawn_apart(project: Project) -> None:
    project.get_batch = lambda: (rows(BLOCK), rows(BLOCK))


@mutant("batches", "GG605")
def the_same_batch_every_time(project: Project) -> None:
    only = project.healthy_batch()
    project.get_batch = lambda: only


@mutant("batches", "GG605")
def the_generator_is_seeded_in_get_batch(project: Project) -> None:
    def get_batch() -> tuple[Tensor, Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1337)
            return project.healthy_batch()

    project.get_batch = get_batch


@mutant("batches", "GG605")
def all_rows_begin_at_one_place(project: Project) -> None:
    def get_batch() -> tuple[Tensor, Tensor]:
        window = rows(BLOCK + 1)[:1].expand(ROWS, -1)
        return window[:, :-1], window[:, 1:]

    project.get_batch = get_batch


@mutant("batches", "GG601")
def ids_of_a_batch_are_floats(project: Project) -> None:
    def get_batch() -> tuple[Tensor, Tensor]:
        x, y = project.healthy_batch()
        return x.float(), y

    project.get_batch = get_batch


@mutant("batches", "GG600")
def targets_lack_the_last_position(project: Project) -> None:
    def get_batch() -> tuple[Tensor, Tensor]:
        x, y = project.healthy_batch()
        return x, y[:, :-1]

    project.get_batch = get_batch


@mutant("batches", "GG606")
def every_target_is_ignored(project: Project) -> None:
    def get_batch() -> tuple[Tensor, Tensor]:
        x, y = project.healthy_batch()
        return x, torch.full_like(y, -100)

    project.get_batch = get_batch


@mutant("batches", "GG604")
def a_target_is_beyond_the_vocabulary(project: Project) -> None:
    def get_batch() -> tuple[Tensor, Tensor]:
        x, y = project.healthy_batch()
        y = y.clone()
        y[0, 3] = len(TOKENIZER)
        return x, y

    project.get_batch = get_batch


@mutant("batches", "GG608")
def padding_is_supervised(project: Project) -> None:
    pad = TOKENIZER.encode("0")[0]

    def get_batch() -> tuple[Tensor, Tensor]:
        window = rows(BLOCK + 1)
        window[:, BLOCK // 2 :] = pad
        return window[:, :-1], window[:, 1:]

    project.get_batch, project.given["pad_id"] = get_batch, pad


@mutant("batches", "GG607")
def the_end_of_sequence_is_ignored(project: Project) -> None:
    end = TOKENIZER.encode(".")[0]

    def get_batch() -> tuple[Tensor, Tensor]:
        x, y = project.healthy_batch()
        y = y.clone()
        x, y = x.clone(), y
        x[:, 9] = y[:, 8] = end
        y[y == end] = -100
        return x, y

    project.get_batch, project.given["eos_id"] = get_batch, end
