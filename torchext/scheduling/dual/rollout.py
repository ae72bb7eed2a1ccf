"""Episodes to train on: pieces of a trace at a wanted load, played by agents that sample, with notes of each choice."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchext.scheduling import synthetic
from torchext.scheduling.dual.networks import Agents, Ordered, log_choice, log_hold
from torchext.scheduling.dual.policy import Dual
from torchext.scheduling.placements import packed
from torchext.scheduling.simulator import RecordedJob, Result, World, simulate, teach
from torchext.scheduling.state import ClusterState
from torchext.scheduling.types import Cluster, Job, Placement, SchedulingError, Shape

_TAUGHT_JOBS = 2000  # ended before an episode begins, that forecasts come from
_SHORTEST_S = 10.0  # for logs


@dataclass(frozen=True)
class Episode:
    """Jobs, what came before them, and where they run.

    Args:
        earlier: Jobs that forecasts may be learned from.
        jobs: By submission.
        cluster: The machines.
        world_seed: Of the synthetic world; None: the world is as the cluster's tables say.
    """

    earlier: Sequence[RecordedJob]
    jobs: Sequence[RecordedJob]
    cluster: Cluster
    world_seed: int | None

    def play(self, policy: Dual) -> Result:
        """Simulates the episode; the policy is first taught what came before."""
        begin_s = self.jobs[0].job.submit_s
        teach(policy, self.earlier, begin_s)
        world: World | None = None
        if self.world_seed is not None:
            world = synthetic.SyntheticWorld(self.cluster, self.world_seed, begin_s)
        return simulate(self.jobs, self.cluster, policy, world=world)


def draw_episode(
    trace: Sequence[RecordedJob],
    cluster: Cluster,
    random: np.random.Generator,
    *,
    num_jobs: int,
    load: float,
    is_synthetic: bool,
    earlier: Sequence[RecordedJob] = (),
) -> Episode:
    """Cuts a piece out of a trace, leaving jobs out at random (or pushing them together) until the load is as wanted.

    Args:
        trace: By submission; with classes, if the cluster tells them apart.
        cluster: The machines.
        random: Decides which piece, which jobs and which world.
        num_jobs: How many jobs, about.
        load: GPU-seconds asked for per GPU-second of the cluster at its mean speed.
        is_synthetic: Whether jobs run in the synthetic world.
        earlier: What came before the trace, to be learned from.

    Raises:
        SchedulingError: The trace has fewer than two jobs that fit on the cluster.
    """
    capacity = sum(machine.num_gpus for machine in cluster.machines)
    fitting = [r for r in trace if r.job.num_gpus <= capacity // 2]
    if len(fitting) < 2:
        raise SchedulingError("the trace has not two jobs of at most half of the cluster's GPUs")
    speed = synthetic.mean_speed(cluster) if is_synthetic else 1.0
    span_s = fitting[-1].job.submit_s - fitting[0].job.submit_s
    asked = sum(r.duration_s * r.job.num_gpus for r in fitting) / max(span_s, 1.0)
    # By the load of the whole trace: pieces stay as busy or idle as they are.
    kept = load * capacity * speed / max(asked, 1e-9)
    share = min(kept, 1.0)
    length = min(len(fitting), math.ceil(num_jobs / share))
    begin = int(random.integers(len(fitting) - length + 1))
    chosen = [r for r in fitting[begin : begin + length] if random.random() < share] or fitting[begin : begin + 1]
    if kept > 1.0:
        start_s = chosen[0].job.submit_s
        chosen = [replace(r, job=replace(r.job, submit_s=start_s + (r.job.submit_s - start_s) / kept)) for r in chosen]
    past = [*earlier, *fitting[:begin]][-_TAUGHT_JOBS:]
    return Episode(past, chosen, cluster, int(random.integers(2**31)) if is_synthetic else None)


@dataclass
class Choice:
    """One choice of a machine: candidates (N, F), the job (F,), the row taken, and its log probability then."""

    machines: Tensor
    job: Tensor
    chosen: int
    log_p: float


@dataclass
class Hold:
    """One choice to leave a job waiting: its features (F,), the job (F,), what was chosen, its log probability."""

    features: Tensor
    job: Tensor
    declined: bool
    log_p: float


@dataclass
class Decision:
    """What was seen and chosen at one moment.

    Args:
        time_s: When.
        jobs: (Q, F) waiting.
        cluster: (F,).
        truth: (Q,) log hours that the jobs will take at speed 1.
        value: What the critic expected.
        orders: Of each choice of a job: which rows were allowed, (Q + 1,) bool, the last being to wait; the one
            taken; its log probability then.
        places: Choices of machines.
        holds: Choices to wait for better ones.
    """

    time_s: float
    jobs: Tensor
    cluster: Tensor
    truth: Tensor
    value: float
    orders: list[tuple[Tensor, int, float]] = field(default_factory=list)
    places: list[Choice] = field(default_factory=list)
    holds: list[Hold] = field(default_factory=list)


class Explorer:
    """Samples what the agents choose from, and notes it.

    The order is sampled by adding Gumbel noise to the logits: that makes the first job that fits, and each after it, a
    draw from the softmax over those that fit then.

    Args:
        generator: Of the random numbers.
        durations_s: True running times at speed 1, by id: noted, but no part of any choice.
    """

    def __init__(self, generator: torch.Generator, durations_s: Mapping[str, float]) -> None:
        self.decisions: list[Decision] = []
        self._generator = generator
        self._log_h = {job_id: math.log(max(s, _SHORTEST_S) / 3600.0) for job_id, s in durations_s.items()}
        self._open: tuple[Decision, Sequence[Job], Tensor, ClusterState] | None = None
        self._walked: list[tuple[Job, Placement | None]] = []
        self._sampled: list[Choice] = []
        self._held: list[Hold] = []

    def order(self, jobs: Sequence[Job], seen: tuple[Tensor, Tensor], said: Ordered, state: ClusterState) -> Ordered:
        """Perturbs the scores and begins a decision."""
        self.close()
        every = torch.cat([said.logits, said.wait[None]])
        truth = torch.tensor([self._log_h[job.id] for job in jobs])
        decision = Decision(state.now_s, seen[0], seen[1], truth, float(said.value))
        self._open = (decision, jobs, every, state.copy())
        noise = -torch.log(-torch.log(torch.rand(len(every), generator=self._generator).clamp(1e-10, 1 - 1e-7)))
        return said._replace(logits=said.logits + noise[:-1], wait=said.wait + noise[-1])

    def place(self, job: Job, seen: tuple[Tensor, Tensor], logits: Tensor) -> int:
        """Samples a machine."""
        log_p = torch.log_softmax(logits, dim=0)
        chosen = int(torch.multinomial(log_p.exp(), 1, generator=self._generator))
        self._sampled.append(Choice(seen[0], seen[1], chosen, float(log_p[chosen])))
        return chosen

    def decline(self, job: Job, seen: tuple[Tensor, Tensor], logit: Tensor) -> bool:
        """Samples whether to wait."""
        declined = bool(torch.rand((), generator=self._generator) < torch.sigmoid(logit))
        log_p = float(log_hold(logit, declined))
        self._held.append(Hold(seen[0], seen[1], declined, log_p))
        return declined

    def placed(self, job: Job, placement: Placement | None) -> None:
        """Notes a start, or that it was declined."""
        self._walked.append((job, placement))

    def close(self) -> None:
        """Ends the decision that is open: finds out what the choices were made from."""
        walked, sampled, held = self._walked, self._sampled, self._held
        self._walked, self._sampled, self._held = [], [], []
        if self._open is None:
            return
        decision, jobs, every, state = self._open
        self._open = None
        rows = {job.id: row for row, job in enumerate(jobs)}
        may_wait = bool(state.running)  # as `Dual.order` has it, for the whole of one decision
        waiting = torch.ones(len(jobs) + 1, dtype=torch.bool)
        for job, placement in [*walked, (None, None)]:
            allowed = _fitting(jobs, state) & waiting
            allowed[-1] = may_wait
            if not allowed[:-1].any():
                break  # no choice
            row = len(jobs) if job is None else rows[job.id]
            if job is None and not may_wait:
                break
            log_p = float(log_choice(every, allowed, row))
            decision.orders.append((allowed, row, log_p))
            if job is not None and placement is not None:
                state.start(job, placement)
                waiting[row] = False
            elif job is not None:  # declined, for all of its shape
                waiting[:-1] &= torch.tensor([other.shape != job.shape for other in jobs])
        decision.places = [choice for choice in sampled if len(choice.machines) > 1]
        decision.holds = held
        if decision.orders:
            self.decisions.append(decision)


def _fitting(jobs: Sequence[Job], state: ClusterState) -> Tensor:
    """Which jobs fit now, (Q + 1,) bool; the last, to wait, is left for the caller."""
    known: dict[Shape, bool] = {}
    fits = torch.zeros(len(jobs) + 1, dtype=torch.bool)
    for row, job in enumerate(jobs):
        if job.shape not in known:
            known[job.shape] = packed(job, state) is not None
        fits[row] = known[job.shape]
    return fits


class Weights(NamedTuple):
    """What else costs something.

    Args:
        fee: Job-seconds that one unit of fees counts.
        late: Job-seconds that one second of lateness counts.
    """

    fee: float = 0.0
    late: float = 0.0


_NO_WEIGHTS = Weights()


class Cost:
    """What a simulation has cost up to any time: job-seconds in the system, and what else has a weight.

    Args:
        result: What happened.
        weights: Of fees and lateness.
        upfront: Whether all that the runs of a job will cost counts just after it has first been started, and only
            waiting and lateness as they happen. The sum is the same in the end, and nearer to the choices behind it.
    """

    def __init__(self, result: Result, weights: Weights = _NO_WEIGHTS, *, upfront: bool = False) -> None:
        submit_s = np.array([r.job.submit_s for r in result.jobs])
        self.run_costs = result.finish_s - result.start_s  # (num_jobs,) of each job, from its first start
        spans = [(submit_s, result.start_s if upfront else result.finish_s, np.ones(len(submit_s)))]
        if weights.fee:
            prices = [machine.price_per_gpu_hour / 3600 for machine in result.cluster.machines]
            rates = [sum(prices[index] * gpus for index, gpus in run.placement.gpus) for run in result.runs]
            begin_s, end_s = np.array([(run.start_s, run.end_s) for run in result.runs]).T
            fees = weights.fee * np.array(rates)
            np.add.at(self.run_costs, [run.job for run in result.runs], fees * (end_s - begin_s))
            if not upfront:
                spans.append((begin_s, end_s, fees))
        if weights.late:
            deadline_s = np.array([math.inf if r.job.deadline_s is None else r.job.deadline_s for r in result.jobs])
            late = deadline_s < result.finish_s
            spans.append((deadline_s[late], result.finish_s[late], np.full(late.sum(), weights.late)))
        begin_s, end_s, weight = (np.concatenate(parts) for parts in zip(*spans, strict=True))
        # The slope of the cost changes by +weight where a span begins and by -weight where it ends.
        times_s = np.concatenate([begin_s, end_s])
        order = np.argsort(times_s, kind="stable")
        self._times_s = times_s[order]
        slopes = np.cumsum(np.concatenate([weight, -weight])[order])
        self._costs = np.concatenate([[0.0], np.cumsum(slopes[:-1] * np.diff(self._times_s))])
        self.end_s = float(result.finish_s.max())
        self.pay_at(result.start_s, self.run_costs if upfront else np.zeros(len(submit_s)))

    def pay_at(self, times_s: np.ndarray, amounts: np.ndarray) -> None:
        """Counts amounts just after some times, (N,) each, in place of what was counted at the starts."""
        order = np.argsort(times_s, kind="stable")
        self._paid_s = times_s[order]
        self._paid = np.concatenate([[0.0], np.cumsum(amounts[order])])

    def until(self, now_s: np.ndarray) -> np.ndarray:
        """Returns the cost up to each time."""
        so_far = np.interp(now_s, self._times_s, self._costs)
        cost: np.ndarray = so_far + self._paid[np.searchsorted(self._paid_s, now_s, side="left")]
        return cost


def compare_costs(times_s: np.ndarray, result: Result, usual: Result, weights: Weights = _NO_WEIGHTS) -> np.ndarray:
    """Computes by how much less was paid between decisions than in another simulation of the same jobs.

    What a job's runs cost is compared with what that job's runs had cost there, whenever it was started.

    Args:
        times_s: (N + 1,), of N decisions and of the end.
        result: What happened.
        usual: What happened elsewhere.
        weights: Of fees and lateness.

    Returns:
        (N,) job-seconds; the sum is all that was saved after the first decision.
    """
    ours, theirs = Cost(result, weights, upfront=True), Cost(usual, weights, upfront=True)
    index = {recorded.job.id: i for i, recorded in enumerate(usual.jobs)}
    same = [index[recorded.job.id] for recorded in result.jobs]
    # Their waiting as it happened, but their runs when ours began.
    theirs.pay_at(result.start_s, theirs.run_costs[same])
    return np.diff(theirs.until(times_s)) - np.diff(ours.until(times_s))


def play(episode: Episode, agents: Agents, seed: int) -> tuple[Result, list[Decision]]:
    """Plays an episode with agents that sample.

    Returns:
        What happened, and all decisions in which there was something to choose.
    """
    durations_s = {recorded.job.id: recorded.duration_s for recorded in episode.jobs}
    explorer = Explorer(torch.Generator().manual_seed(seed), durations_s)
    policy = Dual(agents, budget_s=math.inf, patience_s=math.inf, strange=math.inf, chooser=explorer)
    result = episode.play(policy)
    explorer.close()
    return result, explorer.decisions
