"""The policy dual: what it decides, and that it errs into qssf."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from torchext.scheduling import (
    Cluster,
    ClusterState,
    Costs,
    Job,
    Machine,
    Outage,
    Placement,
    Policy,
    RecordedJob,
    Scheduler,
    SchedulingError,
    make_policy,
    plan,
    simulate,
    summarize,
)
from torchext.scheduling.dual import policy_file
from torchext.scheduling.dual.features import JobFeatures
from torchext.scheduling.dual.heuristic import SpeedLearner, by_rwgp
from torchext.scheduling.dual.networks import Agents
from torchext.scheduling.dual.policy import Dual, PreemptiveDual
from torchext.scheduling.dual.policy_file import load_policy, save_policy

_HOUR_S = 3600.0


def _trace(seed: int = 0, num_jobs: int = 150) -> list[RecordedJob]:
    random = np.random.default_rng(seed)
    submit_s = np.cumsum(random.exponential(400.0, num_jobs))
    return [
        RecordedJob(
            Job(f"j{i}", float(submit_s[i]), int(random.choice([1, 1, 2, 4, 8])), str(random.choice(list("abc"))), "x"),
            float(random.choice([60.0, 600.0, 6000.0])),
        )
        for i in range(num_jobs)
    ]


def _spoilt(change: Callable[[Agents], object]) -> Agents:
    torch.manual_seed(0)
    agents = Agents()
    with torch.no_grad():
        change(agents)
    return agents


def _runs(policy: Policy, trace: list[RecordedJob], cluster: Cluster | None = None) -> list[tuple[object, ...]]:
    result = simulate(trace, cluster or Cluster.uniform(3, 4), policy)
    return [(run.job, run.placement.gpus, run.start_s, run.end_s) for run in result.runs]


def _heuristic(**options: object) -> Dual:
    return Dual(Agents(), order_learned=False, placement_learned=False, **options)  # type: ignore[arg-type]


def _qssf() -> SpeedLearner:
    return SpeedLearner(by_rwgp)


def test_untrained_agents_decide_as_the_heuristic() -> None:
    trace = _trace()
    assert _runs(Dual(Agents(), budget_s=math.inf), trace) == _runs(_heuristic(), trace)


@pytest.mark.parametrize(
    ("spoil", "reason", "instead"),
    [
        (lambda a: a.ordering.log_scale.fill_(math.nan), "not finite", _qssf),
        (
            lambda a: a.placement.log_scale.fill_(math.nan),
            "failed: the placement agent's scores are not finite",
            _heuristic,
        ),
        (lambda a: (a.seen_mean.fill_(100.0), a.seen_limit.fill_(1.0)), "far from training", _qssf),
    ],
)
def test_agents_that_err_are_not_heard(
    spoil: Callable[[Agents], object], reason: str, instead: Callable[[], Policy], caplog: pytest.LogCaptureFixture
) -> None:
    trace = _trace()
    policy = Dual(_spoilt(spoil), budget_s=math.inf)
    assert _runs(policy, trace) == _runs(instead(), trace)
    assert policy.num_fallbacks > 10
    told = [record.message for record in caplog.records if "falling back to" in record.message]
    assert reason in told[0]
    assert len(told) < policy.num_fallbacks  # told once in a row


def test_a_decision_that_would_be_late_is_left_to_qssf_and_the_agents_are_tried_again() -> None:
    now_s = [0.0]

    def clock() -> float:
        now_s[0] += 1.0  # each decision takes a second
        return now_s[0]

    backwards = _spoilt(lambda a: a.ordering.log_scale.neg_())
    policy = Dual(backwards, budget_s=0.5, clock=clock)
    state = ClusterState(Cluster.uniform(1, 4))
    jobs = [Job(f"j{i}", 0.0, 1 + i) for i in range(4)]
    trusted = []
    for _ in range(40):
        before = policy.num_fallbacks
        policy.order(jobs, state)
        trusted.append(policy.num_fallbacks == before)
    assert trusted[0]  # nothing is known of how long it takes
    assert not trusted[1]
    assert any(trusted[2:])
    assert sum(trusted) < 20
    policy = Dual(backwards, budget_s=2.0, clock=clock)
    for _ in range(5):
        policy.order(jobs, state)
    assert policy.num_fallbacks == 0


def test_a_large_job_starts_within_its_patience_and_the_longest_run() -> None:
    # One 8-GPU job among 1-GPU jobs that would keep both machines busy for ever.
    small = [RecordedJob(Job(f"s{i}", 100.0 * i, 1), 1000.0) for i in range(300)]
    large = RecordedJob(Job("large", 5000.0, 8), 1000.0)
    for learned in (True, False):
        policy = Dual(
            Agents(),
            order_learned=learned,
            placement_learned=learned,
            patience_s=10_000.0,
            budget_s=math.inf,
        )
        result = simulate([*small, large], Cluster.uniform(2, 4), policy)
        start_s = result.start_s[[r.job.id for r in result.jobs].index("large")]
        assert start_s <= 5000.0 + 10_000.0 + 1000.0 + 100.0  # decisions are made at events, 100 s apart at most
    impatient = simulate([*small, large], Cluster.uniform(2, 4), _heuristic(patience_s=math.inf))
    assert impatient.start_s[[r.job.id for r in impatient.jobs].index("large")] > 29_000.0


def test_several_that_are_overdue_are_served_in_turn_also_when_machines_fail() -> None:
    small = [RecordedJob(Job(f"s{i}", 50.0 * i, 1), 600.0) for i in range(700)]
    large = [RecordedJob(Job(f"l{i}", 1000.0 + i, 8), 500.0) for i in range(4)]
    outages = [Outage(machine, 20_000.0 + 3000.0 * machine, 22_000.0 + 3000.0 * machine) for machine in range(3)]
    policy = Dual(Agents(), patience_s=10_000.0, budget_s=math.inf)
    result = simulate([*small, *large], Cluster.uniform(3, 4), policy, outages=outages)
    starts_s = {r.job.id: s for r, s in zip(result.jobs, result.start_s, strict=True)}
    of_large = [starts_s[f"l{i}"] for i in range(4)]
    assert of_large == sorted(of_large)
    # Each waits for those before it and then for machines to come free; failures may take one away once each.
    assert of_large[-1] < 11_000.0 + 4 * (500.0 + 600.0) + 3 * 2600.0


def test_an_overdue_job_does_not_stand_in_the_way_of_urgent_ones_of_its_shape() -> None:
    scheduler = Scheduler(_heuristic(patience_s=3600.0), ClusterState(Cluster.uniform(1, 4)))
    running, late, urgent = Job("running", 0.0, 2), Job("late", 0.0, 4), Job("urgent", 0.0, 4, priority=1)
    scheduler.submit(running)
    scheduler.decide()
    scheduler.submit(late)
    scheduler.state.now_s = 2 * 3600.0
    assert scheduler.decide() == []  # the machine is kept free for it
    scheduler.submit(urgent)
    scheduler.finish(running)
    assert [start.job.id for start in scheduler.decide()] == ["urgent"]
    scheduler.finish(urgent)
    assert [start.job.id for start in scheduler.decide()] == ["late"]


def test_nothing_is_kept_free_for_a_job_that_needs_a_closed_machine() -> None:
    scheduler = Scheduler(_heuristic(patience_s=3600.0), ClusterState(Cluster.uniform(2, 4)))
    scheduler.close(1)
    scheduler.submit(Job("late", 0.0, 8))
    scheduler.state.now_s = 2 * 3600.0
    scheduler.submit(Job("small", 7200.0, 1))
    assert "it needs machines that take no jobs now" in plan(scheduler).waits[0].why
    assert [start.job.id for start in scheduler.decide()] == ["small"]
    scheduler.open(1)
    scheduler.submit(Job("next", 7200.0, 1))
    assert scheduler.decide() == []
    assert "kept free for it: node0, node1" in plan(scheduler).waits[0].why


@pytest.mark.parametrize("learned", [True, False])
def test_where_the_speed_model_fails_jobs_are_packed(learned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Dual(Agents(), budget_s=math.inf) if learned else _heuristic()
    scheduler = Scheduler(policy, ClusterState(Cluster.uniform(2, 4)))

    def fail(job_class: str, now_s: float) -> None:
        raise np.linalg.LinAlgError("singular")

    monkeypatch.setattr(policy._advantage_for(scheduler.state).model, "predict", fail)
    scheduler.submit(Job("a", 0.0, 2))
    (start,) = scheduler.decide()
    assert start.placement.gpus == ((0, 2),)
    assert policy.why(start.job, scheduler.state).endswith("; placed by packing: the speed model failed: singular")


def test_jobs_that_were_withdrawn_are_forgotten() -> None:
    features, state = JobFeatures(), ClusterState(Cluster.uniform(1, 4))
    old = Job("old", 0.0, 1)
    for i in range(2000):
        features.describe([old, Job(f"j{i}", 0.0, 1)], state)
    assert len(features._laws.rows) < 300
    assert "old" in features._laws.rows


def test_agents_may_hold_jobs_back_but_never_stop_the_queue() -> None:
    def never_serve(agents: Agents) -> None:
        agents.ordering.wait[-1].bias.fill_(1e6)  # type: ignore[union-attr,operator]

    trace = _trace(num_jobs=40)
    result = simulate(trace, Cluster.uniform(3, 4), Dual(_spoilt(never_serve), budget_s=math.inf))
    assert len(result.jobs) == 40
    usual = simulate(trace, Cluster.uniform(3, 4), _heuristic())
    # Something starts only when nothing runs.
    assert result.finish_s.max() > usual.finish_s.max()


def test_the_plan_explains_every_decision() -> None:
    scheduler = Scheduler(Dual(Agents(), budget_s=math.inf, patience_s=7200.0), ClusterState(Cluster.uniform(2, 4)))
    scheduler.submit(Job("running", 0.0, 3))
    scheduler.decide()
    scheduler.state.now_s = 3600.0
    for job in (Job("small", 3600.0, 1), Job("middle", 3600.0, 4), Job("large", 3600.0, 8)):
        scheduler.submit(job)
    now = plan(scheduler)
    assert [start.job_id for start in now.starts] == ["small", "middle"]
    assert re.fullmatch(
        r"forecast [\d.]+ GPU-hours left, waiting for 0 h; order by the agents", now.starts[0].why or ""
    )
    assert now.starts[0].speed == pytest.approx(1.0)
    assert now.starts[0].speed_sd is not None
    assert "GPU-hours left, waiting for 0 h" in now.waits[0].why
    assert "8 GPUs; 0 are free" in now.waits[0].reason
    scheduler.state.now_s = 3600.0 + 7201.0
    waits = {wait.job_id: wait for wait in plan(scheduler).waits}
    assert waits["large"].why.startswith("first, for having waited longer than 2 h")
    assert waits["large"].why.endswith("kept free for it: node0, node1")


def test_the_plan_changes_nothing() -> None:
    scheduler = Scheduler(Dual(Agents(), budget_s=math.inf), ClusterState(Cluster.uniform(2, 4)))
    for i in range(6):
        scheduler.submit(Job(f"j{i}", 0.0, 2))
    planned = [(start.job_id, start.machines) for start in plan(scheduler).starts]
    decided = [
        (start.job.id, tuple((f"node{index}", gpus) for index, gpus in start.placement.gpus))
        for start in scheduler.decide()
    ]
    assert planned == decided


class _Halved:
    contended = False

    def speed(self, job: Job, placement: Placement, state: ClusterState) -> float:
        return 0.5 if placement.gpus[0][0] == 0 else 1.0


def test_it_learns_speeds_and_places_by_them() -> None:
    cluster = Cluster((Machine("slow", 4, "a"), Machine("fast", 4, "b")))
    trace = [RecordedJob(Job(f"j{i}", 1000.0 * i, 1), 500.0) for i in range(60)]
    result = simulate(trace, cluster, Dual(Agents(), budget_s=math.inf), world=_Halved())
    late = [run.placement.gpus[0][0] for run in result.runs if run.job >= 30]
    assert late == [1] * 30


def test_a_file_gives_the_agents_back(tmp_path: Path) -> None:
    agents = _spoilt(lambda a: [p.add_(torch.randn_like(p)) for p in a.parameters()])
    path = tmp_path / "policy.safetensors"
    save_policy(path, agents, {"command": "by hand"})
    again = load_policy(path)
    for name, tensor in agents.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert [entry.name for entry in tmp_path.iterdir()] == ["policy.safetensors"]
    assert isinstance(make_policy("dual", policy_file=path), Dual)


def test_files_that_are_no_policies_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "policy.safetensors"
    for content in (b"", b"not a policy", b"\x08\0\0\0\0\0\0\0{}      "):
        path.write_bytes(content)
        with pytest.raises(SchedulingError, match="cannot be used as a policy"):
            load_policy(path)
    save_policy(path, _spoilt(lambda a: a.ordering.slots.fill_(math.inf)), {})
    with pytest.raises(SchedulingError, match="not finite; train the policy again"):
        load_policy(path)
    with pytest.raises(SchedulingError, match="cannot be used"):
        load_policy(tmp_path / "none")


def test_the_agents_that_come_with_torchext_are_trained_and_say_how() -> None:
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(policy_file._SHIPPED, "np") as file:
        assert file.metadata()["command"].startswith("torchext train-policy --trace")
    policy = make_policy("dual", budget_s=math.inf)
    assert isinstance(policy, Dual)
    assert torch.isfinite(policy.agents.seen_limit)
    trace = _trace()
    assert any(parameter.any() for parameter in policy.agents.ordering.score[-1].parameters())  # 0 if untrained
    assert len(_runs(policy, trace, Cluster.uniform(3, 4))) == len(trace)


def test_without_safetensors_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'torchext\[policy\]'"):
        load_policy(tmp_path / "policy.safetensors")


def _preemptive(**options: object) -> PreemptiveDual:
    return PreemptiveDual(Agents(), budget_s=math.inf, **options)  # type: ignore[arg-type]


def test_where_jobs_may_be_stopped_a_long_one_makes_room_for_a_short_one() -> None:
    trace = [
        RecordedJob(Job("long", 0.0, 4, estimate_s=50_000.0), 50_000.0),
        RecordedJob(Job("short", 1000.0, 4, "other", estimate_s=300.0), 300.0),
    ]
    result = simulate(trace, Cluster.uniform(1, 4), _preemptive(), costs=Costs(checkpoint_s=10.0, restart_s=20.0))
    runs = [(result.jobs[run.job].job.id, run.start_s, run.end_s, run.outcome) for run in result.runs]
    assert runs == [
        ("long", 0.0, 1000.0, "displaced"),
        ("short", 1000.0, 1310.0, "finished"),
        ("long", 1310.0, 50_330.0, "finished"),
    ]


def test_a_job_that_has_outrun_its_forecast_is_stopped_for_shorter_ones() -> None:
    trace = [
        RecordedJob(Job("overlong", 0.0, 4, estimate_s=600.0), 50_000.0),
        RecordedJob(Job("short", 20_000.0, 4, estimate_s=1200.0), 900.0),
    ]
    result = simulate(trace, Cluster.uniform(1, 4), _preemptive())
    assert result.start_s.tolist() == [0.0, 20_000.0]
    assert [run.outcome for run in result.runs] == ["displaced", "finished", "finished"]


def test_no_job_is_stopped_for_ever() -> None:
    short = [RecordedJob(Job(f"s{i}", 100.0 * i, 4, estimate_s=90.0), 100.0) for i in range(400)]
    long = RecordedJob(Job("long", 50.0, 4, estimate_s=5000.0), 5000.0)
    result = simulate([*short, long], Cluster.uniform(1, 4), _preemptive(patience_s=10_000.0))
    finish_s = result.finish_s[[r.job.id for r in result.jobs].index("long")]
    assert finish_s <= 50.0 + 10_000.0 + 5000.0 + 100.0


def test_stopping_pays_when_short_jobs_come_behind_long_ones() -> None:
    trace = [replace(r, job=replace(r.job, estimate_s=r.duration_s)) for r in _trace(3, 120)]
    jct_s = [
        summarize(simulate(trace, Cluster.uniform(2, 4), policy, costs=Costs(10.0, 10.0)))["jct_s"]["mean"]
        for policy in (_preemptive(), Dual(Agents(), budget_s=math.inf))
    ]
    assert jct_s[0] < jct_s[1]


def test_where_slowdown_counts_it_is_lower() -> None:
    slowdowns = [
        summarize(simulate(_trace(1, 120), Cluster.uniform(2, 4), _preemptive(slowdown_s=counts)))["slowdown"]
        for counts in (0.0, 3600.0)
    ]
    assert slowdowns[1]["mean"] < slowdowns[0]["mean"]
    assert slowdowns[1]["p99"] < slowdowns[0]["p99"]


@pytest.mark.parametrize("slowdown_s", [-1.0, math.inf, math.nan])
def test_a_worth_of_slowdown_that_makes_no_sense_is_refused(slowdown_s: float) -> None:
    with pytest.raises(ValueError, match="slowdown_s must be finite and not negative, got"):
        _preemptive(slowdown_s=slowdown_s)


class _ByType:
    """Old machines have a fifth of the speed."""

    contended = False

    def speed(self, job: Job, placement: Placement, state: ClusterState) -> float:
        return min(0.2 if state.cluster.machines[index].type == "old" else 1.0 for index, _ in placement.gpus)


def _old_and_new() -> Cluster:
    machines = [Machine(f"m{i}", 4, "old" if i == 0 else "new") for i in range(4)]
    return Cluster(tuple(machines), {"old": {"default": 0.2}})


@pytest.mark.parametrize("learned", [True, False])
def test_a_long_job_waits_for_a_machine_that_is_fast_for_it_and_a_short_one_does_not(learned: bool) -> None:
    busy = [RecordedJob(Job(f"busy{i}", 0.0, 4), 2000.0) for i in range(3)]
    long = RecordedJob(Job("long", 10.0, 4, estimate_s=20_000.0), 20_000.0)
    short = RecordedJob(Job("short", 20.0, 4, estimate_s=10.0), 10.0)
    policy = Dual(Agents(), order_learned=learned, placement_learned=learned, budget_s=math.inf)
    result = simulate([*busy, long, short], _old_and_new(), policy, world=_ByType())
    where = {result.jobs[run.job].job.id: (run.placement.gpus[0][0], run.start_s) for run in result.runs}
    assert where["short"] == (0, 20.0)
    assert where["long"][0] > 0
    assert where["long"][1] == 2000.0


def test_the_plan_tells_who_waits_for_better_machines() -> None:
    scheduler = Scheduler(Dual(Agents(), budget_s=math.inf, patience_s=9000.0), ClusterState(_old_and_new()))
    for i in range(3):
        scheduler.submit(Job(f"busy{i}", 0.0, 4))
    assert len(scheduler.decide()) == 3
    scheduler.submit(Job("long", 0.0, 4, estimate_s=20_000.0))
    (wait,) = plan(scheduler).waits
    assert wait.reason == "would fit, but the policy keeps the machines that are free for later, or for another job"
    assert wait.why.endswith("order by the agents; waits for better machines, as those free have 0.2 of their speed")
    assert scheduler.decide() == []
    scheduler.state.now_s = 9001.0  # beyond its patience, anything is good enough
    assert [start.placement.gpus for start in scheduler.decide()] == [((0, 4),)]


def test_nothing_waits_for_better_machines_when_nothing_runs() -> None:
    scheduler = Scheduler(Dual(Agents(), budget_s=math.inf), ClusterState(_old_and_new()))
    for machine in (1, 2, 3):
        scheduler.close(machine)
    scheduler.submit(Job("long", 0.0, 4, estimate_s=20_000.0))
    assert [start.placement.gpus for start in scheduler.decide()] == [((0, 4),)]
