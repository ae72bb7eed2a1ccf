from __future__ import annotations

import math

import numpy as np
import pytest

from torchext.scheduling import (
    FIFO,
    QSSF,
    SRSF,
    Cluster,
    ClusterState,
    Costs,
    FIFOFirstFit,
    Job,
    Machine,
    Outage,
    Placement,
    RecordedJob,
    Result,
    SchedulingError,
    random_outages,
    simulate,
    teach,
)


def _job(name: str, submit_s: float, num_gpus: int, duration_s: float, job_class: str = "") -> RecordedJob:
    return RecordedJob(Job(name, submit_s, num_gpus, job_class=job_class), duration_s)


def _runs(result: Result) -> list[tuple[str, float, float, str]]:
    return [(result.jobs[run.job].job.id, run.start_s, run.end_s, run.outcome) for run in result.runs]


def test_duration_counts_at_the_speed_of_the_slowest_machine() -> None:
    cluster = Cluster((Machine("a", 2, "new"), Machine("b", 2, "old")), {"new": {"default": 4.0}, "old": {"x": 0.5}})
    result = simulate([_job("gang", 0.0, 4, 10.0, "x"), _job("one", 1.0, 1, 10.0, "y")], cluster, FIFO())
    assert _runs(result) == [("gang", 0.0, 20.0, "finished"), ("one", 20.0, 22.5, "finished")]


def test_neighbours_slow_each_other_for_as_long_as_both_run() -> None:
    cluster = Cluster((Machine("a", 2),), contention={"x": 0.5})
    result = simulate([_job("a", 0.0, 1, 10.0, "x"), _job("b", 4.0, 1, 3.0, "y")], cluster, FIFO())
    # 4 s alone, 3 s at half speed, then the remaining 4.5 s alone.
    assert _runs(result) == [("b", 4.0, 7.0, "finished"), ("a", 0.0, 11.5, "finished")]


def test_stopping_and_resuming_cost_time_on_the_gpus() -> None:
    trace = [_job("long", 0.0, 1, 100.0), _job("short", 10.0, 1, 5.0)]
    policy = SRSF({r.job.id: r.duration_s for r in trace})
    result = simulate(trace, Cluster.uniform(1, 1), policy, costs=Costs(checkpoint_s=2.0, restart_s=3.0))
    assert _runs(result) == [
        ("long", 0.0, 10.0, "displaced"),
        ("short", 10.0, 17.0, "finished"),
        ("long", 17.0, 110.0, "finished"),
    ]


@pytest.mark.parametrize(("interval_s", "lost_s"), [(math.inf, 25.0), (10.0, 5.0), (25.0, 0.0)])
def test_a_failure_costs_the_work_since_the_last_checkpoint(interval_s: float, lost_s: float) -> None:
    costs = Costs(checkpoint_interval_s=interval_s)
    outages = [Outage(0, 25.0, 60.0)]
    result = simulate([_job("a", 0.0, 1, 40.0)], Cluster.uniform(1, 1), FIFO(), outages=outages, costs=costs)
    assert _runs(result) == [("a", 0.0, 25.0, "failed"), ("a", 60.0, 75.0 + lost_s, "finished")]


def test_a_failing_machine_takes_the_whole_gang_down_and_others_go_on() -> None:
    trace = [_job("gang", 0.0, 4, 10.0), _job("other", 0.0, 2, 10.0)]
    result = simulate(trace, Cluster.uniform(3, 2), FIFO(), outages=[Outage(1, 4.0, 1000.0)])
    assert _runs(result) == [
        ("gang", 0.0, 4.0, "failed"),
        ("other", 0.0, 10.0, "finished"),
        ("gang", 10.0, 20.0, "finished"),
    ]


def test_a_job_that_ends_as_its_machine_fails_has_ended() -> None:
    result = simulate([_job("a", 0.0, 1, 5.0)], Cluster.uniform(1, 1), FIFO(), outages=[Outage(0, 5.0, 6.0)])
    assert _runs(result) == [("a", 0.0, 5.0, "finished")]


def test_jobs_without_duration_end_at_once_and_make_room() -> None:
    trace = [_job(name, 3.0, 1, 0.0) for name in "abc"]
    result = simulate(trace, Cluster.uniform(1, 1), FIFO())
    assert _runs(result) == [(name, 3.0, 3.0, "finished") for name in "abc"]


def test_what_never_fits_is_set_aside() -> None:
    trace = [_job("huge", 0.0, 9, 1.0), _job("fits", 0.0, 8, 1.0)]
    result = simulate(trace, Cluster.uniform(2, 4), FIFO())
    assert [r.job.id for r in result.rejected] == ["huge"]
    assert [r.job.id for r in result.jobs] == ["fits"]
    assert simulate([], Cluster.uniform(1, 1), FIFO()).runs == []


def test_jobs_that_can_never_start_are_an_error() -> None:
    trace = [_job("a", 0.0, 1, 10.0), _job("b", 1.0, 1, 10.0)]
    with pytest.raises(SchedulingError, match="2 jobs can never start, the first is 'a'"):
        simulate(trace, Cluster.uniform(1, 1), FIFO(), outages=[Outage(0, 5.0, math.inf)])


@pytest.mark.parametrize(
    ("outages", "words"),
    [
        ([Outage(2, 0.0, 1.0)], "names machine 2; there are 2"),
        ([Outage(0, 0.0, 5.0), Outage(0, 4.0, 6.0)], "outages of machine 0 overlap"),
        ([Outage(0, 5.0, 5.0)], "end before they start"),
    ],
)
def test_outages_that_make_no_sense_are_refused(outages: list[Outage], words: str) -> None:
    with pytest.raises(SchedulingError, match=words):
        simulate([_job("a", 0.0, 1, 1.0)], Cluster.uniform(2, 1), FIFO(), outages=outages)


def test_inputs_that_make_no_sense_are_refused() -> None:
    with pytest.raises(SchedulingError, match="two jobs of the trace have one id"):
        simulate([_job("a", 0.0, 1, 1.0), _job("a", 1.0, 1, 1.0)], Cluster.uniform(1, 1), FIFO())
    with pytest.raises(ValueError, match="duration_s must be finite and not negative, got -1"):
        _job("a", 0.0, 1, -1.0)
    with pytest.raises(ValueError, match="checkpoint_s and restart_s must be"):
        Costs(restart_s=-1.0)
    with pytest.raises(ValueError, match="checkpoint_interval_s must be positive"):
        Costs(checkpoint_interval_s=0.0)


def test_another_world_decides_speeds_in_place_of_the_tables() -> None:
    class Moody:
        contended = False

        def __init__(self, speed: float) -> None:
            self._speed = speed

        def speed(self, job: Job, placement: Placement, state: ClusterState) -> float:
            return self._speed

    trace = [_job("a", 0.0, 1, 10.0)]
    assert _runs(simulate(trace, Cluster.uniform(1, 1), FIFO(), world=Moody(4.0))) == [("a", 0.0, 2.5, "finished")]
    with pytest.raises(SchedulingError, match="gave job 'a' the speed 0"):
        simulate(trace, Cluster.uniform(1, 1), FIFO(), world=Moody(0.0))


def test_random_outages_depend_on_the_seed_and_the_machine_alone() -> None:
    def draw(num_machines: int, seed: int) -> list[Outage]:
        cluster = Cluster.uniform(num_machines, 1)
        return random_outages(cluster, mean_up_s=1000.0, mean_down_s=100.0, until_s=200_000.0, seed=seed)

    few, many = draw(2, 0), draw(5, 0)
    assert few == [outage for outage in many if outage.machine < 2]
    assert few != draw(2, 1)
    down = np.array([outage.end_s - outage.start_s for outage in many])
    assert len(many) == pytest.approx(5 * 200_000 / 1100, rel=0.1)
    assert down.mean() == pytest.approx(100.0, rel=0.1)
    simulate([_job("a", 0.0, 1, 5000.0)], Cluster.uniform(5, 1), FIFO(), outages=many, costs=Costs(0.0, 0.0, 60.0))


def test_the_same_input_gives_the_same_output() -> None:
    trace = [_job(f"j{i}", i * 7 % 50, 1 + i % 4, 5.0 + i * 13 % 40) for i in range(60)]
    cluster = Cluster.uniform(2, 4)
    outages = random_outages(cluster, mean_up_s=100.0, mean_down_s=10.0, until_s=500.0, seed=3)
    one, other = (simulate(trace, cluster, FIFOFirstFit(), outages=outages) for _ in range(2))
    assert one.runs == other.runs
    # A submission and a start for each job, a start more and a stop for each stop, and both ends of each outage.
    num_outages = sum(o.start_s <= one.finish_s.max() for o in outages) + sum(
        o.end_s <= one.finish_s.max() for o in outages
    )
    assert one.num_events == pytest.approx(60 + 2 * len(one.runs) + num_outages, abs=2)


def test_teaching_shows_what_had_ended_by_then() -> None:
    policy = QSSF()
    trace = [_job("a", 0.0, 1, 10.0), _job("b", 0.0, 1, 100.0)]
    teach(policy, trace, before_s=50.0)
    taught = QSSF()
    taught.finished(trace[0].job, 10.0, 10.0)
    new = Job("c", 0.0, 1)
    assert policy.forecast_s(new) == taught.forecast_s(new) != QSSF().forecast_s(new)
    teach(FIFO(), trace, before_s=50.0)  # learns nothing, and that is fine
