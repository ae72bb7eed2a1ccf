"""The simulator agrees, run for run and to the bit, with a time-stepped one that shares no code with it."""

from __future__ import annotations

import math
from fractions import Fraction
from random import Random

import hypothesis
import hypothesis.strategies as st
import pytest

from tests.scheduling.reference import Reference
from torchext.scheduling import (
    LAS,
    Cluster,
    Costs,
    Job,
    Machine,
    Outage,
    Policy,
    RecordedJob,
    make_policy,
    packed,
    simulate,
    spread,
)

_POLICIES = ["fifo", "fifo-firstfit", "sjf", "qssf", "gavel", "easy-backfill", "srsf", "las"]
_THRESHOLDS = (4.0, 16.0)
_FINEST = 64  # steps per second; cases that need finer ones are left out


@st.composite
def _clusters(draw: st.DrawFn, contended: bool) -> Cluster:
    sizes = st.sampled_from([1, 2] if contended else [1, 2, 4])
    kinds = st.sampled_from(["old", "new"])
    machines = tuple(Machine(f"m{i}", draw(sizes), draw(kinds)) for i in range(draw(st.integers(1, 4))))
    speed = st.sampled_from([0.5, 1.0])
    listed = ("old", "new") if draw(st.booleans()) else ()
    speeds = {kind: {"x": draw(speed), "default": draw(speed)} for kind in listed}
    return Cluster(machines, speeds, {"x": 0.5} if contended else {})


@st.composite
def _traces(draw: st.DrawFn, num_gpus: int) -> list[RecordedJob]:
    trace = []
    for i in range(draw(st.integers(1, 7))):
        gpus = draw(st.integers(1, num_gpus))
        per_node = draw(st.sampled_from([None, None, None, *(d for d in (1, 2) if gpus % d == 0)]))
        job = Job(
            id=f"j{i}",
            submit_s=float(draw(st.integers(0, 12))),
            num_gpus=gpus,
            tenant=draw(st.sampled_from("ab")),
            job_class=draw(st.sampled_from(["x", "y"])),
            estimate_s=draw(st.sampled_from([None, 1.0, 6.0, 20.0])),
            gpus_per_node=per_node,
        )
        trace.append(RecordedJob(job, float(draw(st.integers(0, 12)))))
    return trace


@st.composite
def _outages(draw: st.DrawFn, num_machines: int) -> list[Outage]:
    outages = []
    for machine in range(num_machines):
        now = 0
        for _ in range(draw(st.integers(0, 2))):
            start = now + draw(st.integers(0, 15))
            now = start + draw(st.integers(1, 8))
            outages.append(Outage(machine, float(start), float(now)))
    return outages


def _policy(name: str, trace: list[RecordedJob], rule_is_spread: bool) -> Policy:
    rule = spread if rule_is_spread else packed
    if name == "las":
        return LAS(thresholds_gpu_s=_THRESHOLDS, placement=rule)
    return make_policy(name, durations_s={r.job.id: r.duration_s for r in trace}, placement=rule)


def _disagreement(
    name: str, cluster: Cluster, trace: list[RecordedJob], outages: list[Outage], costs: Costs, rule_is_spread: bool
) -> str | None:
    """Runs both; says where they differ, or "" if they agree. None: not to be told with steps of a bearable length."""
    result = simulate(trace, cluster, _policy(name, trace, rule_is_spread), outages=outages, costs=costs)
    times = {Fraction(time) for run in result.runs for time in (run.start_s, run.end_s)}
    step = Fraction(1, math.lcm(1, *(time.denominator for time in times)))
    if name == "las":  # scores rise when held * GPUs = threshold, which may fall between
        step /= math.lcm(*(r.job.num_gpus for r in trace))
    if step.denominator > _FINEST or step.denominator.bit_count() != 1:
        return None
    reference = Reference(
        [r for r in trace if r not in result.rejected],
        cluster,
        name,
        outages=outages,
        costs=costs,
        spread=rule_is_spread,
        las_thresholds=_THRESHOLDS,
        step=float(step),
    ).run()
    for index, tracked in enumerate(reference):
        runs = [(r.placement.gpus, r.start_s, r.end_s, r.outcome) for r in result.runs if r.job == index]
        if runs != tracked.runs:
            return f"{result.jobs[index].job.id}: {runs}, the reference has {tracked.runs}"
    return ""


@pytest.mark.parametrize("name", _POLICIES)
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=60, suppress_health_check=list(hypothesis.HealthCheck))
def test_agrees_with_a_time_stepped_simulator(name: str, data: st.DataObject) -> None:
    cluster = data.draw(_clusters(contended=data.draw(st.booleans(), "contended")), "cluster")
    trace = data.draw(_traces(min(8, sum(m.num_gpus for m in cluster.machines))), "trace")
    outages = data.draw(_outages(len(cluster.machines)), "outages")
    costs = Costs(
        checkpoint_s=data.draw(st.sampled_from([0.0, 1.0]), "checkpoint"),
        restart_s=data.draw(st.sampled_from([0.0, 2.0]), "restart"),
        checkpoint_interval_s=data.draw(st.sampled_from([math.inf, 2.0]), "interval"),
    )
    difference = _disagreement(name, cluster, trace, outages, costs, data.draw(st.booleans(), "spread"))
    hypothesis.assume(difference is not None)
    assert difference == ""


@pytest.mark.parametrize("name", _POLICIES)
def test_agrees_with_a_time_stepped_simulator_on_crowded_clusters(name: str, request: pytest.FixtureRequest) -> None:
    """Hypothesis prefers simple cases; these are full of waiting, stopping and failing."""
    random = Random(request.config.getoption("--seed"))
    told = 0
    while told < 25:
        contended = random.random() < 0.3
        sizes = random.choices([1, 2] if contended else [1, 2, 4], k=random.randint(2, 4))
        machines = tuple(Machine(f"m{i}", size, random.choice(["old", "new"])) for i, size in enumerate(sizes))
        speeds = {"old": {"default": 0.5, "x": 1.0}} if random.random() < 0.5 else {}
        cluster = Cluster(machines, speeds, {"y": 0.5} if contended else {})
        trace = []
        for i in range(random.randint(6, 12)):
            gpus = random.choice([1, 1, 2, 2, 3, 4, 6])
            job = Job(
                f"j{i}",
                float(random.randint(0, 20)),
                gpus,
                random.choice("ab"),
                random.choice("xy"),
                estimate_s=random.choice([None, 2.0, 8.0]),
                gpus_per_node=random.choice([None, 1, gpus]),
            )
            trace.append(RecordedJob(job, float(random.randint(1, 16))))
        outages = [
            Outage(i, float(random.randint(1, 15)), float(random.randint(16, 24)))
            for i in range(len(machines))
            if random.random() < 0.4
        ]
        costs = Costs(random.choice([0.0, 1.0]), random.choice([0.0, 2.0]), random.choice([math.inf, 4.0]))
        difference = _disagreement(name, cluster, trace, outages, costs, random.random() < 0.3)
        told += difference is not None
        assert not difference, f"{cluster}, {trace}, {outages}, {costs}"
