"""Return and advantage functions as people write them: right ones, and each with one mistake, as data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor


class Written(NamedTuple):
    """A function, what it computes, the key of its mistake (None: it is right), and arguments of check_returns."""

    function: Callable[..., Any]
    computes: str
    mistake: str | None = None
    options: dict[str, Any] = {}  # noqa: RUF012  # of a named tuple; never written to


WRITTEN: list[Written] = []
F = TypeVar("F", bound=Callable[..., Any])


def written(computes: str, mistake: str | None = None, **options: Any) -> Callable[[F], F]:
    """Note a function."""

    def note(function: F) -> F:
        WRITTEN.append(Written(function, computes, mistake, options))
        return function

    return note


# Discounted returns.


@written("returns")
def reward_to_go(rewards: Any, dones: Any, gamma: float = 0.99) -> list[Any]:
    found: list[Any] = []
    after = 0.0
    for reward, done in zip(reversed(rewards), reversed(dones), strict=True):
        after = reward + gamma * after * (1 - done)
        found.insert(0, after)
    return found


@written("returns", "leak")
def returns_over_the_border(rewards: Any, dones: Any, gamma: float = 0.99) -> list[Any]:
    found: list[Any] = []
    after = 0.0
    for reward in reversed(rewards):
        after = reward + gamma * after
        found.insert(0, after)
    return found


@written("returns", "index")
def returns_cut_one_step_late(rewards: Any, dones: Any, gamma: float) -> list[Any]:
    found: list[Any] = []
    after, ended = 0.0, 0.0
    for reward, done in zip(reversed(rewards), reversed(dones), strict=True):
        after = reward + gamma * after * (1 - ended)
        ended = done
        found.insert(0, after)
    return found


@written("returns", "discount")
def without_discount(rewards: Any, dones: Any, gamma: float = 0.99) -> list[Any]:
    found: list[Any] = []
    after = 0.0
    for reward, done in zip(reversed(rewards), reversed(dones), strict=True):
        after = reward + after * (1 - done)
        found.insert(0, after)
    return found


@written("returns", "order")
def from_the_end(rewards: Any, dones: Any, gamma: float = 0.99) -> list[Any]:
    return reward_to_go(rewards, dones, gamma)[::-1]


@written("returns", gamma=0.9, names={"r_t": "rewards", "over": "dones"})
def with_names_of_its_own(r_t: Tensor, over: Tensor) -> Tensor:
    return torch.stack(reward_to_go(r_t, over, 0.9))


@written("returns")
def up_to_a_last_value(rewards: Tensor, dones: Tensor, last_value: Tensor, gamma: float) -> Tensor:
    found, after = torch.zeros_like(rewards), last_value
    for step in range(len(rewards) - 1, -1, -1):
        found[step] = after = rewards[step] + gamma * after * (1 - dones[step])
    return found


@written("returns", "bootstrap_terminal")
def a_last_value_in_any_case(rewards: Tensor, dones: Tensor, last_value: Tensor, gamma: float) -> Tensor:
    found, after = torch.zeros_like(rewards), last_value
    for step in range(len(rewards) - 1, -1, -1):
        cut = dones[step] if step < len(rewards) - 1 else 0.0
        found[step] = after = rewards[step] + gamma * after * (1 - cut)
    return found


# One step ahead.


@written("targets")
def td_target(reward: Tensor, next_value: Tensor, terminated: Tensor, gamma: float) -> Tensor:
    return reward + gamma * next_value * (1 - terminated)


@written("targets", "bootstrap_terminal")
def td_target_without_mask(reward: Tensor, next_value: Tensor, terminated: Tensor, gamma: float) -> Tensor:
    return reward + gamma * next_value


@written("targets", "truncation")
def td_target_of_done(
    rewards: Tensor, next_values: Tensor, terminated: Tensor, truncated: Tensor, gamma: float
) -> Tensor:
    done = torch.maximum(terminated, truncated)
    return rewards + gamma * next_values * (1 - done)


# Generalised advantages.


@written("advantages")
def gae(
    rewards: Any, values: Any, next_values: Any, terminated: Any, truncated: Any, gamma: float, lam: float
) -> list[Any]:
    found: list[Any] = []
    after = 0.0
    for step in range(len(rewards) - 1, -1, -1):
        error = rewards[step] + gamma * next_values[step] * (1 - terminated[step]) - values[step]
        after = error + gamma * lam * (1 - max(terminated[step], truncated[step])) * after
        found.append(after)
    return found[::-1]


@written("advantages", "truncation")
def gae_across_time_limits(
    rewards: Any, values: Any, next_values: Any, terminated: Any, truncated: Any, gamma: float, lam: float
) -> list[Any]:
    return gae(rewards, values, next_values, terminated, terminated, gamma, lam)


@written("advantages", "truncation")
def gae_that_stops_at_time_limits(
    rewards: Any, values: Any, next_values: Any, terminated: Any, truncated: Any, gamma: float, lam: float
) -> list[Any]:
    done = [max(each) for each in zip(terminated, truncated, strict=True)]
    return gae(rewards, values, next_values, done, done, gamma, lam)


@written("advantages")
def gae_of_one_value_more(rewards: Tensor, values: Tensor, dones: Tensor, gamma: float, lam: float) -> Tensor:
    """Values `[T + 1]`."""
    errors = rewards + gamma * values[1:] * (1 - dones) - values[:-1]
    found, after = torch.zeros_like(rewards), torch.zeros(())
    for step in range(len(rewards) - 1, -1, -1):
        found[step] = after = errors[step] + gamma * lam * (1 - dones[step]) * after
    return found


@written("advantages", "leak")
def gae_that_leaks(rewards: Tensor, values: Tensor, dones: Tensor, gamma: float, lam: float) -> Tensor:
    errors = rewards + gamma * values[1:] * (1 - dones) - values[:-1]
    found, after = torch.zeros_like(rewards), torch.zeros(())
    for step in range(len(rewards) - 1, -1, -1):
        found[step] = after = errors[step] + gamma * lam * after
    return found


@written("advantages", "index")
def gae_with_the_next_mask(
    rewards: Tensor, values: Tensor, dones: Tensor, last_value: Tensor, gamma: float, lam: float
) -> Tensor:
    """The convention in which dones[t] marks the first step of an episode, for flags of the other one."""
    return first_step_flags(rewards, values, dones, last_value, torch.zeros(()), gamma, lam)[0]


@written("advantages", "discount")
def gae_with_gamma_and_lambda_exchanged(
    rewards: Tensor, values: Tensor, dones: Tensor, gamma: float, lam: float
) -> Tensor:
    return gae_of_one_value_more(rewards, values, dones, lam, gamma)


@written("advantages, lambda returns")
def first_step_flags(
    rewards: Tensor,
    values: Tensor,
    dones: Tensor,
    next_value: Tensor,
    next_done: Tensor,
    gamma: float = 0.99,
    gae_lambda: float = 0.95,
) -> tuple[Tensor, Tensor]:
    """Of environments side by side, `[T, B]` too."""
    found, after = torch.zeros_like(rewards), torch.zeros(())
    for step in reversed(range(len(rewards))):
        last = step == len(rewards) - 1
        goes_on = 1.0 - (next_done if last else dones[step + 1])
        following = next_value if last else values[step + 1]
        error = rewards[step] + gamma * following * goes_on - values[step]
        found[step] = after = error + gamma * gae_lambda * goes_on * after
    return found, found + values


@written("advantages, lambda returns")
def of_generated_tokens(
    rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> dict[str, Tensor]:
    """`[B, T]`, one episode in each row, complete."""
    found, after = [], torch.zeros(())
    values, rewards = values * response_mask, rewards * response_mask
    for step in reversed(range(rewards.shape[1])):
        following = values[:, step + 1] if step < rewards.shape[1] - 1 else 0.0
        after = rewards[:, step] + gamma * following - values[:, step] + gamma * lam * after
        found.append(after)
    advantages = torch.stack(found[::-1], dim=1)
    return {"advantages": advantages, "returns": advantages + values}
