"""DQN on CartPole: explorers send transitions as they make them; the learner keeps them in a replay buffer.

    python examples/dqn.py [--explorers 2] [--seed 0] [--checkpoint dqn.pt [--resume]] [--plot dqn.png]

Needs ``pip install 'torchext[rl]'`` and tqdm. Explorers send their transitions in chunks, and take new weights whenever
there are some; the learner makes so many updates for each chunk, so that neither runs away from the other: when the
channel is full, explorers wait. It stops when the greedy policy returns 475 on average, and prints, on two busy cores
and with other numbers each time:

    DQN on CartPole-v1: greedy return 500 after 39936 steps, 30 s (1331 steps/s)
    evaluation: 20 episodes, mean return 500

With explorers on another machine, both with the same TORCHEXT_CHANNELS_TOKEN in the environment:

    python examples/dqn.py --listen 0.0.0.0:7000 --remote-explorers 2
    python examples/dqn.py --learner-address learner:7000 --explorers 2 --first-number 2  # there

Source: "Human-level control through deep reinforcement learning" (Nature 518, 2015), with the targets of "Deep
Reinforcement Learning with Double Q-learning" (arXiv 1509.06461).
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import time
from contextlib import AbstractContextManager
from pathlib import Path

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from torchext.channels import Broker, Channel, ChannelClosed, WeightBroadcast, join

# Shapes: T transitions of a chunk, B of a minibatch, D numbers in an observation.


class QNetwork(nn.Sequential):
    """(..., D) to the value of each action, (..., actions)."""

    def __init__(self, env_id: str) -> None:
        with contextlib.closing(gymnasium.make(env_id)) as env:
            (inputs,), actions = env.observation_space.shape, int(env.action_space.n)
        super().__init__(nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, actions))
        self.inputs = inputs


class Replay:
    """The latest transitions, in rings of equal length."""

    def __init__(self, capacity: int, inputs: int) -> None:
        self.columns = {
            "observation_tm1": torch.zeros(capacity, inputs),
            "action_tm1": torch.zeros(capacity, dtype=torch.int64),
            "reward_t": torch.zeros(capacity),
            "alive_t": torch.zeros(capacity),
            "observation_t": torch.zeros(capacity, inputs),
        }
        self.capacity, self.added = capacity, 0

    def add(self, chunk: dict[str, Tensor]) -> None:
        rows = (self.added + torch.arange(len(chunk["reward_t"]))) % self.capacity
        for key, column in self.columns.items():
            column[rows] = chunk[key]
        self.added += len(rows)

    def sample(self, size: int) -> dict[str, Tensor]:
        rows = torch.randint(min(self.added, self.capacity), (size,))
        return {key: column[rows] for key, column in self.columns.items()}


def explore(channel: Channel, weights: WeightBroadcast, number: int, options: argparse.Namespace) -> None:
    """One explorer: plays with the latest weights, now and then at random, and sends each chunk of transitions."""
    torch.set_num_threads(1)
    chance = np.random.default_rng(1000 * options.seed + number)
    network = QNetwork(options.env)
    env = gymnasium.make(options.env)
    observation, _ = env.reset(seed=1000 * options.seed + number)
    size, played = options.chunk, 0
    spec = {
        "observation_tm1": torch.empty(size, network.inputs),
        "action_tm1": torch.empty(size, dtype=torch.int64),
        "reward_t": torch.empty(size),
        "alive_t": torch.empty(size),
        "observation_t": torch.empty(size, network.inputs),
    }
    # The learner ends the channel; Ctrl-C reaches all.
    with contextlib.suppress(ChannelClosed, KeyboardInterrupt), channel.sender(f"explorer-{number}") as sender:
        version = weights.wait()
        while True:
            if weights.version != version or not weights.loaded:
                version = weights.load_into(network)
            with sender.reserve(spec, version=version) as chunk, torch.no_grad():
                for t in range(size):
                    # Explorers differ in how far they explore; all of them less in time.
                    epsilon = max(0.02 * (number + 1), 1 - played / options.explore_steps)
                    if chance.random() < epsilon:
                        action = int(chance.integers(env.action_space.n))
                    else:
                        action = int(network(torch.from_numpy(observation)).argmax())
                    chunk["observation_tm1"][t] = torch.from_numpy(observation)
                    observation, reward, terminated, truncated, _ = env.step(action)
                    chunk["observation_t"][t] = torch.from_numpy(observation)
                    chunk["action_tm1"][t], chunk["reward_t"][t] = action, float(reward)
                    chunk["alive_t"][t] = float(not terminated)  # cut off is not failed
                    played += options.explorers + options.remote_explorers
                    if terminated or truncated:
                        observation, _ = env.reset()


def update(online: QNetwork, target: QNetwork, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> None:
    """One step on a minibatch: the online network chooses, the target network values (Double Q-learning)."""
    with torch.no_grad():
        choice = online(batch["observation_t"]).argmax(-1, keepdim=True)
        q_t = target(batch["observation_t"]).gather(-1, choice).squeeze(-1)
        goal = batch["reward_t"] + 0.99 * batch["alive_t"] * q_t
    q_tm1 = online(batch["observation_tm1"]).gather(-1, batch["action_tm1"].unsqueeze(-1)).squeeze(-1)
    optimizer.zero_grad()
    F.smooth_l1_loss(q_tm1, goal).backward()
    nn.utils.clip_grad_norm_(online.parameters(), 10)
    optimizer.step()
    with torch.no_grad():
        torch._foreach_lerp_(list(target.parameters()), list(online.parameters()), 0.005)


def evaluate(network: QNetwork, env_id: str, episodes: int, seed: int) -> float:
    """Mean return of the greedy policy."""
    total = 0.0
    with contextlib.closing(gymnasium.make(env_id)) as env, torch.no_grad():
        for episode in range(episodes):
            observation, _ = env.reset(seed=seed + episode)
            ended = False
            while not ended:
                action = int(network(torch.from_numpy(observation)).argmax())
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
    axes.set(xlabel="environment steps", ylabel="return of the greedy policy", title=title)
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
    online, target = QNetwork(options.env), QNetwork(options.env)
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=options.lr)
    replay, done_steps, history = Replay(options.capacity, online.inputs), 0, list[tuple[int, float]]()
    if options.resume:  # without the transitions, which come anew
        state = torch.load(options.checkpoint)
        online.load_state_dict(state["online"])
        target.load_state_dict(state["target"])
        optimizer.load_state_dict(state["optimizer"])
        done_steps, history = state["steps"], state["history"]
    first_steps, start, mean, tested = done_steps, time.perf_counter(), 0.0, done_steps
    with (
        Channel(slots=4, num_senders=num_explorers) as channel,
        WeightBroadcast(online) as weights,
        served(channel, weights, options),
        tqdm(total=options.steps, initial=done_steps, unit="step", leave=False) as bar,
    ):
        explorers = start_explorers(channel, weights, options)
        weights.publish()
        for chunk in channel:
            replay.add(chunk)
            num_new = len(chunk["reward_t"])
            del chunk  # its memory goes back to the explorers
            done_steps += num_new
            bar.update(num_new)
            if replay.added >= options.warm_up:
                for _ in range(num_new // options.steps_per_update):
                    update(online, target, optimizer, replay.sample(options.minibatch))
                weights.publish()
            is_last = done_steps >= options.steps
            if is_last or done_steps - tested >= options.test_every:
                tested = done_steps
                mean = evaluate(target, options.env, options.test_episodes, 10**5 + done_steps)
                history.append((done_steps, mean))
                bar.set_postfix_str(f"return {mean:.0f}", refresh=False)
                is_last = is_last or mean >= options.target
                if options.checkpoint:
                    state = {"online": online.state_dict(), "target": target.state_dict(), "steps": done_steps}
                    save(options.checkpoint, {**state, "optimizer": optimizer.state_dict(), "history": history})
            if is_last:
                break
        seconds = time.perf_counter() - start
        channel.close()
        weights.close()
        for explorer in explorers:
            explorer.join()
    print(
        f"DQN on {options.env}: greedy return {mean:.0f} after {done_steps} steps, {seconds:.0f} s "
        f"({(done_steps - first_steps) / seconds:.0f} steps/s)"
    )
    if options.evaluate:
        mean = evaluate(target, options.env, options.evaluate, 10**6 + options.seed)
        print(f"evaluation: {options.evaluate} episodes, mean return {mean:.0f}")
    if options.plot:
        plot(options.plot, history, f"DQN on {options.env}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="CartPole-v1", help="with vectors as observations and discrete actions")
    parser.add_argument("--explorers", type=int, default=2, help="processes")
    parser.add_argument("--listen", metavar="HOST:PORT", help="take rollouts of explorers on other machines")
    parser.add_argument("--remote-explorers", type=int, default=0, help="how many those are; needs --listen")
    parser.add_argument("--learner-address", metavar="HOST:PORT", help="only explore, for a learner on another machine")
    parser.add_argument(
        "--first-number", type=int, default=0, help="of the explorers here: those elsewhere have others"
    )
    parser.add_argument("--chunk", type=int, default=64, help="transitions in a message")
    parser.add_argument("--steps", type=int, default=200_000, help="of all environments together, at most")
    parser.add_argument("--target", type=float, default=475.0, help="return of the greedy policy at which to stop")
    parser.add_argument("--test-every", type=int, default=4096, help="steps between evaluations of the greedy policy")
    parser.add_argument("--test-episodes", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--capacity", type=int, default=50_000, help="transitions in the replay buffer")
    parser.add_argument("--warm-up", type=int, default=1000, help="transitions before the first update")
    parser.add_argument("--explore-steps", type=int, default=10_000, help="over which actions become less random")
    parser.add_argument("--steps-per-update", type=int, default=2, help="of all environments together")
    parser.add_argument("--minibatch", type=int, default=128)
    parser.add_argument("--evaluate", type=int, default=100, metavar="EPISODES")
    parser.add_argument("--checkpoint", type=Path, help="written at each evaluation")
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
