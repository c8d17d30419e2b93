"""Bugs of where the rows of batches come from, and of the last target, which no shift within the row can show."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from .project import BLOCK, ROWS, TEXT, VAL_TEXT, Project, encode
from .table import mutant

Batch = tuple[Tensor, Tensor]


def at(starts: Tensor, ids: Tensor | None = None) -> Batch:
    """Rows of the training text that begin at these places."""
    ids = encode(TEXT) if ids is None else ids
    rows = ids[starts.reshape(-1, 1) + torch.arange(BLOCK + 1)]
    return rows[:, :-1], rows[:, 1:]


@mutant("batches", "GG603", "some_rows")
def half_of_the_rows_have_targets_of_other_text(project: Project) -> None:
    def get_batch() -> Batch:
        x, y = project.healthy_batch()
        _, other = project.healthy_batch()
        return x, torch.where(torch.arange(ROWS)[:, None] % 2 == 0, other, y)

    project.get_batch = get_batch


@mutant("batches", "GG603", "some_rows")
def the_last_rows_have_targets_of_other_rows(project: Project) -> None:
    def get_batch() -> Batch:
        x, y = project.healthy_batch()
        return x, torch.cat([y[: ROWS // 2], y[ROWS // 2 :].roll(1, 0)])

    project.get_batch = get_batch


@mutant("batches", "GG603", "rolled")
def roll_in_place_of_a_shift(project: Project) -> None:
    def get_batch() -> Batch:
        x, _ = project.healthy_batch()
        return x, x.roll(-1, 1)

    project.get_batch = get_batch


@mutant("batches", "GG603", "rolled")
def roll_of_the_whole_batch_as_one(project: Project) -> None:
    def get_batch() -> Batch:
        x, _ = project.healthy_batch()
        return x, x.flatten().roll(-1).view_as(x)

    project.get_batch = get_batch


@mutant("batches", "GG603", "last_constant")
def the_last_target_is_always_zero(project: Project) -> None:
    def get_batch() -> Batch:
        x, y = project.healthy_batch()
        y = y.clone()
        y[:, -1] = 0
        return x, y

    project.get_batch = get_batch


@mutant("batches", "GG603", "last_constant")
def the_last_target_repeats_the_last_input(project: Project) -> None:
    def get_batch() -> Batch:
        x, y = project.healthy_batch()
        y = y.clone()
        y[:, -1] = x[:, -1]
        return x, y

    project.get_batch = get_batch


@mutant("batches", "GG605", "reordered")
def the_same_rows_in_another_order_each_time(project: Project) -> None:
    x, y = project.healthy_batch()

    def get_batch() -> Batch:
        order = torch.randperm(ROWS)
        return x[order], y[order]

    project.get_batch = get_batch


@mutant("batches", "GG605", "reordered")
def rows_are_drawn_from_the_same_few(project: Project) -> None:
    starts = torch.randint(len(TEXT) - BLOCK, (10,))
    project.get_batch = lambda: at(starts[torch.randint(10, (ROWS,))])


@mutant("batches", "GG679", "sliding")
def windows_slide_by_one(project: Project) -> None:
    place = itertools.count(0, ROWS)
    project.get_batch = lambda: at(next(place) + torch.arange(ROWS))


@mutant("batches", "GG679", "sliding")
def windows_slide_by_two(project: Project) -> None:
    place = itertools.count(0, 2 * ROWS)
    project.get_batch = lambda: at(next(place) + 2 * torch.arange(ROWS))


@mutant("batches", "GG679", "narrow")
def windows_start_in_the_first_hundred_places(project: Project) -> None:
    project.get_batch = lambda: at(torch.randint(100, (ROWS,)))


@mutant("batches", "GG679", "narrow")
def windows_start_in_the_first_thousandth(project: Project) -> None:
    project.get_batch = lambda: at(torch.randint(2000, (ROWS,)))


@mutant("batches", "GG679", "narrow")
def windows_start_at_multiples_of_a_block_of_few(project: Project) -> None:
    project.get_batch = lambda: at(BLOCK * torch.randint(len(TEXT) // BLOCK // BLOCK, (ROWS,)))


@mutant("batches", "GG679", "validation")
def batches_are_drawn_from_validation(project: Project) -> None:
    project.get_batch = lambda: at(torch.randint(len(VAL_TEXT) - BLOCK, (ROWS,)), encode(VAL_TEXT))


@mutant("batches", "GG679", "validation")
def half_of_the_batches_are_drawn_from_validation(project: Project) -> None:
    turn = itertools.count()
    project.get_batch = lambda: at(
        torch.randint(len(VAL_TEXT) - BLOCK, (ROWS,)), encode(VAL_TEXT if next(turn) % 2 else TEXT)
    )


@mutant("batches", "GG679", "elsewhere")
def batches_are_cut_from_other_ids(project: Project) -> None:
    order = torch.randperm(project.config.vocab_size)
    project.get_batch = lambda: at(torch.randint(len(TEXT) - BLOCK, (ROWS,)), order[encode(TEXT)])


@mutant("batches", "GG608", "padded_rows")
def padding_that_nobody_declared_counts(project: Project) -> None:
    def get_batch() -> Batch:
        x, y = project.healthy_batch()
        x, y = x.clone(), y.clone()
        for row in range(ROWS):
            length = 4 + row
            x[row, length + 1 :], y[row, length:] = 0, 0
        return x, y

    project.get_batch = get_batch


@mutant("batches", "GG608", "padded_rows")
def padding_in_front_that_nobody_declared_counts(project: Project) -> None:
    def get_batch() -> Batch:
        x, y = project.healthy_batch()
        x, y = x.clone(), y.clone()
        for row in range(ROWS):
            x[row, : 5 + row], y[row, : 4 + row] = 3, 3
        return x, y

    project.get_batch = get_batch
