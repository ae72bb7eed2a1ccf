from __future__ import annotations

import json

import pytest

from torchext.scheduling import (
    FIFO,
    SRSF,
    Cluster,
    Job,
    Machine,
    Outage,
    RecordedJob,
    simulate,
    summarize,
)


def test_metrics_of_a_small_case_are_those_of_pen_and_paper() -> None:
    cluster = Cluster((Machine("a", 2, price_per_gpu_hour=3.0), Machine("b", 2, price_per_gpu_hour=1.0)))
    hour = 3600.0
    trace = [
        RecordedJob(Job("one", 0.0, 4, "me", deadline_s=2 * hour), 2 * hour),
        RecordedJob(Job("two", hour, 2, "you", deadline_s=2 * hour), hour),  # waits one hour, is one hour late
        RecordedJob(Job("huge", 0.0, 9, "you"), hour),
    ]
    summary = summarize(simulate(trace, cluster, FIFO()))
    tenants = summary.pop("tenants")
    assert summary.pop("jct_s") == pytest.approx({"mean": 2 * hour, "median": 2 * hour, "p99": 2 * hour})
    assert summary.pop("slowdown") == pytest.approx({"mean": 1.5, "median": 1.5, "p99": 1.99})
    assert summary.pop("wait_s") == pytest.approx({"mean": hour / 2, "median": hour / 2, "p99": 0.99 * hour})
    assert summary.pop("lateness_s") == pytest.approx({"mean": hour / 2, "share_late": 0.5})
    assert summary == pytest.approx(
        {
            "num_jobs": 2,
            "num_rejected": 1,
            "num_displaced": 0,
            "num_failed": 0,
            "makespan_s": 3 * hour,
            "utilisation": (4 * 2 + 2 * 1) / (4 * 3),
            "fees": 2 * 2 * 3.0 + 2 * 2 * 1.0 + 2 * 1 * 3.0,
            "fairness": (1 + 2) ** 2 / (2 * (1 + 4)),
        }
    )
    assert tenants["me"] == pytest.approx(
        {"num_jobs": 1, "jct_mean_s": 2 * hour, "slowdown_mean": 1.0, "gpu_hours": 8.0}
    )
    assert tenants["you"] == pytest.approx(
        {"num_jobs": 1, "jct_mean_s": 2 * hour, "slowdown_mean": 2.0, "gpu_hours": 2.0}
    )


def test_stops_are_counted_by_their_reason_and_held_time_includes_lost_work() -> None:
    trace = [RecordedJob(Job("long", 0.0, 1), 100.0), RecordedJob(Job("short", 10.0, 1), 5.0)]
    policy = SRSF({r.job.id: r.duration_s for r in trace})
    result = simulate(trace, Cluster.uniform(1, 1), policy, outages=[Outage(0, 50.0, 60.0)])
    summary = summarize(result)
    assert (summary["num_displaced"], summary["num_failed"]) == (1, 1)
    # Saved when stopped at 10, started again at 15, lost 35 s at 50, then the remaining 90 s from 60 on.
    assert summary["makespan_s"] == 150.0
    assert summary["utilisation"] == pytest.approx(140 / 150)


def test_short_jobs_count_as_ten_seconds_in_slowdowns() -> None:
    trace = [RecordedJob(Job("a", 0.0, 1), 20.0), RecordedJob(Job("b", 0.0, 1), 0.0)]
    assert summarize(simulate(trace, Cluster.uniform(1, 1), FIFO()))["slowdown"]["mean"] == 1.5


def test_nothing_and_no_deadlines_are_summed_up_too() -> None:
    summary = summarize(simulate([], Cluster.uniform(1, 1), FIFO()))
    assert (summary["num_jobs"], summary["fairness"], summary["lateness_s"]) == (0, 1.0, None)
    assert json.loads(json.dumps(summary)) == summary
