"""Batches that lose a dimension, that hold no information, or that the validation shares; and their twins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard.guardian import Guardian

from .data_watch import CLASSES, FEATURES, ROWS, Loop, bug, healthy, loader, over, samples, small, train

Batches = Iterator[tuple[Tensor, Tensor]]
SHAPE, FORM, SPLIT = "batch dimension", "form", "contamination"


@bug(SHAPE, "GG600", "squeeze() without a dimension")
def the_last_batch_is_squeezed() -> Loop:
    """65 samples: one is left for the last batch."""
    data = loader(65)
    return over(lambda: ((x[:, None].squeeze(), y.squeeze()) for _ in range(2) for x, y in data))


@bug(SHAPE, "GG600", "another loader")
def the_validation_loader_took_the_name() -> Loop:
    data, validation = loader(shuffle=True), loader(40, 1, shuffle=True)
    return over(lambda: (batch for each in (data, validation) for batch in each))


@healthy(SHAPE)
def the_last_batch_is_smaller() -> Loop:
    data = loader(65, shuffle=True)
    return over(lambda: (batch for _ in range(3) for batch in data))


@healthy(SHAPE)
def acting_on_one_state_and_training_on_many() -> Loop:
    model, optimizer = small()

    def run(guardian: Guardian) -> None:
        for _ in range(8):
            model(torch.randn(FEATURES)).argmax()
            train(model, optimizer, *samples(ROWS))

    return Loop(model, optimizer, run)


@healthy(SHAPE)
def sequences_of_any_length() -> Loop:
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def run(guardian: Guardian) -> None:
        for length in (9, 5, 12, 7, 30, 6, 9):
            ids = torch.randint(20, (4, length))
            optimizer.zero_grad()
            F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
            optimizer.step()

    return Loop(model, optimizer, run)


@bug(FORM, "GG634", "All elements are the same")
def a_buffer_that_is_never_filled() -> Loop:
    held = torch.zeros(ROWS, FEATURES)
    return over(lambda: ((held.clone(), y) for _, y in (samples(ROWS) for _ in range(6))))


@bug(FORM, "GG634", "All elements are the same")
def a_mask_in_place_of_the_ids() -> Loop:
    model = nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(8 * ROWS, 20))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def run(guardian: Guardian) -> None:
        for _ in range(6):
            ids = torch.randint(1, 20, (8, ROWS))
            train(model, optimizer, (ids > 0).long(), ids[:, 0])

    return Loop(model, optimizer, run)


@healthy(FORM)
def one_hot_rows() -> Loop:
    model, optimizer = small(12)

    def run(guardian: Guardian) -> None:
        for _ in range(8):
            y = torch.randint(CLASSES, (ROWS,))
            train(model, optimizer, F.one_hot(y, 12).float(), y)

    return Loop(model, optimizer, run)


@healthy(FORM)
def images_with_black_borders() -> Loop:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def run(guardian: Guardian) -> None:
        for _ in range(8):
            images = F.pad(torch.rand(ROWS, 1, 4, 4), (2, 2, 2, 2))
            train(model, optimizer, images, torch.randint(CLASSES, (ROWS,)))

    return Loop(model, optimizer, run)


@healthy(FORM, "GG634")
def pixels_that_were_not_scaled() -> Loop:
    def batches() -> Batches:
        for _ in range(6):
            yield torch.randint(256, (ROWS, FEATURES)).float(), torch.randint(CLASSES, (ROWS,))

    return over(batches)


@healthy(FORM, "GG634")
def a_column_that_never_varies() -> Loop:
    def batches() -> Batches:
        for _ in range(6):
            x, y = samples(ROWS)
            x[:, 4] = 7.5
            yield x, y

    return over(batches)


@healthy(FORM, "GG634")
def a_loader_that_never_shuffles() -> Loop:
    data = loader(shuffle=False)
    return over(lambda: (batch for _ in range(2) for batch in data))


@healthy(FORM, "GG634")
def mostly_padding() -> Loop:
    model = nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(8 * ROWS, 20))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def run(guardian: Guardian) -> None:
        for _ in range(6):
            ids = torch.randint(1, 20, (8, ROWS))
            ids[:, 4:] = 0
            train(model, optimizer, ids, ids[:, 0])

    return Loop(model, optimizer, run)


def split(trained: slice, held_out: slice, *, rows: int = 100) -> Loop:
    """Train on a part of the samples for two epochs, then evaluate on another."""
    model, optimizer = small()
    x, y = samples(rows)

    def run(guardian: Guardian) -> None:
        for _ in range(2):
            for places in torch.arange(rows)[trained][torch.randperm(len(x[trained]))].split(ROWS):
                train(model, optimizer, x[places], y[places])
            with guardian.evaluating():
                for part in x[held_out].split(10):
                    model(part)

    return Loop(model, optimizer, run)


@bug(SPLIT, "GG638", "fell on both sides", "model(part)")
def splits_that_overlap() -> Loop:
    return split(slice(0, 80), slice(70, 100))


@bug(SPLIT, "GG638", "fell on both sides", "model(x[20:])")
def documents_on_both_sides() -> Loop:
    """Windows of ids; five documents occur twice. The evaluation is written by hand, with eval() and no_grad()."""
    model = nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(8 * ROWS, 50))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randint(50, (40, ROWS))
    x[20:25] = x[:5]

    def run(guardian: Guardian) -> None:
        for _ in range(3):
            for part in x[:20][torch.randperm(20)].split(5):
                train(model, optimizer, part, part[:, 0])
            model.eval()
            with torch.no_grad():
                model(x[20:])
            model.train()

    return Loop(model, optimizer, run)


@healthy(SPLIT)
def splits_apart() -> Loop:
    return split(slice(0, 70), slice(70, 100))


@healthy(SPLIT, "GG638")
def the_accuracy_on_the_training_data() -> Loop:
    return split(slice(0, 70), slice(0, 70))


@healthy(SPLIT, "GG638")
def the_accuracy_on_all_data() -> Loop:
    return split(slice(0, 70), slice(0, 100))


@healthy(SPLIT)
def the_current_batch_is_evaluated() -> Loop:
    model, optimizer = small()

    def run(guardian: Guardian) -> None:
        for _ in range(6):
            x, y = samples(ROWS)
            train(model, optimizer, x, y)
            with guardian.evaluating():
                model(x)

    return Loop(model, optimizer, run)


@healthy(SPLIT)
def states_are_acted_on_and_then_trained_on() -> Loop:
    """As PPO: the policy acts in eval mode, without gradients, on the states of the coming epochs."""
    model, optimizer = small()

    def run(guardian: Guardian) -> None:
        for _ in range(4):
            x, _ = samples(32)
            model.eval()
            with torch.no_grad():
                action = torch.cat([model(state) for state in x.split(4)]).argmax(1)
            model.train()
            for _ in range(2):
                for places in torch.randperm(32).split(8):
                    train(model, optimizer, x[places], action[places])

    return Loop(model, optimizer, run)


@healthy(SPLIT)
def states_of_a_small_world_recur() -> Loop:
    model, optimizer = small(16)

    def run(guardian: Guardian) -> None:
        for _ in range(6):
            states: Any = F.one_hot(torch.randint(16, (ROWS,)), 16).float()
            train(model, optimizer, states, torch.randint(CLASSES, (ROWS,)))
            with guardian.evaluating():
                model(F.one_hot(torch.randint(16, (ROWS,)), 16).float())

    return Loop(model, optimizer, run)


@healthy(SPLIT)
def the_training_loader_is_evaluated() -> Loop:
    data, held_out = loader(shuffle=True), loader(64)
    model, optimizer = small()

    def run(guardian: Guardian) -> None:
        for _ in range(2):
            for x, y in data:
                train(model, optimizer, x, y)
            with guardian.evaluating():
                for each in (data, held_out):
                    for x, _ in each:
                        model(x)

    return Loop(model, optimizer, run)


@healthy(SPLIT)
def both_splits_are_estimated() -> Loop:
    model, optimizer = small()
    x, y = samples(100)

    def run(guardian: Guardian) -> None:
        for _ in range(12):
            places = torch.randint(80, (ROWS,))
            train(model, optimizer, x[places], y[places])
        with guardian.evaluating():
            for part in (slice(0, 80), slice(80, 100)):
                for _ in range(4):
                    model(x[part][torch.randint(len(x[part]), (8,))])

    return Loop(model, optimizer, run)


@healthy(SPLIT)
def rows_made_up_by_a_rule() -> Loop:
    """Counting up from any of 64 starts: of so few different rows, both splits have the same."""
    model = nn.Sequential(nn.Embedding(64, 8), nn.Flatten(), nn.Linear(8 * ROWS, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def run(guardian: Guardian) -> None:
        for step in range(24):
            ids = (torch.randint(64, (4, 1)) + torch.randint(1, 4, (4, 1)) * torch.arange(ROWS + 1)) % 64
            train(model, optimizer, ids[:, :-1], ids[:, -1])
            if step % 6 == 5:
                with guardian.evaluating():
                    starts = torch.randint(64, (16, 1))
                    model((starts + torch.randint(1, 4, (16, 1)) * torch.arange(ROWS)) % 64)

    return Loop(model, optimizer, run)
