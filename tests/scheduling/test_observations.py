"""Machines that change their speed while jobs run, and what a policy is told of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest

from torchext.scheduling import (
    FIFO,
    Cluster,
    ClusterState,
    Costs,
    FIFOFirstFit,
    Job,
    Machine,
    Observation,
    Observes,
    Outage,
    Placement,
    RecordedJob,
    SchedulingError,
    simulate,
)


@dataclass(frozen=True)
class Watching(FIFOFirstFit):
    seen: list[Observation] = field(default_factory=list)

    def observed(self, observation: Observation) -> None:
        self.seen.append(observation)


@dataclass
class Slowing:
    """Each machine runs at 1 / (1 + number of its changes so far), with a change every 100 s."""

    contended: bool = False

    def speed(self, job: Job, placement: Placement, state: ClusterState) -> float:
        return 1.0 / (1.0 + math.floor(state.now_s / 100.0))

    def next_change_s(self, machine: int, now_s: float) -> float:
        return (math.floor(now_s / 100.0) + 1) * 100.0


def _job(name: str, submit_s: float, num_gpus: int, duration_s: float, job_class: str = "") -> RecordedJob:
    return RecordedJob(Job(name, submit_s, num_gpus, job_class=job_class), duration_s)


def test_a_job_runs_at_each_speed_for_as_long_as_it_holds() -> None:
    result = simulate([_job("a", 50.0, 1, 110.0)], Cluster.uniform(1, 1), FIFO(), world=Slowing())
    # 50 s at 1, 100 s at 1/2, then 10 s of work at 1/3.
    assert result.finish_s.tolist() == [pytest.approx(230.0)]
    assert result.num_events == 5


def test_a_drift_is_planned_only_for_machines_in_use() -> None:
    trace = [_job("a", 0.0, 1, 10.0), _job("b", 1000.0, 1, 10.0)]
    result = simulate(trace, Cluster.uniform(2, 1), FIFO(), world=Slowing())
    assert result.finish_s.tolist() == [10.0, pytest.approx(1100.0 + 12 * (10.0 - 100 / 11))]
    with pytest.raises(SchedulingError, match="1 jobs can never start"):
        simulate(trace[1:], Cluster.uniform(1, 1), FIFO(), world=Slowing(), outages=[Outage(0, 0.0, math.inf)])


def test_a_policy_that_observes_is_told_each_measurable_stretch() -> None:
    policy = Watching()
    assert isinstance(policy, Observes)
    simulate([_job("a", 40.0, 1, 110.0), _job("b", 0.0, 1, 30.0)], Cluster.uniform(1, 1), policy, world=Slowing())
    told = [(o.job.id, o.speed, o.start_s, o.end_s) for o in policy.seen]
    # "b", which ran for less than a minute, was too short to measure.
    assert told == [("a", 1.0, 40.0, 100.0), ("a", 0.5, 100.0, 200.0)]


def test_neighbours_end_a_stretch_and_are_told_as_they_were() -> None:
    policy = Watching()
    cluster = Cluster((Machine("a", 4),), contention={"x": 0.5})
    simulate([_job("a", 0.0, 2, 300.0, "x"), _job("b", 100.0, 1, 75.0, "y")], cluster, policy)
    told = [(o.job.id, o.speed, o.crowding, o.start_s, o.end_s) for o in policy.seen]
    assert told == [
        ("a", 1.0, (0.0,), 0.0, 100.0),
        ("b", 1.0, (pytest.approx(2 / 3),), 100.0, 175.0),
        ("a", 0.75, (0.5,), 100.0, 175.0),
        ("a", 1.0, (0.0,), 175.0, pytest.approx(318.75)),
    ]


def test_stops_by_failure_tell_too_and_loading_a_checkpoint_is_no_running() -> None:
    policy = Watching()
    costs = Costs(restart_s=100.0)
    simulate([_job("a", 0.0, 1, 200.0)], Cluster.uniform(1, 1), policy, outages=[Outage(0, 80.0, 90.0)], costs=costs)
    assert [(o.speed, o.start_s, o.end_s) for o in policy.seen] == [(1.0, 0.0, 80.0), (1.0, 190.0, 390.0)]
