"""Trains the two agents together: MAPPO in the simulator.

Each iteration plays some episodes, and takes a few steps on what was noted. Both agents share a critic and a reward:
less the cost (job-seconds in the system, and fees and lateness if they count) between two decisions, plus what the
untrained agents, that is the heuristic, had cost on the same jobs. That reference depends on no choice, so it changes
no optimum; but it takes out most of the chance of which jobs came. What a job will cost as it runs counts when it
starts, as nothing that comes later changes it: the simulator knows, and rewards come sooner after their causes.

Running times are learned beside: the ordering agent foretells them, and is told the truth of each waiting job.

Source: Yu et al., "The Surprising Effectiveness of PPO in Cooperative Multi-Agent Games" (MAPPO), NeurIPS 2022; for
advantages, Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation" (GAE), ICLR
2016; for the reference, Mao et al., "Variance Reduction for Reinforcement Learning in Input-Driven Environments", ICLR
2019. Decisions are not evenly spaced, so the discount is exp(-time / horizon).
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchext.scheduling.dual.losses import Learned, losses_of
from torchext.scheduling.dual.networks import Agents
from torchext.scheduling.dual.policy import Dual
from torchext.scheduling.dual.policy_file import write_atomically
from torchext.scheduling.dual.rollout import Cost, Episode, Weights, compare_costs, draw_episode, play
from torchext.scheduling.simulator import RecordedJob
from torchext.scheduling.types import Cluster, SchedulingError

# Advantages count no more than so many sds: running times have long tails, and one job would drown all others.
_FARTHEST = 4.0


@dataclass(frozen=True)
class Options:
    """How to train; the defaults are those of the command.

    Args:
        seed: Decides everything that is drawn.
        iterations: How many.
        episodes: Played in each.
        jobs: In each episode, about.
        first_load: Load of the first episodes; it rises evenly to `last_load` in half of the iterations.
        last_load: Load of the last.
        steps: Passes over what was noted.
        minibatch: Decisions per step.
        most_decisions: Of an episode, that are learned from; drawn at random when there are more.
        learning_rate: Of Adam.
        clip: Of the ratio of probabilities.
        entropy: Weight of the entropy of the choices.
        forecast: Weight of the error of forecast running times.
        horizon_s: In which time a cost counts e-fold less.
        trace_decay: Of GAE, per decision.
        scale_s: Job-seconds that count 1 in the reward.
        fee_weight: Job-seconds that one unit of fees counts.
        late_weight: Job-seconds that one second of lateness counts.
    """

    seed: int = 0
    iterations: int = 100
    episodes: int = 2
    jobs: int = 500
    first_load: float = 0.9
    last_load: float = 1.15
    steps: int = 2
    minibatch: int = 64
    most_decisions: int = 400
    learning_rate: float = 3e-4
    clip: float = 0.2
    entropy: float = 0.003
    forecast: float = 0.2
    horizon_s: float = 12 * 3600.0
    trace_decay: float = 0.97
    scale_s: float = 36000.0
    fee_weight: float = 0.0
    late_weight: float = 0.0

    @property
    def weights(self) -> Weights:
        """Of fees and lateness."""
        return Weights(self.fee_weight, self.late_weight)


class Training:
    """Training, one iteration after another. Not thread-safe.

    An iteration depends on nothing but the parameters, the optimizer and its own number, so one resumed from a
    checkpoint goes on as if it had never stopped, to the bit on the same machine.

    Args:
        traces: One or more of recorded jobs, by submission; with classes, if they are to have any.
        clusters: One or more; each episode draws one, and a trace.
        is_synthetic: Whether jobs run in the synthetic world, a new one in each episode.
        options: How.
    """

    def __init__(
        self,
        traces: Sequence[Sequence[RecordedJob]],
        clusters: Sequence[Cluster],
        *,
        is_synthetic: bool,
        options: Options | None = None,
    ) -> None:
        self.options = options or Options()
        self.iteration = 0
        self._traces = traces
        self._clusters = clusters
        self._is_synthetic = is_synthetic
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.options.seed)
            self.agents = Agents()
            self._untrained = Agents()
        self._optimizer = torch.optim.Adam(self.agents.parameters(), lr=self.options.learning_rate)
        self._seen: list[Tensor] = []  # features of clusters, for what is strange
        self._best: tuple[float, dict[str, Tensor]] = (-math.inf, {})  # what was validated, and the agents

    def step(self) -> dict[str, float]:
        """Does one iteration.

        Returns:
            ``gain``: by which share of the heuristic's cost the sampling agents were better, mean over episodes;
            ``load``, ``decisions``, ``value_loss``, ``order_loss``, ``place_loss``, ``hold_loss``, ``forecast_loss``,
            ``entropy``, ``clipped`` (share).
        """
        options = self.options
        random = np.random.default_rng([options.seed, self.iteration])
        progress = min(1.0, self.iteration / max(options.iterations / 2, 1))
        load = options.first_load + progress * (options.last_load - options.first_load)
        learned: list[Learned] = []
        gains = []
        for _ in range(options.episodes):
            trace = self._traces[int(random.integers(len(self._traces)))]
            cluster = self._clusters[int(random.integers(len(self._clusters)))]
            episode = draw_episode(
                trace, cluster, random, num_jobs=options.jobs, load=load, is_synthetic=self._is_synthetic
            )
            gain, some = self._play(episode, int(random.integers(2**31)))
            gains.append(gain)
            if len(some) > options.most_decisions:
                some = [some[i] for i in sorted(random.choice(len(some), options.most_decisions, replace=False))]
            learned += some
        self._seen = [*self._seen, *(entry.decision.cluster for entry in learned)][-20_000:]
        said = self._improve(learned, random) if learned else {}
        if self._seen:
            self.agents.remember(torch.stack(self._seen))
        self.iteration += 1
        return {"gain": float(np.mean(gains)), "load": load, "decisions": float(len(learned)), **said}

    def _play(self, episode: Episode, seed: int) -> tuple[float, list[Learned]]:
        options = self.options
        weights = options.weights
        heuristic = Dual(self._untrained, order_learned=False, placement_learned=False, patience_s=math.inf)
        usual_result = episode.play(heuristic)
        usual = Cost(usual_result, weights)
        self.agents.eval()
        result, decisions = play(episode, self.agents, seed)
        cost = Cost(result, weights)
        end_s = max(cost.end_s, usual.end_s)
        total, usual_total = float(cost.until(np.array(end_s))), float(usual.until(np.array(end_s)))
        gain = 1 - total / usual_total
        if not decisions:
            return gain, []
        times_s = np.array([decision.time_s for decision in decisions] + [end_s])
        rewards = compare_costs(times_s, result, usual_result, weights) / options.scale_s
        values = np.array([decision.value for decision in decisions] + [0.0])
        advantages = estimate_advantages(rewards, values, np.diff(times_s), options.horizon_s, options.trace_decay)
        return gain, [
            Learned(decision, float(advantage), float(advantage + value))
            for decision, advantage, value in zip(decisions, advantages, values[:-1], strict=True)
        ]

    def _improve(self, learned: list[Learned], random: np.random.Generator) -> dict[str, float]:
        options = self.options
        raw = np.array([entry.advantage for entry in learned])
        scaled = np.clip((raw - raw.mean()) / (raw.std() + 1e-6), -_FARTHEST, _FARTHEST)
        sums: dict[str, float] = {}
        self.agents.train()
        num_batches = 0
        for _ in range(options.steps):
            order = random.permutation(len(learned))
            for begin in range(0, len(order), options.minibatch):
                batch = order[begin : begin + options.minibatch]
                mean = losses_of(self.agents, [learned[i] for i in batch], scaled[batch], options.clip)
                total = mean["order_loss"] + mean["place_loss"] + mean["hold_loss"] + 0.5 * mean["value_loss"]
                total = total + options.forecast * mean["forecast_loss"] - options.entropy * mean["entropy"]
                if not torch.isfinite(total):
                    raise SchedulingError(
                        f"training has diverged in iteration {self.iteration}; lower the learning rate"
                    )
                self._optimizer.zero_grad()
                total.backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(self.agents.parameters(), 0.5)
                self._optimizer.step()
                num_batches += 1
                for name, value in mean.items():
                    sums[name] = sums.get(name, 0.0) + float(value.detach())
        return {name: value / num_batches for name, value in sums.items()}

    # The best so far

    def consider(self, validated: float) -> float:
        """Keeps the agents as they are if they do better than those kept; returns what was given."""
        if validated > self._best[0]:
            state = {name: tensor.clone() for name, tensor in self.agents.state_dict().items()}
            self._best = (validated, state)
        return validated

    def best(self) -> Agents:
        """Returns the agents that did best, or the last if none has been considered."""
        if self._best[1]:
            self.agents.load_state_dict(self._best[1])
        if self._seen:  # by all of the training: agents that did best at its beginning had seen little
            self.agents.remember(torch.stack(self._seen))
        return self.agents

    # Checkpoints

    def save(self, path: Path) -> None:
        """Writes a checkpoint, all of it or nothing."""
        content = {
            "agents": self.agents.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "iteration": self.iteration,
            "seen": torch.stack(self._seen) if self._seen else torch.empty(0, 0),
            "best": self._best,
            "options": asdict(self.options),
        }
        write_atomically(path, lambda temporary: torch.save(content, temporary))

    def resume(self, path: Path) -> None:
        """Goes on from a checkpoint.

        Raises:
            SchedulingError: It cannot be read, or was made with other options (the number of iterations may rise only
                if the curriculum does not depend on it: it does, so it must be the same).
        """
        try:
            content: dict[str, Any] = torch.load(path, weights_only=True)
            options = content["options"]
        except (OSError, RuntimeError, KeyError, ValueError, EOFError, pickle.UnpicklingError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise SchedulingError(f"{path} cannot be read as a checkpoint: {reason}") from None
        mine = asdict(self.options)
        other = [name for name in mine if options.get(name) != mine[name]]
        if other:
            name = other[0]
            raise SchedulingError(
                f"{path} was made with {name}={options.get(name)!r}, not {mine[name]!r}; resume with the same options"
            )
        self.agents.load_state_dict(content["agents"])
        self._optimizer.load_state_dict(content["optimizer"])
        self.iteration = content["iteration"]
        self._seen = list(content["seen"])
        self._best = content["best"]


def estimate_advantages(
    rewards: np.ndarray, values: np.ndarray, elapsed_s: np.ndarray, horizon_s: float, trace_decay: float
) -> np.ndarray:
    """Computes GAE over unevenly spaced decisions.

    Args:
        rewards: (N,), between each decision and the next.
        values: (N + 1,), expected at each, and at the end.
        elapsed_s: (N,), from each decision to the next.
        horizon_s: The discount is exp(-elapsed / horizon).
        trace_decay: lambda.

    Returns:
        (N,) float64.
    """
    advantages = np.zeros(len(rewards))
    later = 0.0
    for i in reversed(range(len(rewards))):
        discount = math.exp(-elapsed_s[i] / horizon_s)
        surprise = rewards[i] + discount * values[i + 1] - values[i]
        later = advantages[i] = surprise + discount * trace_decay * later
    return advantages


class Validation:
    """Episodes that nothing is learned from, to tell which agents do best.

    Args:
        episodes: Played by the agents, and once by the heuristic.
        options: The weights of fees and lateness count.
    """

    def __init__(self, episodes: Sequence[Episode], options: Options) -> None:
        self._episodes = episodes
        self._weights = options.weights
        self._usual = self._cost(Agents(), False)

    def gain(self, agents: Agents) -> float:
        """Returns the share of the heuristic's cost that agents save when they do not try things out."""
        return 1 - self._cost(agents, True) / self._usual

    def _cost(self, agents: Agents, learned: bool) -> float:
        total = 0.0
        for episode in self._episodes:
            policy = Dual(
                agents.eval(),
                order_learned=learned,
                placement_learned=learned,
                budget_s=math.inf,
                patience_s=math.inf,
                strange=math.inf,
            )
            cost = Cost(episode.play(policy), self._weights)
            total += float(cost.until(np.array(cost.end_s)))
        return total


def run(
    training: Training,
    *,
    checkpoint: Path | None = None,
    every: int = 10,
    validation: Validation | None = None,
    report: Callable[[int, dict[str, float]], None] = lambda iteration, said: None,
) -> Agents:
    """Trains to the end of the options' iterations.

    Args:
        training: New, or resumed.
        checkpoint: Written every so many iterations, and at the end; None: never.
        every: How many.
        validation: Asked as often; the agents that did best are returned, which may be the untrained ones. None: the
            last ones are.
        report: Is told the number of each iteration and what `Training.step` returned, with ``validated`` when it was.

    Returns:
        The agents.
    """
    if validation is not None and training.iteration == 0:
        training.consider(validation.gain(training.agents))
    while training.iteration < training.options.iterations:
        said = training.step()
        due = training.iteration % every == 0 or training.iteration == training.options.iterations
        if due and validation is not None:
            said["validated"] = training.consider(validation.gain(training.agents))
        report(training.iteration, said)
        if due and checkpoint is not None:
            training.save(checkpoint)
    return training.best().eval()
