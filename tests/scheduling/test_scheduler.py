from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from torchext.scheduling import (
    FIFO,
    LAS,
    QSSF,
    SRSF,
    Cluster,
    ClusterState,
    Discipline,
    FIFOFirstFit,
    Job,
    Machine,
    Placement,
    Policy,
    Scheduler,
    SchedulingError,
    packed,
)
from torchext.scheduling.explain import PlannedStart, plan


def _scheduler(policy: Policy, *sizes: int) -> Scheduler:
    return Scheduler(policy, ClusterState(Cluster(tuple(Machine(f"m{i}", size) for i, size in enumerate(sizes)))))


@dataclass(frozen=True)
class _Scored:
    """Scores by a table that the test may change."""

    discipline: ClassVar = Discipline.FIRST_FIT
    preemptive: ClassVar = False
    settled: ClassVar = False
    scores: dict[str, float] = field(default_factory=dict)

    def order(self, jobs: Sequence[Job], state: ClusterState) -> Sequence[float]:
        return [self.scores[job.id] for job in jobs]

    def place(self, job: Job, state: ClusterState) -> Placement | None:
        found = packed(job, state)
        return None if found is None else found._replace(speed=1.5, speed_sd=0.25)


def test_a_second_job_of_one_id_is_refused_until_the_first_has_ended() -> None:
    scheduler = _scheduler(FIFO(), 1)
    job = Job("a", 0.0, 1)
    scheduler.submit(job)
    with pytest.raises(SchedulingError, match="id 'a' is waiting or running"):
        scheduler.submit(Job("a", 1.0, 1))
    scheduler.decide()
    with pytest.raises(SchedulingError, match="id 'a' is waiting or running"):
        scheduler.submit(Job("a", 1.0, 1))
    scheduler.finish(job)
    scheduler.submit(Job("a", 2.0, 1))
    assert scheduler.num_waiting == 1


def test_scores_may_change_between_decisions_and_inf_holds_a_job_back() -> None:
    policy = _Scored({"a": math.inf, "b": 2.0, "c": 1.0})
    scheduler = Scheduler(policy, ClusterState(Cluster.uniform(1, 1)))
    for i, name in enumerate("abc"):
        scheduler.submit(Job(name, float(i), 1))
    first = scheduler.decide()
    assert [start.job.id for start in first] == ["c"]
    assert [job.id for _, job in scheduler.waiting()] == ["b", "a"]
    policy.scores.update(a=0.0)
    scheduler.finish(first[0].job)
    assert [start.job.id for start in scheduler.decide()] == ["a"]
    policy.scores.update(b=math.inf)
    scheduler.finish(scheduler.state.jobs_on(0)[0])
    assert scheduler.decide() == []
    assert scheduler.state.num_free == 1


def test_policies_that_do_not_keep_their_contract_are_named() -> None:
    @dataclass(frozen=True)
    class NotANumber(FIFO):
        def order(self, jobs: Sequence[Job], state: ClusterState) -> Sequence[float]:
            return [math.nan for _ in jobs]

    @dataclass(frozen=True)
    class TooFew(_Scored):
        def order(self, jobs: Sequence[Job], state: ClusterState) -> Sequence[float]:
            return [0.0]

    @dataclass(frozen=True)
    class Blind(FIFO):
        discipline: ClassVar = Discipline.BACKFILL

    @dataclass(frozen=True)
    class Torn(FIFO):
        preemptive: ClassVar = True

    state = ClusterState(Cluster.uniform(1, 1))
    with pytest.raises(SchedulingError, match=r"NotANumber\.order gave a score that is not a number"):
        Scheduler(NotANumber(), state).submit(Job("a", 0.0, 1))
    scheduler = Scheduler(TooFew(), state)
    for name in "ab":
        scheduler.submit(Job(name, 0.0, 1))
    with pytest.raises(SchedulingError, match=r"TooFew\.order gave 1 scores for 2 jobs"):
        scheduler.decide()
    with pytest.raises(TypeError, match="Blind backfills, so it needs a method forecast_s"):
        Scheduler(Blind(), state)
    with pytest.raises(TypeError, match="Torn is preemptive, so its discipline must be FIRST_FIT"):
        Scheduler(Torn(), state)


def test_a_drained_machine_takes_no_jobs_until_it_is_opened() -> None:
    scheduler = _scheduler(FIFOFirstFit(), 2)
    scheduler.close(0)
    scheduler.submit(Job("a", 0.0, 1))
    assert scheduler.decide() == []
    scheduler.open(0)
    assert [start.job.id for start in scheduler.decide()] == ["a"]


def test_plan_explains_starts_and_waits_and_changes_nothing() -> None:
    scheduler = _scheduler(FIFOFirstFit(), 4, 2)
    for job in (Job("big", 0.0, 3), Job("next", 1.0, 4), Job("small", 2.0, 2), Job("huge", 3.0, 7)):
        scheduler.submit(job)
    planned = plan(scheduler)
    assert planned.starts == (
        PlannedStart("big", 0.0, (("m0", 3),), speed=1.0, speed_sd=None, displaced=(), passed=()),
        PlannedStart("small", 2.0, (("m1", 2),), speed=1.0, speed_sd=None, displaced=(), passed=("next",)),
    )
    assert [(wait.job_id, wait.score, wait.reason) for wait in planned.waits] == [
        ("next", 1.0, "needs 4 GPUs; 1 are free, at most 1 on one machine"),
        ("huge", 3.0, "needs 7 GPUs as the cluster never has them, even empty"),
    ]
    assert plan(scheduler) == planned
    assert [start.job.id for start in scheduler.decide()] == ["big", "small"]


def test_plan_says_who_is_held_back_by_order_or_by_the_policy() -> None:
    scheduler = _scheduler(FIFO(), 4)
    for job in (Job("big", 0.0, 3), Job("next", 1.0, 4), Job("small", 2.0, 1)):
        scheduler.submit(job)
    assert [wait.reason for wait in plan(scheduler).waits] == [
        "needs 4 GPUs; 1 are free, at most 1 on one machine",
        "would fit, but must not pass the jobs before it",
    ]
    holding = Scheduler(_Scored({"a": math.inf}), ClusterState(Cluster.uniform(1, 1)))
    holding.submit(Job("a", 0.0, 1))
    assert [wait.reason for wait in plan(holding).waits] == ["the policy holds it back"]


def test_plan_names_who_must_stop_and_what_the_policy_expects() -> None:
    scheduler = _scheduler(SRSF({"long": 100.0, "short": 1.0}), 4)
    scheduler.submit(Job("long", 0.0, 4))
    scheduler.decide()
    scheduler.submit(Job("short", 1.0, 1))
    (start,) = plan(scheduler).starts
    assert (start.job_id, start.score, start.displaced) == ("short", 1.0, ("long",))
    assert scheduler.state.running.keys() == {"long"}

    knowing = Scheduler(_Scored({"a": 0.0}), ClusterState(Cluster.uniform(1, 1)))
    knowing.submit(Job("a", 0.0, 1))
    (start,) = plan(knowing).starts
    assert (start.speed, start.speed_sd) == (1.5, 0.25)


def _ids(scheduler: Scheduler) -> list[str]:
    return [start.job.id for start in scheduler.decide()]


def test_a_withdrawn_job_waits_no_more_and_lets_others_pass() -> None:
    scheduler = _scheduler(FIFO(), 2)
    large, small = Job("large", 0.0, 2), Job("small", 2.0, 1)
    running = Job("running", 0.0, 1)
    scheduler.submit(running)
    assert _ids(scheduler) == ["running"]
    scheduler.submit(large)
    scheduler.submit(small)
    assert _ids(scheduler) == []
    scheduler.withdraw(large)
    assert [job.id for _, job in scheduler.waiting()] == ["small"]
    assert _ids(scheduler) == ["small"]
    scheduler.withdraw(running)
    assert scheduler.state.free == [1]
    scheduler.submit(Job("running", 3.0, 1))  # the id is free again
    assert _ids(scheduler) == ["running"]


def test_a_withdrawn_job_teaches_nothing() -> None:
    policy = QSSF()
    scheduler = _scheduler(policy, 1)
    job = Job("a", 0.0, 1, estimate_s=100.0)
    scheduler.submit(job)
    scheduler.decide()
    scheduler.state.now_s = 5000.0
    scheduler.withdraw(job)
    assert policy.forecast_s(job) == 100.0


def test_a_higher_priority_comes_before_the_policys_order() -> None:
    scheduler = _scheduler(QSSF(), 1)
    scheduler.submit(Job("short", 0.0, 1, estimate_s=10.0))
    scheduler.submit(Job("urgent", 1.0, 1, estimate_s=9999.0, priority=1))
    scheduler.submit(Job("idle", 0.0, 1, estimate_s=1.0, priority=-1))
    assert [job.id for _, job in scheduler.waiting()] == ["urgent", "short", "idle"]
    plan_now = plan(scheduler)
    assert plan_now.starts[0].job_id == "urgent"
    assert plan_now.starts[0].passed == ()


def test_a_preemptive_policy_stops_lower_priorities_first() -> None:
    scheduler = _scheduler(LAS(), 1, 1)
    low, middle = Job("low", 0.0, 1, priority=-1), Job("middle", 0.0, 1)
    scheduler.submit(low)
    scheduler.submit(middle)
    assert _ids(scheduler) == ["middle", "low"]
    scheduler.state.now_s = 10.0
    scheduler.submit(Job("equal", 10.0, 1))
    (start,) = scheduler.decide()
    assert (start.job.id, [running.job.id for running in start.displaced]) == ("equal", ["low"])
    scheduler.submit(Job("below", 10.0, 1, priority=-2))
    assert _ids(scheduler) == []


def test_a_price_cap_keeps_a_job_off_dearer_machines() -> None:
    machines = (Machine("dear", 4, price_per_gpu_hour=3.0), Machine("cheap", 2, price_per_gpu_hour=1.0))
    scheduler = Scheduler(FIFOFirstFit(), ClusterState(Cluster(machines)))
    for number in range(3):
        scheduler.submit(Job(f"capped{number}", float(number), 1, max_price_per_gpu_hour=1.0))
    scheduler.submit(Job("any", 9.0, 1))
    scheduler.submit(Job("never", 9.0, 3, max_price_per_gpu_hour=1.0))
    starts = {start.job.id: start.placement.gpus for start in scheduler.decide()}
    assert starts == {"capped0": ((1, 1),), "capped1": ((1, 1),), "any": ((0, 1),)}
    reasons = {wait.job_id: wait.reason for wait in plan(scheduler).waits}
    assert (
        reasons["never"] == "needs 3 GPUs at no more than 1 per GPU and hour as the cluster never has them, even empty"
    )
    assert reasons["capped2"].startswith("needs 1 GPUs")


def test_running_and_waiting_jobs_can_be_taken_over() -> None:
    scheduler = _scheduler(LAS(thresholds_gpu_s=(100.0, 200.0)), 2)
    scheduler.state.now_s = 1000.0
    running = scheduler.adopt(Job("old", 0.0, 2), Placement(((0, 2),)), 900.0, service_gpu_s=50.0, progress_s=25.0)
    assert scheduler.state.free == [0]
    assert running.service_gpu_s(1000.0) == 250.0
    assert running.progress(1000.0) == 25.0  # its speed is not known yet
    scheduler.submit(Job("tired", 1.0, 2), service_gpu_s=300.0)
    assert _ids(scheduler) == []  # both are in the last queue
    scheduler.submit(Job("fresh", 2.0, 2))
    (start,) = scheduler.decide()
    assert (start.job.id, [victim.job.id for victim in start.displaced]) == ("fresh", ["old"])
    with pytest.raises(SchedulingError, match="'tired' is waiting or running"):
        scheduler.adopt(Job("tired", 1.0, 2), Placement(((0, 2),)), 0.0)
