"""Train by the loops of examples/impala.py and ppo.py over several transports, and by RLlib, interleaved in one run.

    python tests/benchmarks/rl.py [--algorithm ppo] [--env ALE/Breakout-v5] [--seconds 10] [--rounds 3] [--rllib]

The explorers, the policy and the learner's step are the same for the first three, so that what differs is how rollouts
and weights travel: torchext's channels (rows of the learner's batch; weights in shared memory), a queue of
torch.multiprocessing for each direction, and Ray (actors whose tasks return rollouts, weights by ray.put). What RLlib
differs by is mostly what it does around it; it has networks, batches and environments of the same sizes, and its steps
are those that it has sampled. Prints steps per second and per second of CPU time of all processes, medians over the
rounds: the latter is what stays comparable on a busy machine. CPU time of Ray's own daemons is not counted.

The last columns split the CPU time of a step: playing and learning, and all the rest, which is the transport. By no
transport can a loop be faster than by one that costs nothing: the bound is the sum against the first of them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import multiprocessing
import os
import queue as queues
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchext.channels import Channel, ChannelClosed, ChannelLoader, WeightBroadcast

FORK = multiprocessing.get_context("fork")
LR = 7e-4
EPOCHS, MINIBATCH = 6, 256  # of PPO
Round = tuple[int, float, float, float]  # steps, seconds, CPU seconds, of these for playing and learning


def example(name: str) -> Any:
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{name}_example", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


Spent = tuple[float, float]  # CPU seconds, of these for playing


class Player:
    """An explorer's environments; plays one rollout into given tensors."""

    def __init__(self, number: int, options: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        self.example = example(options.algorithm)
        self.options = options
        self.policy = self.example.Policy(options.env)
        self.logits = self.policy.logits if options.algorithm == "impala" else self.policy.actor
        self.envs = [example("impala").make_env(options.env) for _ in range(options.envs)]
        self.observations = np.stack([env.reset(seed=100 * number + i)[0] for i, env in enumerate(self.envs)])
        self.playing_s = 0.0

    def spent(self) -> Spent:
        return cpu_s(), self.playing_s

    def spec(self) -> dict[str, torch.Tensor]:
        steps, envs = self.options.rollout, len(self.envs)
        return {
            "observation": torch.from_numpy(self.observations).expand(steps + 1, *self.observations.shape).clone(),
            "action": torch.empty(steps, envs, dtype=torch.int64),
            **{key: torch.empty(steps, envs) for key in ("log_prob", "reward", "ended")},
        }

    def play(self, rollout: dict[str, torch.Tensor]) -> None:
        start = time.thread_time()
        with torch.no_grad():
            for t in range(self.options.rollout):
                rollout["observation"][t] = torch.from_numpy(self.observations)
                action, rollout["log_prob"][t] = self.example.sample(self.logits(rollout["observation"][t]))
                rollout["action"][t] = action
                rewards, ended = rollout["reward"][t].numpy(), rollout["ended"][t].numpy()
                for i, (env, choice) in enumerate(zip(self.envs, action.tolist(), strict=True)):
                    observation, rewards[i], terminated, truncated, _ = env.step(choice)
                    ended[i] = terminated or truncated
                    self.observations[i] = env.reset()[0] if terminated or truncated else observation
            rollout["observation"][self.options.rollout] = torch.from_numpy(self.observations)
        self.playing_s += time.thread_time() - start


class Learner:
    """The policy that is trained, and for how long."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        self.example = example(options.algorithm)
        self.policy = self.example.Policy(options.env)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=LR)
        ppo = {"gae_lambda": 0.95, "epochs": EPOCHS, "minibatch": MINIBATCH, "clip": 0.2}
        self.settings = argparse.Namespace(gamma=0.99, entropy=0.01, **ppo)
        self.options = options
        self.steps = 0
        self.start = self.cpu = self.learning_s = 0.0

    def learn(self, batch: dict[str, torch.Tensor]) -> bool:
        """False once the time is over. What comes first does not count."""
        start = time.thread_time()
        self.example.update(self.policy, self.optimizer, batch, self.settings)
        if self.start == 0.0:
            self.start, self.cpu = time.monotonic(), cpu_s()
        else:
            self.steps += batch["reward"].numel()
            self.learning_s += time.thread_time() - start
        return time.monotonic() - self.start < self.options.seconds

    def result(self) -> tuple[int, float, Spent]:
        return self.steps, time.monotonic() - self.start, (cpu_s() - self.cpu, self.learning_s)


def added(result: tuple[int, float, Spent], others: list[Spent]) -> Round:
    steps, seconds, own = result
    rows = [own, *others]
    return steps, seconds, sum(row[0] for row in rows), sum(row[1] for row in rows)


@contextlib.contextmanager
def exploring(options: argparse.Namespace, play: Callable[[int, Player], Iterator[None]]) -> Iterator[list[Spent]]:
    """Forks explorers; the list has what each has spent, from its first rollout on, once the block is left.

    ``play(number, player)`` plays rollouts, yields after each, and returns when the learner says so.
    """
    spent: Any = FORK.Queue()

    def explore(number: int) -> None:
        os.setsid()
        player, since = Player(number, options), None
        for _ in play(number, player):
            since = since or player.spent()
        now = player.spent()
        since = since or now
        spent.put((now[0] - since[0], now[1] - since[1]))
        spent.close()
        spent.join_thread()
        os._exit(0)

    processes = [FORK.Process(target=explore, args=(number,)) for number in range(options.explorers)]
    for process in processes:
        process.start()
    others: list[Spent] = []
    yield others
    others += [spent.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()


def run_torchext(options: argparse.Namespace) -> Round:
    learner = Learner(options)
    slots = 4 if options.algorithm == "impala" else 2
    with Channel(slots=slots, num_senders=options.explorers) as channel, WeightBroadcast(learner.policy) as weights:

        def play(_: int, player: Player) -> Iterator[None]:
            spec = player.spec()
            with contextlib.suppress(ChannelClosed), channel.sender() as sender:
                weights.wait()
                while True:
                    version = weights.load_into(player.policy)
                    with sender.reserve(spec, version=version) as rollout:
                        player.play(rollout)
                    yield

        with exploring(options, play) as others:
            weights.publish()
            for batch in ChannelLoader(channel, options.explorers, weights=weights):
                if not learner.learn(batch):
                    break
                weights.publish()
            result = learner.result()
            channel.close()
    return added(result, others)


def run_queue(options: argparse.Namespace) -> Round:
    learner = Learner(options)
    context = torch.multiprocessing.get_context("fork")
    rollouts: Any = context.Queue(maxsize=4 * options.explorers)
    weights: list[Any] = [context.Queue() for _ in range(options.explorers)]
    ended = FORK.Event()

    def play(number: int, player: Player) -> Iterator[None]:
        player.policy.load_state_dict(weights[number].get())
        while not ended.is_set():
            with contextlib.suppress(queues.Empty):
                while True:
                    player.policy.load_state_dict(weights[number].get_nowait())
            rollout = player.spec()
            player.play(rollout)
            with contextlib.suppress(queues.Full):
                rollouts.put(rollout, timeout=1)
            yield

    with exploring(options, play) as others:
        while True:
            state = {key: value.clone() for key, value in learner.policy.state_dict().items()}
            for queue in weights:
                queue.put(state)
            parts = [rollouts.get(timeout=60) for _ in range(options.explorers)]
            if not learner.learn({key: torch.stack([part[key] for part in parts]) for key in parts[0]}):
                break
        result = learner.result()
        ended.set()
    return added(result, others)


def run_ray(options: argparse.Namespace) -> Round:
    import ray

    class Explorer:
        def __init__(self, number: int) -> None:
            self.player = Player(number, options)

        def play(self, state: Any) -> Any:
            self.player.policy.load_state_dict({key: torch.tensor(value) for key, value in state.items()})
            rollout = self.player.spec()
            self.player.play(rollout)
            return {key: value.numpy() for key, value in rollout.items()}

        def spent(self) -> Spent:
            return self.player.spent()

    learner = Learner(options)
    actors = [ray.remote(Explorer).options(num_cpus=0).remote(number) for number in range(options.explorers)]

    def put() -> Any:
        return ray.put({key: value.numpy().copy() for key, value in learner.policy.state_dict().items()})

    # As many rollouts under way for each explorer as its slots are there.
    state = put()
    pending = {actor.play.remote(state): actor for actor in actors for _ in range(2)}
    before = None
    while True:
        done, _ = ray.wait(list(pending), num_returns=options.explorers)
        parts = ray.get(done)
        batch = {key: torch.stack([torch.tensor(part[key]) for part in parts]) for key in parts[0]}
        del parts
        goes_on = learner.learn(batch)
        if before is None:
            before = ray.get([actor.spent.remote() for actor in actors])
        if not goes_on:
            break
        state = put()
        for reference in done:
            actor = pending.pop(reference)
            pending[actor.play.remote(state)] = actor
    result = learner.result()
    after = ray.get([actor.spent.remote() for actor in actors])
    for actor in actors:
        ray.kill(actor)
    return added(result, [(b[0] - a[0], b[1] - a[1]) for a, b in zip(before, after, strict=True)])


def run_rllib(options: argparse.Namespace) -> Round:
    """Its own algorithm, with as many environments; its processes' CPU time is that of the machine's Ray workers."""
    import gymnasium
    import psutil
    from ray.rllib.algorithms.impala import IMPALAConfig
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.tune import register_env

    def workers_s() -> float:
        total = 0.0
        for process in psutil.process_iter(["cmdline", "cpu_times"]):
            if (process.info["cmdline"] or [""])[0].startswith("ray::"):
                total += process.info["cpu_times"].user + process.info["cpu_times"].system
        return total + cpu_s()

    def make_env(_: Any) -> Any:
        env = example("impala").make_env(options.env)
        if len(env.observation_space.shape) != 3:
            return env
        # RLlib has the frames last, and numbers from 0 to 1, as its own wrappers make them.
        frames = gymnasium.spaces.Box(0, 1, (80, 80, 4), np.float32)
        return gymnasium.wrappers.TransformObservation(
            env, lambda frame: np.asarray(frame).transpose(1, 2, 0).astype(np.float32) / 255, frames
        )

    register_env("of-the-example", make_env)
    batch = options.rollout * options.envs * options.explorers
    if options.algorithm == "impala":
        config = IMPALAConfig().training(train_batch_size_per_learner=batch)
    else:
        config = PPOConfig().training(
            train_batch_size_per_learner=batch, minibatch_size=min(MINIBATCH, batch), num_epochs=EPOCHS
        )
    if options.env.startswith("ALE/"):
        model: dict[str, Any] = {
            "conv_filters": [[16, 8, 4], [32, 4, 2]],
            "conv_activation": "relu",
            "head_fcnet_hiddens": [256],
        }
    else:
        model = {"fcnet_hiddens": [64, 64], "fcnet_activation": "tanh", "vf_share_layers": False}
    config = (
        config.environment("of-the-example")
        .env_runners(
            num_env_runners=options.explorers,
            num_envs_per_env_runner=options.envs,
            rollout_fragment_length=options.rollout,
            num_cpus_per_env_runner=0,
        )
        .learners(num_learners=0)
        .training(lr=LR)
        .rl_module(model_config=model)
        .reporting(min_time_s_per_iteration=1)
    )
    algorithm = config.build_algo()
    before, deadline = 0, time.monotonic() + 120
    while before < 4 * batch and time.monotonic() < deadline:  # its start takes longest
        before = algorithm.train()["num_env_steps_sampled_lifetime"]
    start, cpu, steps = time.monotonic(), workers_s(), 0
    while time.monotonic() - start < options.seconds:
        steps = algorithm.train()["num_env_steps_sampled_lifetime"] - before
    result = int(steps), time.monotonic() - start, workers_s() - cpu, math.nan
    algorithm.stop()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=["impala", "ppo"], default="impala")
    parser.add_argument("--env", default="CartPole-v1", help="for IMPALA also of Atari: ALE/Breakout-v5")
    parser.add_argument("--explorers", type=int, default=2, help="processes")
    parser.add_argument("--envs", type=int, default=16, help="environments of each")
    parser.add_argument("--rollout", type=int, default=32, help="steps of each environment in a message")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each contender in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rllib", action="store_true", help="with RLlib, which has to be installed")
    options = parser.parse_args()
    with contextlib.suppress(OSError):
        os.setsid()
    contenders: dict[str, Callable[[argparse.Namespace], Round]] = {"torchext": run_torchext, "torch queues": run_queue}
    if find_spec("ray") is not None:
        import ray

        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        ray.init(num_cpus=os.cpu_count(), include_dashboard=False, log_to_driver=False, logging_level="error")
        contenders["Ray's transport"] = run_ray
        if options.rllib:
            contenders["RLlib"] = run_rllib
    else:
        print("Ray left out: pip install ray")
    rounds: dict[str, list[Round]] = {name: [] for name in contenders}
    for _ in range(options.rounds):
        for name, contend in contenders.items():
            rounds[name].append(contend(options))
    print(f"{options.algorithm}, {options.env}, {options.explorers} explorers x {options.envs} environments")
    figures = {}
    for name, rows in rounds.items():
        of_each = [(steps / s, steps / cpu, work / steps, cpu / steps) for steps, s, cpu, work in rows]
        figures[name] = [statistics.median(values) for values in zip(*of_each, strict=True)]
    ours = figures["torchext"]
    for name, (rate, per_cpu, work_s, all_s) in figures.items():
        print(
            f"{name:<16}{rate:10,.0f} steps/s ({ours[0] / rate:.2f}x) {per_cpu:10,.0f} per CPU second "
            f"({ours[1] / per_cpu:.2f}x)"
            + ("" if math.isnan(work_s) else f"   {1e6 * work_s:.2f} + {1e6 * (all_s - work_s):.2f} us of CPU a step")
        )


if __name__ == "__main__":
    main()
