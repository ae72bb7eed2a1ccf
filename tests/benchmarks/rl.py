"""Train IMPALA on CartPole by the loop of examples/impala.py over several transports, and by RLlib, interleaved.

    python tests/benchmarks/impala.py [--explorers 2] [--envs 16] [--seconds 10] [--rounds 3] [--rllib]

The explorers, the policy and the learner's step are the same for the first three, so that what differs is how rollouts
and weights travel: torchext's channels (rows of the learner's batch; weights in shared memory), a queue of
torch.multiprocessing for each direction, and Ray (actors whose tasks return rollouts, weights by ray.put). What RLlib
differs by is mostly what it does around it. Prints steps per second and per second of CPU time of all processes,
medians over the rounds: the latter is what stays comparable on a busy machine. CPU time of Ray's own daemons is not
counted.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import multiprocessing
import os
import queue as queues
import resource
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from torchext.channels import Channel, ChannelClosed, ChannelLoader, WeightBroadcast

FORK = multiprocessing.get_context("fork")
Round = tuple[int, float, float]  # steps, seconds, CPU seconds


def example() -> Any:
    path = Path(__file__).parents[2] / "examples" / "impala.py"
    spec = importlib.util.spec_from_file_location("impala_example", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def end_explorer(spent: Any, since: float | None) -> NoReturn:
    """Ends a forked explorer; the queue gets the CPU time that it has spent since its first rollout."""
    spent.put(cpu_s() - (since or 0.0))
    spent.close()
    spent.join_thread()
    os._exit(0)


class Player:
    """An explorer's environments; plays one rollout into given tensors."""

    def __init__(self, number: int, options: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        self.impala = example()
        self.options = options
        self.policy = self.impala.Policy("CartPole-v1")
        self.envs = [self.impala.make_env("CartPole-v1") for _ in range(options.envs)]
        self.observations = np.stack([env.reset(seed=100 * number + i)[0] for i, env in enumerate(self.envs)])

    def spec(self) -> dict[str, torch.Tensor]:
        steps, envs = self.options.rollout, len(self.envs)
        return {
            "observation": torch.empty(steps + 1, envs, self.observations.shape[1]),
            "action": torch.empty(steps, envs, dtype=torch.int64),
            **{key: torch.empty(steps, envs) for key in ("log_prob", "reward", "ended")},
        }

    def play(self, rollout: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for t in range(self.options.rollout):
                rollout["observation"][t] = torch.from_numpy(self.observations)
                action, rollout["log_prob"][t] = self.impala.sample(self.policy.logits(rollout["observation"][t]))
                rollout["action"][t] = action
                for i, (env, choice) in enumerate(zip(self.envs, action.tolist(), strict=True)):
                    observation, reward, terminated, truncated, _ = env.step(choice)
                    rollout["reward"][t, i], rollout["ended"][t, i] = float(reward), float(terminated or truncated)
                    self.observations[i] = env.reset()[0] if terminated or truncated else observation
            rollout["observation"][self.options.rollout] = torch.from_numpy(self.observations)


class Learner:
    """The policy that is trained, and for how long."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        self.impala = example()
        self.policy = self.impala.Policy("CartPole-v1")
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=7e-4)
        self.settings = argparse.Namespace(gamma=0.99, entropy=0.01)
        self.options = options
        self.steps = 0
        self.start = self.cpu = 0.0

    def learn(self, batch: dict[str, torch.Tensor]) -> bool:
        """False once the time is over. What comes first does not count."""
        self.impala.update(self.policy, self.optimizer, batch, self.settings)
        if self.start == 0.0:
            self.start, self.cpu = time.monotonic(), cpu_s()
        else:
            self.steps += batch["reward"].numel()
        return time.monotonic() - self.start < self.options.seconds

    def result(self, others_s: float) -> Round:
        return self.steps, time.monotonic() - self.start, cpu_s() - self.cpu + others_s


def run_torchext(options: argparse.Namespace) -> Round:
    learner = Learner(options)
    spent: Any = FORK.Queue()
    with Channel(slots=4, num_senders=options.explorers) as channel, WeightBroadcast(learner.policy) as weights:

        def explore(number: int) -> None:
            os.setsid()
            player, spec, cpu = Player(number, options), None, None
            with contextlib.suppress(ChannelClosed), channel.sender() as sender:
                weights.wait()
                while True:
                    version = weights.load_into(player.policy)
                    spec = spec if spec is not None else player.spec()
                    with sender.reserve(spec, version=version) as rollout:
                        player.play(rollout)
                    cpu = cpu if cpu is not None else cpu_s()
            end_explorer(spent, cpu)

        explorers = [FORK.Process(target=explore, args=(number,)) for number in range(options.explorers)]
        for explorer in explorers:
            explorer.start()
        weights.publish()
        for batch in ChannelLoader(channel, options.explorers, weights=weights):
            if not learner.learn(batch):
                break
            weights.publish()
        result = learner.result(0.0)
        channel.close()
        others_s = sum(spent.get(timeout=60) for _ in explorers)
        for explorer in explorers:
            explorer.join()
    return result[0], result[1], result[2] + others_s


def run_queue(options: argparse.Namespace) -> Round:
    learner = Learner(options)
    context = torch.multiprocessing.get_context("fork")
    rollouts: Any = context.Queue(maxsize=4 * options.explorers)
    weights: list[Any] = [context.Queue() for _ in range(options.explorers)]
    ended, spent = FORK.Event(), FORK.Queue()

    def explore(number: int) -> None:
        os.setsid()
        player, cpu = Player(number, options), None
        player.policy.load_state_dict(weights[number].get())
        while not ended.is_set():
            with contextlib.suppress(queues.Empty):
                while True:
                    player.policy.load_state_dict(weights[number].get_nowait())
            rollout = player.spec()
            player.play(rollout)
            with contextlib.suppress(queues.Full):
                rollouts.put(rollout, timeout=1)
            cpu = cpu if cpu is not None else cpu_s()
        end_explorer(spent, cpu)

    explorers = [FORK.Process(target=explore, args=(number,)) for number in range(options.explorers)]
    for explorer in explorers:
        explorer.start()
    while True:
        state = {key: value.clone() for key, value in learner.policy.state_dict().items()}
        for queue in weights:
            queue.put(state)
        parts = [rollouts.get(timeout=60) for _ in range(options.explorers)]
        if not learner.learn({key: torch.stack([part[key] for part in parts]) for key in parts[0]}):
            break
    result = learner.result(0.0)
    ended.set()
    others_s = sum(spent.get(timeout=60) for _ in explorers)
    for explorer in explorers:
        explorer.join()
    return result[0], result[1], result[2] + others_s


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

        def cpu_s(self) -> float:
            return cpu_s()

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
            before = sum(ray.get([actor.cpu_s.remote() for actor in actors]))
        if not goes_on:
            break
        state = put()
        for reference in done:
            actor = pending.pop(reference)
            pending[actor.play.remote(state)] = actor
    result = learner.result(0.0)
    others_s = sum(ray.get([actor.cpu_s.remote() for actor in actors])) - before
    for actor in actors:
        ray.kill(actor)
    return result[0], result[1], result[2] + others_s


def run_rllib(options: argparse.Namespace) -> Round:
    """Its own IMPALA, with as many environments; its processes' CPU time is that of the machine's Ray workers."""
    import psutil
    from ray.rllib.algorithms.impala import IMPALAConfig

    def workers_s() -> float:
        total = 0.0
        for process in psutil.process_iter(["cmdline", "cpu_times"]):
            if (process.info["cmdline"] or [""])[0].startswith("ray::"):
                total += process.info["cpu_times"].user + process.info["cpu_times"].system
        return total + cpu_s()

    config = (
        IMPALAConfig()
        .environment("CartPole-v1")
        .env_runners(
            num_env_runners=options.explorers,
            num_envs_per_env_runner=options.envs,
            rollout_fragment_length=options.rollout,
            num_cpus_per_env_runner=0,
        )
        .learners(num_learners=0)
        .training(train_batch_size_per_learner=options.rollout * options.envs * options.explorers)
    )
    algorithm = config.build_algo()
    algorithm.train()
    start, cpu, steps, before = time.monotonic(), workers_s(), 0, None
    while time.monotonic() - start < options.seconds:
        total = algorithm.train()["num_env_steps_sampled_lifetime"]
        before = total if before is None else before
        steps = total - before
    result = steps, time.monotonic() - start, workers_s() - cpu
    algorithm.stop()
    return int(result[0]), result[1], result[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    figures = {
        name: (statistics.median(s / t for s, t, _ in rows), statistics.median(s / c for s, _, c in rows))
        for name, rows in rounds.items()
    }
    ours = figures["torchext"]
    for name, (rate, per_cpu) in figures.items():
        print(
            f"{name:<16}{rate:10,.0f} steps/s ({ours[0] / rate:.2f}x) {per_cpu:10,.0f} steps per CPU second "
            f"({ours[1] / per_cpu:.2f}x)"
        )


if __name__ == "__main__":
    main()
