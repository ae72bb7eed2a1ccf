"""Replays recorded jobs under a policy, event by event, in simulated time.

What it models: gangs over several machines, speeds by machine type and class of job, jobs that slow each other
down on one machine, machines that fail and come back, and what stopping and resuming costs. The same input gives
the same output, to the bit.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from torchext.scheduling.scheduler import Scheduler
from torchext.scheduling.state import ClusterState, Running
from torchext.scheduling.types import (
    Cluster,
    Job,
    Learns,
    Observation,
    Observes,
    Placement,
    Policy,
    SchedulingError,
    Start,
    Steps,
)

# Kinds of events, in the order in which those of one moment happen; submissions come last.
_FINISH, _REPAIR, _FAIL, _STEP, _DRIFT = range(5)
# In less time than this, no speed can be measured.
_MEASURABLE_S = 60.0


@dataclass(frozen=True, slots=True)
class RecordedJob:
    """A job of a trace, with what only the simulator (and oracles) may know.

    Args:
        job: What its user said.
        duration_s: How long it runs on machines of speed 1, undisturbed.
    """

    job: Job
    duration_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.duration_s < math.inf:
            raise ValueError(f"job {self.job.id}: duration_s must be finite and not negative, got {self.duration_s}")


class Outage(NamedTuple):
    """A machine is away from `start_s` until before `end_s` (inf: it never comes back); jobs on it stop at once."""

    machine: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Costs:
    """What stopping and resuming costs. GPUs are held meanwhile, without progress.

    Args:
        checkpoint_s: From the order to stop until the GPUs are free for the next job: time to save a checkpoint.
        restart_s: From getting GPUs until progress, for a job that was stopped before: time to load it.
        checkpoint_interval_s: Work between two periodic checkpoints, in seconds at speed 1: what a failing machine
            costs at most. inf: a job saves only when it is asked to stop.

    Raises:
        ValueError: A time is negative, or the interval is 0.
    """

    checkpoint_s: float = 0.0
    restart_s: float = 0.0
    checkpoint_interval_s: float = math.inf

    def __post_init__(self) -> None:
        if not (0 <= self.checkpoint_s < math.inf and 0 <= self.restart_s < math.inf):
            raise ValueError("checkpoint_s and restart_s must be finite and not negative")
        if not self.checkpoint_interval_s > 0:
            raise ValueError(f"checkpoint_interval_s must be positive, got {self.checkpoint_interval_s}")


class World(Protocol):
    """How fast jobs truly run, as opposed to what policies believe."""

    @property
    def contended(self) -> bool:
        """Whether a job's speed depends on the other jobs on its machines."""
        ...

    def speed(self, job: Job, placement: Placement, state: ClusterState) -> float:
        """Returns the speed of a running job, above 0; asked when it starts, and when its neighbours change."""
        ...


@runtime_checkable
class Drifts(Protocol):
    """A world whose machines change their speed at known moments, and are constant in between."""

    def next_change_s(self, machine: int, now_s: float) -> float:
        """Returns when the speed of a machine changes next, after `now_s`; inf if never."""
        ...


@dataclass(frozen=True)
class TableWorld:
    """A world that behaves as the cluster's own tables say."""

    cluster: Cluster

    @property
    def contended(self) -> bool:
        """Whether any class loses speed to neighbours."""
        return any(self.cluster.contention.values())

    def speed(self, job: Job, placement: Placement, state: ClusterState) -> float:
        """Returns `ClusterState.speed`."""
        return state.speed(job, placement)


class Run(NamedTuple):
    """One stretch of time in which a job held GPUs.

    Args:
        job: Index in `Result.jobs`.
        placement: Where.
        start_s: When it got them.
        end_s: When it gave them back.
        outcome: "finished", "displaced" or "failed" (its machine did).
    """

    job: int
    placement: Placement
    start_s: float
    end_s: float
    outcome: str


@dataclass(frozen=True, eq=False)
class Result:
    """What happened.

    Attributes:
        cluster: The cluster.
        jobs: All jobs that ran, by submission; arrays and runs refer to these.
        rejected: Jobs that do not even fit on the empty cluster, left out of everything else.
        start_s: (num_jobs,) float64, first start of each.
        finish_s: (num_jobs,) float64, end of each.
        runs: In the order they ended.
        num_events: Submissions, starts, stops, failures, repairs, rises of score and drifts of a machine in use.
    """

    cluster: Cluster
    jobs: tuple[RecordedJob, ...]
    rejected: tuple[RecordedJob, ...]
    start_s: np.ndarray
    finish_s: np.ndarray
    runs: list[Run]
    num_events: int


def simulate(
    trace: Iterable[RecordedJob],
    cluster: Cluster,
    policy: Policy,
    *,
    outages: Iterable[Outage] = (),
    costs: Costs | None = None,
    world: World | None = None,
) -> Result:
    """Runs recorded jobs under a policy until all have finished.

    At each moment all that happens is taken in first (ends, repairs, failures, rises of score, submissions, in this
    order), then the policy decides.

    Args:
        trace: The jobs, in any order; equal submission times keep the order given.
        cluster: The machines.
        policy: A new policy; it learns as jobs end. `teach` may have shown it earlier jobs.
        outages: When machines are away; those of one machine must not overlap.
        costs: Of stopping and resuming; None is free, and without periodic checkpoints.
        world: How fast jobs truly run; None: as the cluster's tables say.

    Raises:
        SchedulingError: Two jobs of one id, overlapping outages, a speed that is not above 0, or jobs that can
            never start because the policy refuses them or their machines stay away.
    """
    ordered = sorted(trace, key=lambda recorded: recorded.job.submit_s)
    state = ClusterState(cluster)
    fits: dict[object, bool] = {}
    for recorded in ordered:
        key = recorded.job.shape
        if key not in fits:
            fits[key] = policy.place(recorded.job, state) is not None
    jobs = tuple(recorded for recorded in ordered if fits[recorded.job.shape])
    rejected = tuple(recorded for recorded in ordered if not fits[recorded.job.shape])
    simulation = _Simulation(jobs, state, policy, costs or Costs(), world or TableWorld(cluster))
    simulation.plan_outages(outages)
    simulation.run()
    return Result(
        cluster=cluster,
        jobs=jobs,
        rejected=rejected,
        start_s=np.array(simulation.first_start_s, dtype=np.float64),
        finish_s=np.array(simulation.finish_s, dtype=np.float64),
        runs=simulation.runs,
        num_events=simulation.num_events,
    )


def teach(policy: Policy, trace: Iterable[RecordedJob], before_s: float) -> None:
    """Shows a policy that learns the jobs that would have ended before some time had they never waited."""
    if not isinstance(policy, Learns):
        return
    ended = [(r.job.submit_s + r.duration_s, r) for r in trace if r.job.submit_s + r.duration_s < before_s]
    for _, recorded in sorted(ended, key=lambda pair: pair[0]):
        policy.finished(recorded.job, recorded.duration_s, recorded.duration_s)


def random_outages(
    cluster: Cluster, *, mean_up_s: float, mean_down_s: float, until_s: float, start_s: float = 0.0, seed: int = 0
) -> list[Outage]:
    """Draws outages with exponential times between failures and to repair, each machine by itself.

    Args:
        cluster: The machines.
        mean_up_s: Mean time from a repair to the next failure.
        mean_down_s: Mean time to repair.
        until_s: No failure begins later.
        start_s: All machines work then.
        seed: Of the random numbers; a machine's outages do not depend on how many others there are.
    """
    outages = []
    for machine in range(len(cluster.machines)):
        random = np.random.default_rng([seed, machine])
        now_s = start_s + random.exponential(mean_up_s)
        while now_s < until_s:
            back_s = now_s + random.exponential(mean_down_s)
            outages.append(Outage(machine, float(now_s), float(back_s)))
            now_s = back_s + random.exponential(mean_up_s)
    return outages


class _Simulation:
    def __init__(
        self, jobs: Sequence[RecordedJob], state: ClusterState, policy: Policy, costs: Costs, world: World
    ) -> None:
        self._jobs = jobs
        self._state = state
        self._scheduler = Scheduler(policy, state)
        self._costs = costs
        self._world = world
        self._contended = world.contended
        self._drifts = world if isinstance(world, Drifts) else None
        self._drift_planned: set[int] = set()  # machines; those without jobs have no events
        self._observer = policy if isinstance(policy, Observes) else None
        self._crowding: list[tuple[float, ...]] = [()] * len(jobs)  # at the present speed, for the observer
        self._steps = policy if policy.preemptive and isinstance(policy, Steps) else None
        self._index = {recorded.job.id: i for i, recorded in enumerate(jobs)}
        if len(self._index) < len(jobs):
            raise SchedulingError("two jobs of the trace have one id; ids must differ")
        self._heap: list[tuple[float, int, int]] = []  # (time, kind, job or machine)
        # An event of a job counts only if it is the one that was planned last.
        self._end_s = [math.inf] * len(jobs)
        self._step_s = [math.inf] * len(jobs)
        self._saved_s = [0.0] * len(jobs)  # progress in the checkpoint of the last stop
        self._touched: set[int] = set()  # machines whose jobs have changed
        self.first_start_s = [math.inf] * len(jobs)
        self.finish_s = [math.inf] * len(jobs)
        self.runs: list[Run] = []
        self.num_events = 0

    def plan_outages(self, outages: Iterable[Outage]) -> None:
        last_s: dict[int, float] = {}
        for machine, start_s, end_s in sorted(outages):
            if not 0 <= machine < len(self._state.free):
                raise SchedulingError(f"an outage names machine {machine}; there are {len(self._state.free)}, from 0")
            if not last_s.get(machine, -math.inf) <= start_s < end_s:
                raise SchedulingError(f"outages of machine {machine} overlap or end before they start, at {start_s} s")
            last_s[machine] = end_s
            heapq.heappush(self._heap, (start_s, _FAIL, machine))
            if end_s < math.inf:
                heapq.heappush(self._heap, (end_s, _REPAIR, machine))

    def run(self) -> None:
        heap, state, scheduler = self._heap, self._state, self._scheduler
        submissions = [recorded.job for recorded in self._jobs]
        handle = (self._finish, self._repair, self._fail, self._step, self._drift)
        num_submitted, num_jobs = 0, len(submissions)
        self._num_left = num_jobs
        next_s = submissions[0].submit_s if submissions else math.inf
        while self._num_left:
            now_s = min(heap[0][0], next_s) if heap else next_s
            if now_s == math.inf:
                raise SchedulingError(self._stuck())
            state.now_s = now_s
            num_before = self.num_events
            while heap and heap[0][0] == now_s:
                _, kind, index = heapq.heappop(heap)
                handle[kind](index)
            while next_s == now_s:
                scheduler.submit(submissions[num_submitted])
                num_submitted += 1
                self.num_events += 1
                next_s = submissions[num_submitted].submit_s if num_submitted < num_jobs else math.inf
            if self.num_events == num_before:
                continue  # all that was planned for now has been called off since
            for start in scheduler.decide():
                self._start(start)
            if self._touched:
                self._update_neighbours()

    # Events

    def _finish(self, index: int) -> None:
        if self._end_s[index] != self._state.now_s:
            return  # stopped, or faster or slower since this was planned
        job = self._jobs[index].job
        self._record(self._state.running[job.id], index, "finished")
        self.finish_s[index] = self._state.now_s
        self._num_left -= 1
        self._scheduler.finish(job)

    def _fail(self, machine: int) -> None:
        self.num_events += 1
        self._scheduler.close(machine)
        for job in self._state.jobs_on(machine):
            index = self._index[job.id]
            running = self._state.running[job.id]
            self._record(running, index, "failed")
            every_s = self._costs.checkpoint_interval_s
            if every_s < math.inf:
                saved_s = math.floor(running.progress(self._state.now_s) / every_s) * every_s
                self._saved_s[index] = max(self._saved_s[index], saved_s)
            self._scheduler.evict(job, self._saved_s[index])

    def _repair(self, machine: int) -> None:
        self.num_events += 1
        self._scheduler.open(machine)

    def _step(self, index: int) -> None:
        if self._step_s[index] != self._state.now_s:
            return
        self.num_events += 1
        job = self._jobs[index].job
        self._scheduler.rescored(job)
        self._plan_step(index, self._state.running[job.id])

    def _drift(self, machine: int) -> None:
        self._drift_planned.remove(machine)
        if self._state.jobs_on(machine):
            self.num_events += 1
            self._touched.add(machine)
            self._plan_drift(machine)

    # Decisions

    def _start(self, start: Start) -> None:
        state, costs = self._state, self._costs
        index = self._index[start.job.id]
        for stopped in start.displaced:
            other = self._index[stopped.job.id]
            self._record(stopped, other, "displaced")
            self._saved_s[other] = stopped.progress(state.now_s)
        self.num_events += 1
        running = state.running[start.job.id]
        if start.displaced:
            running.mark_s += costs.checkpoint_s
        if self.first_start_s[index] == math.inf:
            self.first_start_s[index] = state.now_s
        else:
            running.mark_s += costs.restart_s
        if self._contended:
            self._touched.update(machine for machine, _ in start.placement.gpus)
        else:
            self._set_speed(index, running)
        if self._steps is not None:
            self._plan_step(index, running)
        if self._drifts is not None:
            for machine, _ in start.placement.gpus:
                self._plan_drift(machine)

    def _record(self, running: Running, index: int, outcome: str) -> None:
        """Notes that a run ends now."""
        self.num_events += 1
        if self._observer is not None:
            self._observe(running, index)
        self._end_s[index] = self._step_s[index] = math.inf
        self.runs.append(Run(index, running.placement, running.start_s, self._state.now_s, outcome))
        if self._contended:
            self._touched.update(machine for machine, _ in running.placement.gpus)

    def _update_neighbours(self) -> None:
        """Sets the speed of all jobs on machines where jobs have come or gone."""
        affected = {self._index[job.id]: job for machine in self._touched for job in self._state.jobs_on(machine)}
        self._touched.clear()
        for index, job in affected.items():
            self._set_speed(index, self._state.running[job.id])

    def _set_speed(self, index: int, running: Running) -> None:
        """Takes a running job's speed from the world and plans its end."""
        now_s = self._state.now_s
        speed = self._world.speed(running.job, running.placement, self._state)
        if not 0 < speed < math.inf:
            raise SchedulingError(f"the world gave job {running.job.id!r} the speed {speed}; it must be above 0")
        if speed == running.speed:
            return
        if self._observer is not None:
            self._observe(running, index)
            self._crowding[index] = self._state.crowding(running.placement)
        if now_s > running.mark_s:
            running.progress_s = running.progress(now_s)
            running.mark_s = now_s
        running.speed = speed
        left_s = max(self._jobs[index].duration_s - running.progress_s, 0.0)  # below 0 by rounding only
        end_s = self._end_s[index] = running.mark_s + left_s / speed
        heapq.heappush(self._heap, (end_s, _FINISH, index))

    def _observe(self, running: Running, index: int) -> None:
        """Tells the policy how fast a job has run since its speed changed last."""
        assert self._observer is not None
        now_s = self._state.now_s
        if running.speed and now_s - running.mark_s >= _MEASURABLE_S:
            crowding = self._crowding[index]
            self._observer.observed(
                Observation(running.job, running.placement, running.speed, crowding, running.mark_s, now_s)
            )

    def _plan_drift(self, machine: int) -> None:
        """Plans when a machine that is in use changes its speed next."""
        assert self._drifts is not None
        if machine not in self._drift_planned:
            at_s = self._drifts.next_change_s(machine, self._state.now_s)
            if at_s < math.inf:
                self._drift_planned.add(machine)
                heapq.heappush(self._heap, (at_s, _DRIFT, machine))

    def _plan_step(self, index: int, running: Running) -> None:
        """Plans when a running job's score rises next."""
        assert self._steps is not None
        service = running.service_gpu_s(self._state.now_s)
        missing = self._steps.next_step(running.job, service) - service
        self._step_s[index] = self._state.now_s + missing / running.job.num_gpus
        if self._step_s[index] < math.inf:
            heapq.heappush(self._heap, (self._step_s[index], _STEP, index))

    def _stuck(self) -> str:
        left = [r.job.id for r, finish_s in zip(self._jobs, self.finish_s, strict=True) if finish_s == math.inf]
        return (
            f"{len(left)} jobs can never start, the first is {left[0]!r}: nothing runs any more and no machine comes "
            "back, so either the policy refuses them or too many machines stay away"
        )
