"""What holds for every policy, and what each is for."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from random import Random
from typing import ClassVar

import pytest

from torchext.scheduling import (
    FIFO,
    LAS,
    QSSF,
    SJF,
    SRSF,
    Cluster,
    ClusterState,
    EasyBackfill,
    FIFOFirstFit,
    Gavel,
    Job,
    Machine,
    Policy,
    RecordedJob,
    SchedulingError,
    make_policy,
    simulate,
)
from torchext.scheduling.policies import ORACLES, POLICIES
from torchext.scheduling.types import Steps

_EVERY = [*POLICIES, *ORACLES]


def _trace(seed: int, num_jobs: int = 120) -> list[RecordedJob]:
    """Enough for two machines of 4 GPUs to be full nearly always."""
    random = Random(seed)
    return [
        RecordedJob(
            Job(f"j{i}", float(random.randint(0, 3000)), random.choice([1, 1, 2, 4, 8]), random.choice("abc")),
            float(random.choice([5, 20, 60, 300])),
        )
        for i in range(num_jobs)
    ]


def _make(name: str, trace: list[RecordedJob]) -> Policy:
    return make_policy(name, durations_s={r.job.id: r.duration_s for r in trace})


def _starts(trace: list[RecordedJob], policy: Policy) -> dict[str, float]:
    result = simulate(trace, Cluster.uniform(2, 4), policy)
    return {r.job.id: float(s) for r, s in zip(result.jobs, result.start_s, strict=True)}


@pytest.mark.parametrize("name", _EVERY)
def test_gives_one_score_per_job_and_leaves_the_state_alone(name: str) -> None:
    trace = _trace(0)
    policy, state = _make(name, trace), ClusterState(Cluster.uniform(2, 4))
    jobs = [r.job for r in trace]
    scores = policy.order(jobs, state)
    assert isinstance(policy, Policy)
    assert len(scores) == len(jobs)
    assert list(policy.order(jobs[::-1], state)) == list(scores)[::-1]
    assert len(policy.order([], state)) == 0
    assert policy.place(jobs[0], state) is not None
    assert (state.num_free, state.running) == (8, {})


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_the_future_does_not_matter_unless_to_oracles(name: str, seed: int) -> None:
    trace = _trace(seed)
    before = _starts(trace, _make(name, trace))
    # Jobs that start late get other durations. What has started until then must not change.
    moment_s = 1000.0
    changed = [r if before[r.job.id] < moment_s else replace(r, duration_s=7.0) for r in trace]
    after = _starts(changed, _make(name, changed))
    assert before != after
    assert {j: s for j, s in before.items() if s < moment_s} == {j: s for j, s in after.items() if s < moment_s}


@dataclass(frozen=True)
class _UnsettledSJF(SJF):
    settled: ClassVar = False


@dataclass(frozen=True)
class _UnsettledSRSF(SRSF):
    settled: ClassVar = False


@pytest.mark.parametrize(("settled", "unsettled"), [(SJF, _UnsettledSJF), (SRSF, _UnsettledSRSF)])
def test_asking_for_all_scores_in_each_decision_gives_the_same(settled: type[SJF], unsettled: type[SJF]) -> None:
    """The way that policies go whose scores may change at any time."""
    trace = _trace(3)
    durations_s = {r.job.id: r.duration_s for r in trace}
    one, other = (simulate(trace, Cluster.uniform(2, 4), kind(durations_s)) for kind in (settled, unsettled))
    assert one.runs == other.runs


def test_names_make_policies_and_oracles_need_the_durations() -> None:
    assert isinstance(make_policy("qssf"), QSSF)
    assert isinstance(make_policy("sjf", durations_s={}), SJF)
    with pytest.raises(SchedulingError, match="no policy 'sfj'; choose from fifo, fifo-firstfit"):
        make_policy("sfj")
    with pytest.raises(SchedulingError, match="'srsf' is told the true durations"):
        make_policy("srsf")


def _one_machine(policy: Policy, *jobs: tuple[float, int, float], gpus: int = 4) -> list[float]:
    """Runs (submit, GPUs, duration) on one machine; returns when each first started."""
    trace = [RecordedJob(Job(f"j{i}", submit_s, n), duration) for i, (submit_s, n, duration) in enumerate(jobs)]
    result = simulate(trace, Cluster.uniform(1, gpus), policy)
    return [float(s) for s in result.start_s]


def test_fifo_lets_nobody_pass_and_first_fit_does() -> None:
    jobs = ((0.0, 3, 10.0), (1.0, 2, 5.0), (2.0, 1, 5.0))
    assert _one_machine(FIFO(), *jobs) == [0.0, 10.0, 10.0]
    assert _one_machine(FIFOFirstFit(), *jobs) == [0.0, 10.0, 2.0]


def test_easy_lets_pass_only_what_does_not_delay_the_first_in_line() -> None:
    # The 4-GPU job can start at 10. A job of 7 s may pass it, one of 12 s may not.
    jobs = ((0.0, 3, 10.0), (1.0, 4, 5.0), (2.0, 1, 12.0), (3.0, 1, 7.0))
    durations_s = {f"j{i}": duration for i, (_, _, duration) in enumerate(jobs)}
    assert _one_machine(EasyBackfill(durations_s), *jobs) == [0.0, 10.0, 15.0, 3.0]
    assert _one_machine(FIFOFirstFit(), *jobs) == [0.0, 17.0, 2.0, 10.0]


def test_easy_with_true_durations_never_starts_the_first_in_line_later_than_fifo() -> None:
    for seed in range(5):
        trace = _trace(seed, 40)
        fifo = _starts(trace, FIFO())
        easy = _starts(trace, _make("easy-oracle", trace))
        assert sum(easy.values()) <= sum(fifo.values())
        first_waiting = next(
            r.job.id for r in sorted(trace, key=lambda r: r.job.submit_s) if fifo[r.job.id] > r.job.submit_s
        )
        assert easy[first_waiting] <= fifo[first_waiting]


def test_easy_counts_the_estimate_of_the_user_before_its_history() -> None:
    policy = EasyBackfill()
    policy.finished(Job("a", 0.0, 1), run_s=50.0, work_s=50.0)
    assert policy.forecast_s(Job("b", 0.0, 1, estimate_s=7.0)) == 7.0
    assert 50.0 < policy.forecast_s(Job("b", 0.0, 1)) < 3600.0


def test_qssf_learns_which_tenants_run_short_jobs() -> None:
    policy = QSSF()
    for i in range(30):
        policy.finished(Job(f"a{i}", 0.0, 1, "short"), run_s=10.0, work_s=10.0)
        policy.finished(Job(f"b{i}", 0.0, 1, "long"), run_s=1000.0, work_s=1000.0)
    state = ClusterState(Cluster.uniform(1, 8))
    short, long, new, wide = policy.order(
        [Job("s", 9.0, 1, "short"), Job("l", 0.0, 1, "long"), Job("n", 0.0, 1, "new"), Job("w", 0.0, 8, "short")], state
    )
    assert 10.0 < short < new < long < 1000.0
    assert wide > short


def test_las_moves_a_job_down_at_each_threshold() -> None:
    policy = LAS(thresholds_gpu_s=(10.0, 40.0))
    state = ClusterState(Cluster.uniform(1, 4))
    job = Job("a", 0.0, 2)
    placement = policy.place(job, state)
    assert placement is not None
    state.start(job, placement)
    seen = []
    for now_s in (0.0, 4.9, 5.0, 19.9, 20.0, 1000.0):
        state.now_s = now_s
        seen.append(policy.order([job], state)[0])
    assert seen == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    assert isinstance(policy, Steps)
    steps = itertools.accumulate(range(3), lambda service, _: policy.next_step(job, service), initial=0.0)
    assert list(steps) == [0.0, 10.0, 40.0, float("inf")]
    with pytest.raises(ValueError, match="positive and rising"):
        LAS(thresholds_gpu_s=(5.0, 5.0))


def test_las_stops_a_served_job_for_a_new_one_only() -> None:
    # The first has had 10 GPU-seconds after 2.5 s, so the one submitted at 3 takes over for its first 10 GPU-seconds.
    policy = LAS(thresholds_gpu_s=(10.0, 1000.0))
    trace = [RecordedJob(Job("a", 0.0, 4), 8.0), RecordedJob(Job("b", 3.0, 4), 4.0)]
    result = simulate(trace, Cluster.uniform(1, 4), policy)
    runs = [(run.job, run.start_s, run.end_s, run.outcome) for run in result.runs]
    assert runs == [(0, 0.0, 3.0, "displaced"), (1, 3.0, 7.0, "finished"), (0, 7.0, 12.0, "finished")]


def test_srsf_stops_the_job_with_most_work_left() -> None:
    trace = [RecordedJob(Job("long", 0.0, 2), 100.0), RecordedJob(Job("mid", 0.0, 2), 50.0)]
    trace.append(RecordedJob(Job("short", 10.0, 1), 5.0))
    policy = SRSF({r.job.id: r.duration_s for r in trace})
    result = simulate(trace, Cluster.uniform(1, 4), policy)
    assert [(result.jobs[run.job].job.id, run.end_s) for run in result.runs if run.outcome == "displaced"] == [
        ("long", 10.0)
    ]


def test_gavel_sends_each_class_where_it_gains_and_serves_short_work_first() -> None:
    machines = (Machine("new", 2, "new"), Machine("old", 2, "old"))
    cluster = Cluster(machines, {"new": {"x": 5.0, "y": 1.2}, "old": {"default": 1.0}})
    trace = [
        RecordedJob(Job("a", 0.0, 2, job_class="y", estimate_s=100.0), 120.0),
        RecordedJob(Job("b", 0.0, 2, job_class="x", estimate_s=100.0), 100.0),
        RecordedJob(Job("c", 1.0, 2, job_class="x", estimate_s=90.0), 50.0),
        RecordedJob(Job("d", 2.0, 2, job_class="x", estimate_s=20.0), 50.0),
    ]
    result = simulate(trace, cluster, Gavel())
    where = {result.jobs[run.job].job.id: (run.placement.gpus[0][0], run.start_s) for run in result.runs}
    # b gains most from the new machine, so that a, although first, has the old one; d is shorter than c.
    assert where == {"a": (1, 0.0), "b": (0, 0.0), "d": (0, 20.0), "c": (0, 30.0)}
