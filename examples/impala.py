"""IMPALA on CartPole or Atari: explorers never wait for the learner; V-trace corrects for their older weights.

    python examples/impala.py [--explorers 2] [--seed 1] [--checkpoint impala.pt [--resume]] [--plot impala.png]

Needs ``pip install 'torchext[rl]'`` and tqdm. Explorers write rollouts into rows of the learner's next batch, and take
new weights whenever there are some; rollouts whose weights are more than ``--max-staleness`` versions old are dropped.
It stops when the last 100 episodes returned 475 on average, and prints, on two busy cores and with other numbers each
time (the greedy policy of the evaluation may do worse than the one that explored):

    IMPALA on CartPole-v1: return 476 over the last 100 episodes after 1276928 steps, 51 s (25097 steps/s)
    evaluation: 20 episodes, mean return 500

On Atari (its games come with ale-py, in the same extra), for an evening rather than a minute:

    python examples/impala.py --env ALE/Breakout-v5 --steps 10000000 --target 300 --rollout 20 --lr 3e-4

With explorers on another machine, both with the same TORCHEXT_CHANNELS_TOKEN in the environment:

    python examples/impala.py --listen 0.0.0.0:7000 --remote-explorers 2
    python examples/impala.py --learner-address learner:7000 --explorers 2 --first-number 2  # there

Source: "IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner Architectures" (arXiv 1802.01561).
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import time
from collections import deque
from contextlib import AbstractContextManager
from pathlib import Path

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from torchext.channels import Broker, Channel, ChannelClosed, ChannelLoader, WeightBroadcast, join

# Shapes: T steps of a rollout, N environments of an explorer, E explorers (rows of a batch).


def make_env(env_id: str) -> gymnasium.Env[np.ndarray, np.int64]:
    """An environment; those of Atari give the last four frames, grey and at half size: (4, 80, 80) uint8."""
    if not env_id.startswith("ALE/"):
        return gymnasium.make(env_id)
    import ale_py

    gymnasium.register_envs(ale_py)
    env = gymnasium.make(env_id, obs_type="grayscale", repeat_action_probability=0.0)  # each action for four frames
    frames = gymnasium.spaces.Box(0, 255, (80, 80), np.uint8)
    env = gymnasium.wrappers.TransformObservation(env, lambda frame: frame[34:194:2, ::2], frames)
    return gymnasium.wrappers.FrameStackObservation(env, 4)


class Policy(nn.Module):
    """Action logits and value: two small networks for vectors, one with two heads for images."""

    def __init__(self, env_id: str) -> None:
        super().__init__()
        with contextlib.closing(make_env(env_id)) as env:
            self.shape, actions = env.observation_space.shape, int(env.action_space.n)
        self.is_image = len(self.shape) == 3
        if self.is_image:
            self.body: nn.Module = nn.Sequential(
                *(nn.Conv2d(self.shape[0], 16, 8, 4), nn.ReLU(), nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.Flatten()),
                *(nn.Linear(32 * 8 * 8, 256), nn.ReLU()),
            )
            self.actor, self.critic = nn.Linear(256, actions), nn.Linear(256, 1)
        else:
            self.body = nn.Identity()
            self.actor, self.critic = (
                nn.Sequential(
                    *(nn.Linear(self.shape[0], 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))
                )
                for outputs in (actions, 1)
            )

    def features(self, observation: Tensor) -> Tensor:
        if not self.is_image:
            return observation.float()
        lead = observation.shape[:-3]
        return self.body(observation.reshape(-1, *self.shape) / 255).reshape(*lead, -1)

    def logits(self, observation: Tensor) -> Tensor:
        return self.actor(self.features(observation))

    def value(self, observation: Tensor) -> Tensor:
        return self.critic(self.features(observation)).squeeze(-1)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """(..., *shape) to logits (..., actions) and values (...)."""
        features = self.features(observation)
        return self.actor(features), self.critic(features).squeeze(-1)


def sample(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Actions and their log-probabilities."""
    log_probs = logits.log_softmax(-1)
    action = (log_probs - torch.empty_like(log_probs).exponential_().log_()).argmax(-1)  # the Gumbel trick
    return action, log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)


def explore(channel: Channel, weights: WeightBroadcast, number: int, options: argparse.Namespace) -> None:
    """One explorer: plays with the latest weights and sends a rollout after each ``--rollout`` steps, for ever."""
    torch.set_num_threads(1)
    torch.manual_seed(1000 * options.seed + number)
    steps, policy = options.rollout, Policy(options.env)
    envs = [make_env(options.env) for _ in range(options.envs)]
    observations = np.stack([env.reset(seed=1000 * options.seed + 100 * number + i)[0] for i, env in enumerate(envs)])
    returns = np.zeros(len(envs), dtype=np.float32)
    spec = {
        "observation": torch.from_numpy(observations).expand(steps + 1, *observations.shape),  # (T + 1, N, ...)
        "action": torch.empty(steps, len(envs), dtype=torch.int64),
        **{key: torch.empty(steps, len(envs)) for key in ("log_prob", "reward", "ended", "episode_return")},
    }
    # The learner ends the channel; Ctrl-C reaches all.
    with contextlib.suppress(ChannelClosed, KeyboardInterrupt), channel.sender(f"explorer-{number}") as sender:
        version = weights.wait()
        while True:
            if weights.version != version or not weights.loaded:
                version = weights.load_into(policy)
            with sender.reserve(spec, version=version) as rollout, torch.no_grad():
                for t in range(steps):
                    rollout["observation"][t] = torch.from_numpy(observations)
                    action, rollout["log_prob"][t] = sample(policy.logits(rollout["observation"][t]))
                    rollout["action"][t] = action
                    reward, ended = rollout["reward"][t].numpy(), rollout["ended"][t].numpy()
                    episode_return = rollout["episode_return"][t].numpy()
                    for i, (env, choice) in enumerate(zip(envs, action.tolist(), strict=True)):
                        observation, gain, terminated, truncated, _ = env.step(choice)
                        returns[i] += gain
                        reward[i] = np.sign(gain) if policy.is_image else gain  # games differ in what they pay
                        ended[i], episode_return[i] = terminated or truncated, np.nan
                        if truncated and not terminated:  # cut off, not failed: what would have followed counts
                            reward[i] += options.gamma * policy.value(torch.as_tensor(np.asarray(observation))).item()
                        if ended[i]:
                            episode_return[i], returns[i] = returns[i], 0
                            observation, _ = env.reset()
                        observations[i] = observation
                rollout["observation"][steps] = torch.from_numpy(observations)


def vtrace(batch: dict[str, Tensor], log_prob: Tensor, value: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Targets of the values and advantages, both (E, T, N), from values (E, T + 1, N); equation 1, with c = rho = 1."""
    rho = (log_prob - batch["log_prob"]).exp().clamp(max=1)
    discount = gamma * (1 - batch["ended"])
    delta = rho * (batch["reward"] + discount * value[:, 1:] - value[:, :-1])
    correction = torch.empty_like(delta)
    following = torch.zeros_like(delta[:, 0])
    for t in reversed(range(delta.shape[1])):
        following = delta[:, t] + discount[:, t] * rho[:, t] * following
        correction[:, t] = following
    target = value[:, :-1] + correction
    target_tp1 = torch.cat([target[:, 1:], value[:, -1:]], dim=1)
    return target, rho * (batch["reward"] + discount * target_tp1 - value[:, :-1])


def update(
    policy: Policy, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor], options: argparse.Namespace
) -> None:
    """One step over one batch of rollouts."""
    logits, value = policy(batch["observation"])
    log_probs = logits[:, :-1].log_softmax(-1)
    log_prob = log_probs.gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        target, advantage = vtrace(batch, log_prob, value, options.gamma)
        # Unlike the paper, whose rewards are clipped: without it, the steps grow with the length of the episodes.
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    loss = -(advantage * log_prob).mean() + 0.5 * F.mse_loss(value[:, :-1], target) - options.entropy * entropy
    optimizer.zero_grad()
    loss.backward()
    # Apart, or the critic's large gradients would drown the actor's; with one body they are one.
    for network in (policy,) if policy.is_image else (policy.actor, policy.critic):
        nn.utils.clip_grad_norm_(network.parameters(), 0.5)
    optimizer.step()


def evaluate(policy: Policy, env_id: str, episodes: int, seed: int) -> float:
    """Mean return of the likeliest actions."""
    total = 0.0
    with contextlib.closing(make_env(env_id)) as env, torch.no_grad():
        for episode in range(episodes):
            observation, _ = env.reset(seed=seed + episode)
            ended = False
            while not ended:
                action = policy.logits(torch.as_tensor(np.asarray(observation))).argmax().item()
                observation, reward, terminated, truncated, _ = env.step(action)
                total += float(reward)
                ended = terminated or truncated
    return total / episodes


def save(path: Path, state: dict[str, object]) -> None:
    torch.save(state, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def plot(path: Path, history: list[tuple[int, float]], title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*history, strict=True))
    axes.set(xlabel="environment steps", ylabel="return, mean of 100 episodes", title=title)
    figure.savefig(path)


def start_explorers(
    channel: Channel, weights: WeightBroadcast, options: argparse.Namespace
) -> list[multiprocessing.context.SpawnProcess]:
    context = multiprocessing.get_context("spawn")
    explorers = [
        context.Process(target=explore, args=(channel, weights, options.first_number + i, options), daemon=True)
        for i in range(options.explorers)
    ]
    for explorer in explorers:
        explorer.start()
    return explorers


def served(channel: Channel, weights: WeightBroadcast, options: argparse.Namespace) -> AbstractContextManager[object]:
    if options.listen is None:
        return contextlib.nullcontext()
    return Broker(options.listen, {"rollouts": channel, "policy": weights})


def explore_for(address: str, options: argparse.Namespace) -> None:
    """Runs explorers on this machine for a learner on another one, until it is done."""
    with join(address) as broker:
        for explorer in start_explorers(broker.channel("rollouts"), broker.weights("policy"), options):
            explorer.join()


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    num_explorers = options.explorers + options.remote_explorers
    policy = Policy(options.env)
    optimizer = torch.optim.Adam(policy.parameters(), lr=options.lr, eps=1e-5)
    done_steps, returns, history = 0, deque[float](maxlen=100), list[tuple[int, float]]()
    if options.resume:
        state = torch.load(options.checkpoint)
        policy.load_state_dict(state["policy"])
        optimizer.load_state_dict(state["optimizer"])
        done_steps, history = state["steps"], state["history"]
        returns.extend(state["returns"])
    first_steps, start, saved = done_steps, time.perf_counter(), time.perf_counter()
    with (
        Channel(slots=4, num_senders=num_explorers) as channel,
        WeightBroadcast(policy) as weights,
        served(channel, weights, options),
        tqdm(total=options.steps, initial=done_steps, unit="step", leave=False) as bar,
    ):
        explorers = start_explorers(channel, weights, options)
        weights.publish()
        for batch in ChannelLoader(channel, num_explorers, max_staleness=options.max_staleness, weights=weights):
            for group in optimizer.param_groups:
                group["lr"] = options.lr * max(0.1, 1 - done_steps / options.steps)
            update(policy, optimizer, batch, options)
            weights.publish()
            ended = batch["episode_return"]
            returns.extend(ended[~ended.isnan()].tolist())
            done_steps += batch["reward"].numel()
            bar.update(batch["reward"].numel())
            mean_return = sum(returns) / max(1, len(returns))
            history.append((done_steps, mean_return))
            bar.set_postfix_str(f"return {mean_return:.0f}", refresh=False)
            is_last = done_steps >= options.steps or (len(returns) == 100 and mean_return >= options.target)
            if options.checkpoint and (is_last or time.perf_counter() - saved > 10):
                saved = time.perf_counter()
                state = {"policy": policy.state_dict(), "optimizer": optimizer.state_dict(), "steps": done_steps}
                save(options.checkpoint, {**state, "history": history, "returns": list(returns)})
            if is_last:
                break
        seconds = time.perf_counter() - start
        channel.close()
        weights.close()
        for explorer in explorers:
            explorer.join()
    print(
        f"IMPALA on {options.env}: return {mean_return:.0f} over the last 100 episodes after {done_steps} steps, "
        f"{seconds:.0f} s ({(done_steps - first_steps) / seconds:.0f} steps/s)"
    )
    if options.evaluate:
        mean = evaluate(policy, options.env, options.evaluate, 10**6 + options.seed)
        print(f"evaluation: {options.evaluate} episodes, mean return {mean:.0f}")
    if options.plot:
        plot(options.plot, history, f"IMPALA on {options.env}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--env", default="CartPole-v1", help="with discrete actions, and vectors or images (ALE/...) as observations"
    )
    parser.add_argument("--explorers", type=int, default=2, help="processes")
    parser.add_argument("--listen", metavar="HOST:PORT", help="take rollouts of explorers on other machines")
    parser.add_argument("--remote-explorers", type=int, default=0, help="how many those are; needs --listen")
    parser.add_argument("--learner-address", metavar="HOST:PORT", help="only explore, for a learner on another machine")
    parser.add_argument(
        "--first-number", type=int, default=0, help="of the explorers here: those elsewhere have others"
    )
    parser.add_argument("--envs", type=int, default=8, help="environments of each")
    parser.add_argument("--rollout", type=int, default=32, help="steps of each environment in a message")
    parser.add_argument("--steps", type=int, default=2_000_000, help="of all environments together, at most")
    parser.add_argument("--target", type=float, default=475.0, help="mean return of 100 episodes at which to stop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=7e-4)
    parser.add_argument("--gamma", type=float, default=0.99)
    parser.add_argument("--max-staleness", type=int, default=8, help="versions")
    parser.add_argument("--entropy", type=float, default=0.01)
    parser.add_argument("--evaluate", type=int, default=100, metavar="EPISODES")
    parser.add_argument("--checkpoint", type=Path, help="written every ten seconds and at the end")
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint")
    parser.add_argument("--plot", type=Path, help="needs matplotlib")
    options = parser.parse_args()
    if options.resume and options.checkpoint is None:
        parser.error("--resume needs --checkpoint")
    if options.remote_explorers and options.listen is None:
        parser.error("--remote-explorers needs --listen")
    if options.learner_address is not None:
        explore_for(options.learner_address, options)
    else:
        train(options)


if __name__ == "__main__":
    main()
