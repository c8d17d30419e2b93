"""Episodes of two steps, what a return or advantage function must make of them, and what usual mistakes make of them.

Definitions: discounted returns and TD targets as in Sutton and Barto, Reinforcement Learning (2nd ed., 2018), sections
3.3 and 6.1; generalised advantages as in Schulman et al. (2016), equation 16. At a true terminal the value of what
follows is 0; where only a time limit ended the episode it is the value of the last observation (Pardo et al., Time
Limits in Reinforcement Learning, 2018).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["returns", "advantages", "lambda returns", "targets", "errors", "baselined returns"]
KINDS: tuple[Kind, ...] = ("returns", "advantages", "lambda returns", "targets", "errors", "baselined returns")


@dataclass(frozen=True)
class Episode:
    """Steps in order. `next_values[t]` is the value of what was seen after step t, also where the episode ended there.

    `boundary`: rows of two episodes stand one after the other.
    """

    name: str
    rewards: tuple[float, ...]
    values: tuple[float, ...]
    next_values: tuple[float, ...]
    terminated: tuple[bool, ...]
    truncated: tuple[bool, ...]

    @property
    def ended(self) -> tuple[bool, ...]:
        """Whether the episode ended at each step, for whichever reason."""
        return tuple(one or other for one, other in zip(self.terminated, self.truncated, strict=True))


# Without an end, and with nothing after it: tells what a function computes, whatever it thinks of ends.
# Three steps: two, less the one that a slice takes away, would be broadcast without an error.
PLAIN = Episode("three steps, nothing after them", (1, 2, 4), (8, 16, 32), (16, 32, 0), (False,) * 3, (False,) * 3)
TERMINAL = Episode("two steps, then a true terminal", (1, 2), (8, 16), (16, 64), (False, True), (False, False))
CUT = Episode("two steps of an episode that goes on", (1, 2), (8, 16), (16, 64), (False, False), (False, False))
LIMIT = Episode("two steps, then a time limit", (1, 2), (8, 16), (16, 64), (False, False), (False, True))
TWO = Episode(
    "two episodes of two steps in one batch",
    (1, 2, 4, 3),
    (8, 16, 32, 24),
    (16, 32, 24, 64),
    (False, True, False, True),
    (False,) * 4,
)
TWO_LIMITS = Episode(
    "an episode cut by a time limit, and another one behind it",
    (1, 2, 4, 3),
    (8, 16, 32, 24),
    (16, 48, 24, 64),
    (False, False, False, True),
    (False, True, False, False),
)

MISTAKES: dict[str, tuple[str, str]] = {
    "bootstraps": ("bootstrap_terminal", "the value of the state after a true terminal is used"),
    "ignores": ("leak", "the end of the episode is ignored: what comes behind it is counted in"),
    "leaks": ("leak", "what the next episode brings leaks back across its beginning"),
    "stops": ("truncation", "the time limit is treated as a true terminal: the value of the last state is left out"),
    "runs_on": ("truncation", "the recursion runs on across the time limit, into the next episode"),
    "no_bootstrap": ("truncation", "where the rollout stops in the middle, the value of what follows is left out"),
    "late": ("index", "the mask is taken from the next step, dones[t + 1], where dones[t] is meant"),
    "late_open": ("index", "the mask is taken from the next step, dones[t + 1], where dones[t] is meant"),
    "early": ("index", "the mask is taken from the step before, dones[t - 1], where dones[t] is meant"),
}
"""Ways to be wrong: the key of the cause in the catalogue, and the words."""


def expected(kind: Kind, episode: Episode, gamma: float, lam: float, *, mistake: str = "") -> list[float]:
    """What a function of this kind gives for an episode, right or with one mistake."""
    steps = len(episode.rewards)
    masks, cuts = _masks(episode, mistake)
    nexts = [
        0.0 if mistake == "no_bootstrap" and step == steps - 1 else episode.next_values[step] for step in range(steps)
    ]
    targets = [episode.rewards[step] + gamma * nexts[step] * masks[step] for step in range(steps)]
    if kind == "targets":
        return targets
    errors = [target - value for target, value in zip(targets, episode.values, strict=True)]
    if kind == "errors":
        return errors
    if kind in ("advantages", "lambda returns"):
        summed = _recursion(errors, [gamma * lam * cut for cut in cuts], 0.0)
        added = episode.values if kind == "lambda returns" else (0.0,) * steps
        return [each + more for each, more in zip(summed, added, strict=True)]
    ends = [
        episode.rewards[step] + (gamma * nexts[step] * masks[step] if not cuts[step] else 0) for step in range(steps)
    ]
    if cuts[-1]:
        ends[-1] += gamma * nexts[-1] * masks[-1]
    found = _recursion(ends, [gamma * cut for cut in cuts], 0.0)
    if kind == "returns":
        return found
    return [each - value for each, value in zip(found, episode.values, strict=True)]


def _recursion(terms: list[float], factors: list[float], after: float) -> list[float]:
    found: list[float] = []
    for term, factor in zip(reversed(terms), reversed(factors), strict=True):
        after = term + factor * after
        found.append(after)
    return found[::-1]


def _masks(episode: Episode, mistake: str) -> tuple[list[int], list[int]]:
    """For each step whether the value after it counts, and whether the step behind it belongs to the same episode."""
    terminated, ended = list(episode.terminated), list(episode.ended)
    if mistake == "late":
        terminated, ended = [*terminated[1:], terminated[-1]], [*ended[1:], ended[-1]]
    elif mistake == "late_open":
        terminated, ended = [*terminated[1:], False], [*ended[1:], False]
    elif mistake == "early":
        terminated, ended = [False, *terminated[:-1]], [False, *ended[:-1]]
    elif mistake == "stops":
        terminated = ended
    masks, cuts = [int(not each) for each in terminated], [int(not each) for each in ended]
    if mistake in ("bootstraps", "ignores"):
        masks = [1] * len(masks)
    if mistake in ("leaks", "ignores"):
        cuts = [1] * len(cuts)
    elif mistake == "runs_on":
        cuts = [int(not each) for each in terminated]
    return masks, cuts


def without_values(episode: Episode) -> Episode:
    """The same for a function that takes no values at all: it cannot bootstrap, and counts 0."""
    zeros = (0.0,) * len(episode.rewards)
    return replace(episode, values=zeros, next_values=zeros)
