"""All cases of the gallery."""

from __future__ import annotations

from . import agents, attention, distances, harder, layers, losses, measures, norms, state

CASES = (
    *attention.CASES,
    *norms.CASES,
    *layers.CASES,
    *losses.CASES,
    *measures.CASES,
    *distances.CASES,
    *agents.CASES,
    *harder.CASES,
    *state.CASES,
)
