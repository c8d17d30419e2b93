"""Agents that learn from rewards train under every default guard without a word."""

from __future__ import annotations

import copy
import random
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F

from .conftest import Guarded
from .parts import mlp
from .programs import STEPS


class Walk:
    """A line of seven places: left or right, a reward at the right end, at most twelve moves."""

    def reset(self) -> Tensor:
        self.place, self.moves = 3, 0
        return self._seen()

    def step(self, action: int) -> tuple[Tensor, float, bool]:
        self.place, self.moves = max(0, self.place + (1 if action else -1)), self.moves + 1
        done = self.place == 6 or self.moves == 12
        return self._seen(), float(self.place == 6), done

    def _seen(self) -> Tensor:
        return F.one_hot(torch.tensor(self.place), 7).float()


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.affine, self.action_head, self.value_head = nn.Linear(7, 32), nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.relu(self.affine(state))
        return F.softmax(self.action_head(hidden), dim=-1), self.value_head(hidden)


def returns_of(rewards: list[float], discount: float = 0.97) -> Tensor:
    found: list[float] = []
    total = 0.0
    for reward in reversed(rewards):
        total = reward + discount * total
        found.insert(0, total)
    return torch.tensor(found)


def test_an_actor_with_a_critic_that_acts_one_move_at_a_time(guarded: Guarded) -> None:
    """One update to an episode; the probabilities and values are those that were made on the way."""
    walk, model = Walk(), ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    lengths: list[int] = []
    with guarded(model, optimizer):
        for _ in range(STEPS):
            state, done = walk.reset(), False
            said: list[tuple[Tensor, Tensor]] = []
            rewards: list[float] = []
            while not done:
                chances, value = model(state)
                choice = Categorical(chances)
                action = choice.sample()
                said.append((choice.log_prob(action), value))
                state, reward, done = walk.step(int(action))
                rewards.append(reward - 0.02)
            returns = returns_of(rewards)
            losses = [
                -log_prob * (wanted - value.item()) + F.smooth_l1_loss(value, wanted[None])
                for (log_prob, value), wanted in zip(said, returns, strict=True)
            ]
            optimizer.zero_grad()
            torch.stack(losses).sum().backward()
            optimizer.step()
            lengths.append(len(rewards))
    assert sum(lengths[-30:]) < sum(lengths[:30])


def test_reinforce_with_rewards_that_come_seldom(guarded: Guarded) -> None:
    """Most first episodes bring nothing: their loss is exactly 0."""
    walk, policy = Walk(), mlp(7, 32, 2)
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-2)
    won: list[float] = []
    with guarded(policy, optimizer):
        for _ in range(STEPS):
            state, done = walk.reset(), False
            log_probs: list[Tensor] = []
            rewards: list[float] = []
            while not done:
                choice = Categorical(logits=policy(state))
                action = choice.sample()
                log_probs.append(choice.log_prob(action))
                state, reward, done = walk.step(int(action))
                rewards.append(reward)
            loss = -(torch.stack(log_probs) * returns_of(rewards)).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            won.append(sum(rewards))
    assert sum(won[-30:]) > sum(won[:30])


class Gaussian(nn.Module):
    """A policy of one number with a spread of its own, and the value of a state."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = mlp(3, 32, 1, activation=nn.Tanh), mlp(3, 32, 1, activation=nn.Tanh)
        self.log_std = nn.Parameter(torch.full((1,), -0.5))

    def forward(self, state: Tensor) -> tuple[Normal, Tensor]:
        return Normal(self.actor(state), self.log_std.exp()), self.critic(state).squeeze(-1)


def test_proximal_policy_optimisation(guarded: Guarded) -> None:
    """Several epochs of small batches on each batch that was played."""
    model = Gaussian()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-5)
    played: list[float] = []
    updates = STEPS // 8
    with guarded(model, optimizer):
        for update in range(updates):
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 * (1 - update / updates)
            states = torch.randn(128, 3)
            with torch.no_grad():
                policy, values = model(states)
                actions = policy.sample()
                before = policy.log_prob(actions).sum(-1)
            rewards = -(actions.squeeze(-1) - states.sum(1)).abs()
            advantages = rewards - values
            for _ in range(2):
                for part in torch.randperm(128).split(32):
                    policy, value = model(states[part])
                    ratio = (policy.log_prob(actions[part]).sum(-1) - before[part]).exp()
                    gain = (advantages[part] - advantages[part].mean()) / (advantages[part].std() + 1e-8)
                    clipped = torch.clamp(ratio, 0.8, 1.2)
                    actor_loss = -torch.min(ratio * gain, clipped * gain).mean()
                    critic_loss = F.mse_loss(value, rewards[part])
                    loss = actor_loss + 0.5 * critic_loss - 0.01 * policy.entropy().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
            played.append(float(rewards.mean()))
    assert sum(played[-5:]) > sum(played[:5])


def test_values_from_a_memory_and_a_target_network(guarded: Guarded) -> None:
    """Acts with some chance at random, learns from old moves; the target follows slowly."""
    walk, policy = Walk(), mlp(7, 32, 2)
    target = copy.deepcopy(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, amsgrad=True)
    memory: deque[Any] = deque(maxlen=500)
    chance = random.Random(0)
    state, steps = walk.reset(), 0
    with guarded(policy, optimizer):
        while steps < STEPS:
            if chance.random() < max(0.1, 1 - steps / 100):
                action = chance.randrange(2)
            else:
                with torch.no_grad():
                    action = int(policy(state[None]).max(1).indices)
            following, reward, done = walk.step(action)
            memory.append((state, action, reward, following, done))
            state = walk.reset() if done else following
            if len(memory) < 32:
                continue
            columns = list(zip(*chance.sample(list(memory), 32), strict=True))
            states, followings = torch.stack(columns[0]), torch.stack(columns[3])
            actions, rewards = torch.tensor(columns[1]), torch.tensor(columns[2])
            going_on = 1 - torch.tensor(columns[4]).float()
            values = policy(states).gather(1, actions[:, None]).squeeze(1)
            with torch.no_grad():
                wanted = rewards + 0.9 * going_on * target(followings).max(1).values
            optimizer.zero_grad()
            nn.SmoothL1Loss()(values, wanted).backward()
            nn.utils.clip_grad_value_(policy.parameters(), 100)
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(target.parameters(), policy.parameters(), strict=True):
                    slow.lerp_(fast, 0.05)
            steps += 1
    with torch.no_grad():
        assert bool((policy(torch.eye(7)[3:6]).argmax(1) == 1).all())


class SoftPolicy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(2, 32, 2)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.net(state).chunk(2, -1)
        policy = Normal(mean, log_std.clamp(-5, 2).exp())
        raw = policy.rsample()
        action = raw.tanh()
        return action, (policy.log_prob(raw) - torch.log(1 - action.pow(2) + 1e-6)).squeeze(-1)


def test_a_soft_actor_with_two_critics(guarded: Guarded) -> None:
    """Three optimizers; the actor's loss goes through the critics, whose gradients are thrown away."""
    actor, critics = SoftPolicy(), nn.ModuleList(mlp(3, 32, 1) for _ in range(2))
    targets = copy.deepcopy(critics).requires_grad_(False)
    log_alpha = torch.zeros(1, requires_grad=True)
    whole = nn.ModuleDict({"actor": actor, "critics": critics})
    optimizers = [torch.optim.Adam(actor.parameters(), lr=3e-3), torch.optim.Adam(critics.parameters(), lr=3e-3)]
    alpha_optimizer = torch.optim.Adam([log_alpha], lr=3e-3)
    rewards: list[float] = []
    with guarded(whole, optimizers):
        for _ in range(STEPS):
            states = torch.randn(64, 2)
            with torch.no_grad():
                actions, _ = actor(states)
                reward = 1 - (actions.squeeze(-1) - states.mean(1).tanh()).pow(2)
                following = states + 0.1 * torch.randn_like(states)
                ahead, log_prob = actor(following)
                both = torch.stack([each(torch.cat([following, ahead], 1)).squeeze(-1) for each in targets])
                wanted = reward + 0.5 * (both.min(0).values - log_alpha.exp() * log_prob)
            given = torch.cat([states, actions], 1)
            critic_loss = torch.stack([F.mse_loss(each(given).squeeze(-1), wanted) for each in critics]).sum()
            optimizers[1].zero_grad()
            critic_loss.backward()
            optimizers[1].step()
            fresh, log_prob = actor(states)
            judged = torch.stack([each(torch.cat([states, fresh], 1)).squeeze(-1) for each in critics]).min(0).values
            optimizers[0].zero_grad()
            (log_alpha.exp().detach() * log_prob - judged).mean().backward()
            optimizers[0].step()
            alpha_optimizer.zero_grad()
            (-(log_alpha * (log_prob.detach() - 1)).mean()).backward()
            alpha_optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(targets.parameters(), critics.parameters(), strict=True):
                    slow.lerp_(fast, 0.05)
            rewards.append(float(reward.mean()))
    assert sum(rewards[-20:]) > sum(rewards[:20])
