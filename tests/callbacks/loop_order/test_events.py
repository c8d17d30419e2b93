"""The stream of events: in order, bounded, and honest about what it no longer has."""

from __future__ import annotations

import torch
from torch import nn

from gpt_guard.callbacks.loop_order.events import Event, Events, Kind, cleared, gradient_state, versions


def test_places_count_on_while_old_events_go() -> None:
    events = Events()
    for _ in range(600):
        events.note(Event(Kind.FORWARD))
    place = events.count
    events.note(Event(Kind.BACKWARD, frozenset({0})))
    events.note(Event(Kind.STEP, frozenset({0})))
    assert [event.kind for event in events.since(place) or []] == [Kind.BACKWARD, Kind.STEP]
    assert events.since(events.count) == []
    assert events.since(0) is None
    assert len(events.since(place - 400) or []) == 402


def test_the_state_of_gradients_tells_what_was_done_to_them() -> None:
    layer = nn.Linear(2, 1)
    parameters = list(layer.parameters())
    empty = gradient_state(parameters)
    layer(torch.ones(1, 2)).sum().backward()
    first = gradient_state(parameters)
    layer(torch.ones(1, 2)).sum().backward()
    second = gradient_state(parameters)
    assert len({empty, first, second}) == 3
    assert gradient_state(parameters) == second
    layer.zero_grad()
    assert cleared(second, gradient_state(parameters))
    assert not cleared(empty, second)
    assert not cleared(empty, empty)


def test_a_change_of_weights_in_place_is_counted() -> None:
    layer = nn.Linear(2, 1)
    parameters = list(layer.parameters())
    before = versions(parameters)
    with torch.no_grad():
        layer.weight.add_(1.0)
    assert versions(parameters) > before
