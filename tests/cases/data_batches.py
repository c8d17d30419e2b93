"""The same batch each time, one side of it, equal rows; and loops that only look like it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard.guardian import Guardian

from .data_watch import FEATURES, ROWS, Loop, bug, healthy, loader, over, samples, small, train

Batches = Iterator[tuple[Tensor, Tensor]]
SAME, SIDE, EQUAL = "same batch", "one side", "equal rows"


@bug(SAME, "GG605", "next(iter(loader))", "next(iter(data))")
def fresh_iterators() -> Loop:
    data = loader(shuffle=False)

    def batches() -> Batches:
        for _ in range(6):
            x, y = next(iter(data))
            yield x, y

    return over(batches)


@bug(SAME, "GG605", "The seed is set within", "F.cross_entropy(model(x), y)")
def a_seed_in_the_function_that_draws() -> Loop:
    x, y = samples()

    def batches() -> Batches:
        for _ in range(25):
            places = torch.randint(len(x), (ROWS,), generator=torch.Generator().manual_seed(1337))
            yield x[places], y[places]

    return over(batches)


@bug(SAME, "GG605", "The starts are drawn once", "F.cross_entropy(model(x), y)")
def drawn_before_the_loop() -> Loop:
    data = loader(shuffle=True)

    def batches() -> Batches:
        x, y = next(iter(data))
        for _ in range(6):
            yield x, y

    return over(batches)


@healthy(SAME)
def epochs_over_a_shuffled_loader() -> Loop:
    data = loader(shuffle=True)
    return over(lambda: (batch for _ in range(3) for batch in data))


@healthy(SAME)
def one_batch_by_heart_on_purpose() -> Loop:
    x, y = samples(ROWS)
    return over(lambda: ((x.clone(), y) for _ in range(30)), overfit=True)


@healthy(SAME, "GG605")
def the_whole_data_in_each_step() -> Loop:
    x, y = samples()
    return over(lambda: ((x, y) for _ in range(30)))


@healthy(SAME)
def the_whole_data_in_a_few_steps() -> Loop:
    x, y = samples()
    return over(lambda: ((x[:150], y[:150]) for _ in range(6)))


@healthy(SAME, "GG605")
def a_loader_with_one_batch() -> Loop:
    data = loader(ROWS)
    return over(lambda: (batch for _ in range(30) for batch in data))


@healthy(SAME)
def some_epochs_on_each_rollout() -> Loop:
    """As PPO: ten steps on the same rows, copied for each, then new ones."""

    def batches() -> Batches:
        for _ in range(3):
            x, y = samples(ROWS)
            for _ in range(10):
                yield x.clone(), y.clone()

    return over(batches)


@healthy(SAME)
def two_forwards_of_a_batch_in_each_step() -> Loop:
    """As sharpness-aware minimisation does."""
    model, optimizer = small()

    def run(guardian: Guardian) -> None:
        for _ in range(8):
            x, y = samples(ROWS)
            for _ in range(2):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return Loop(model, optimizer, run)


@healthy(SAME)
def a_buffer_that_is_filled_anew() -> Loop:
    """The same memory each time, as a CUDA graph needs it."""
    held, labels = torch.empty(ROWS, FEATURES), torch.empty(ROWS, dtype=torch.long)

    def batches() -> Batches:
        for _ in range(8):
            x, y = samples(ROWS)
            yield held.copy_(x), labels.copy_(y)

    return over(batches)


@bug(SIDE, "GG609", "The targets were made once")
def labels_taken_before_the_loop() -> Loop:
    data = loader(shuffle=True, drop_last=True)
    y = samples(ROWS)[1]
    return over(lambda: ((x, y) for x, _ in data))


@bug(SIDE, "GG609", "The targets were made once")
def values_to_fit_that_never_change() -> Loop:
    model, optimizer = small(outputs=1)
    wanted = torch.randn(ROWS, 1)

    def run(guardian: Guardian) -> None:
        for _ in range(6):
            optimizer.zero_grad()
            F.mse_loss(model(torch.randn(ROWS, FEATURES)), wanted.clone()).backward()
            optimizer.step()

    return Loop(model, optimizer, run)


@bug(SIDE, "GG609", "The inputs were made once")
def inputs_under_another_name() -> Loop:
    inputs = samples(ROWS)[0]
    return over(lambda: ((inputs, y) for _, y in (samples(ROWS) for _ in range(6))))


@healthy(SIDE)
def labels_of_contrastive_pairs() -> Loop:
    model, optimizer = small(outputs=8)

    def run(guardian: Guardian) -> None:
        for _ in range(8):
            x = torch.randn(ROWS, FEATURES)
            both = F.normalize(model(torch.cat([x, x + 0.1 * torch.randn_like(x)])), dim=1)
            optimizer.zero_grad()
            F.cross_entropy(both[:ROWS] @ both[ROWS:].T / 0.1, torch.arange(ROWS)).backward()
            optimizer.step()

    return Loop(model, optimizer, run)


@healthy(SIDE)
def real_and_generated() -> Loop:
    model, optimizer = small(outputs=1)
    labels = torch.cat([torch.ones(ROWS, 1), torch.zeros(ROWS, 1)])

    def run(guardian: Guardian) -> None:
        for _ in range(8):
            both = torch.cat([samples(ROWS)[0], torch.rand(ROWS, FEATURES)])
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(both), labels).backward()
            optimizer.step()

    return Loop(model, optimizer, run)


@healthy(SIDE)
def all_of_the_data_with_noise() -> Loop:
    x, y = samples(64)
    return over(lambda: ((x + 0.1 * torch.randn_like(x), y) for _ in range(8)))


@bug(EQUAL, "GG605", "One start is drawn")
def one_start_for_all_rows() -> Loop:
    x, y = samples()

    def batches() -> Batches:
        for _ in range(6):
            place = torch.randint(len(x), (1,)).repeat(ROWS)
            yield x[place], y[place]

    return over(batches)


@bug(EQUAL, "GG605", "One start is drawn")
def one_sample_expanded() -> Loop:
    x, y = samples()

    def batches() -> Batches:
        for place in range(6):
            yield x[place].expand(ROWS, FEATURES), y[place].expand(ROWS)

    return over(batches)


@healthy(EQUAL)
def each_row_twice() -> Loop:
    """As R-Drop does."""

    def batches() -> Batches:
        for _ in range(6):
            x, y = samples(ROWS)
            yield torch.cat([x, x]), torch.cat([y, y])

    return over(batches)


@healthy(EQUAL)
def drawn_with_replacement() -> Loop:
    """A rare class is drawn again and again."""
    x, y = samples(24)
    return over(lambda: ((x[places], y[places]) for places in (torch.randint(24, (ROWS,)) for _ in range(8))))


@healthy(EQUAL)
def windows_of_a_text_that_repeats_itself() -> Loop:
    text = torch.randint(20, (30,)).repeat(20)
    model = nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(8 * ROWS, 20))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def run(guardian: Guardian) -> None:
        for step in range(25):
            windows = text[torch.randint(len(text) - ROWS - 1, (8, 1)) + torch.arange(ROWS + 1)]
            train(model, optimizer, windows[:, :-1], windows[:, -1])
            if step % 8 == 7:
                with guardian.evaluating():
                    model(text[torch.randint(len(text) - ROWS, (8, 1)) + torch.arange(ROWS)])

    return Loop(model, optimizer, run)
