"""Numbers that sum up a simulation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from torchext.scheduling.simulator import Result

# Shorter jobs count as if they ran for so long; otherwise the shortest of all would decide the mean slowdown.
_SHORTEST_S = 10.0


def summarize(result: Result) -> dict[str, Any]:
    """Computes the metrics of a simulation, ready for JSON.

    JCT is the time from submission to the end of a job. Slowdown is JCT over duration, at least 1.

    Source: bounded slowdown, Feitelson et al., "Theory and Practice in Parallel Job Scheduling", JSSPP 1997; fairness,
    Jain, Chiu and Hawe, "A Quantitative Measure of Fairness", DEC-TR-301, 1984.

    Returns:
        - ``num_jobs``, ``num_rejected`` (too large for the cluster, not counted below), ``num_displaced``,
          ``num_failed`` (times a job was stopped for another, or by its machine).
        - ``jct_s``, ``slowdown``, ``wait_s`` (to the first start): each ``mean``, ``median``, ``p99``.
        - ``makespan_s``: from the first submission to the last end. ``utilisation``: GPU-seconds held, over those of
          all machines in that time, whether or not they had failed.
        - ``fees``: GPU-hours held times price. ``lateness_s``: ``mean`` over jobs with a deadline of the time that they
          ended after it, 0 if in time, and ``share_late``; None without deadlines.
        - ``fairness``: Jain's index of the tenants' mean slowdowns, from 1 (all alike) down to 1 / number of tenants.
        - ``tenants``: for each, ``num_jobs``, ``jct_mean_s``, ``slowdown_mean``, ``gpu_hours``.

        All numbers are 0, and ``fairness`` 1, when no job ran.
    """
    jobs = result.jobs
    submit_s = np.array([r.job.submit_s for r in jobs])
    duration_s = np.array([r.duration_s for r in jobs])
    jct_s = result.finish_s - submit_s
    slowdown = np.maximum(jct_s / np.maximum(duration_s, _SHORTEST_S), 1.0)
    held_s, fees = _held(result)
    makespan_s = float(result.finish_s.max() - submit_s.min()) if jobs else 0.0
    num_gpus = sum(machine.num_gpus for machine in result.cluster.machines)
    tenants = _by_tenant(result, jct_s, slowdown, held_s)
    outcomes = [run.outcome for run in result.runs]
    return {
        "num_jobs": len(jobs),
        "num_rejected": len(result.rejected),
        "num_displaced": outcomes.count("displaced"),
        "num_failed": outcomes.count("failed"),
        "jct_s": _spread(jct_s),
        "slowdown": _spread(slowdown),
        "wait_s": _spread(result.start_s - submit_s),
        "makespan_s": makespan_s,
        "utilisation": float(held_s.sum()) / (num_gpus * makespan_s) if makespan_s else 0.0,
        "fees": fees,
        "lateness_s": _lateness(result),
        "fairness": _jain(np.array([tenant["slowdown_mean"] for tenant in tenants.values()])),
        "tenants": tenants,
    }


def _spread(values: np.ndarray) -> dict[str, float]:
    if not values.size:
        return {"mean": 0.0, "median": 0.0, "p99": 0.0}
    return {
        "mean": float(values.mean()),
        "median": float(np.median(values)),
        "p99": float(np.percentile(values, 99)),
    }


def _held(result: Result) -> tuple[np.ndarray, float]:
    """Computes the GPU-seconds each job held, (num_jobs,), and what all of them cost."""
    held_s = np.zeros(len(result.jobs))
    fees = 0.0
    prices = [machine.price_per_gpu_hour for machine in result.cluster.machines]
    for run in result.runs:
        run_s = run.end_s - run.start_s
        held_s[run.job] += run_s * result.jobs[run.job].job.num_gpus
        fees += run_s / 3600 * sum(prices[machine] * num_gpus for machine, num_gpus in run.placement.gpus)
    return held_s, fees


def _lateness(result: Result) -> dict[str, float] | None:
    late_s = [
        max(0.0, float(finish_s) - r.job.deadline_s)
        for r, finish_s in zip(result.jobs, result.finish_s, strict=True)
        if r.job.deadline_s is not None
    ]
    if not late_s:
        return None
    return {"mean": sum(late_s) / len(late_s), "share_late": sum(late > 0 for late in late_s) / len(late_s)}


def _by_tenant(
    result: Result, jct_s: np.ndarray, slowdown: np.ndarray, held_s: np.ndarray
) -> Mapping[str, dict[str, float]]:
    members: dict[str, list[int]] = {}
    for i, recorded in enumerate(result.jobs):
        members.setdefault(recorded.job.tenant, []).append(i)
    return {
        tenant: {
            "num_jobs": len(which),
            "jct_mean_s": float(jct_s[which].mean()),
            "slowdown_mean": float(slowdown[which].mean()),
            "gpu_hours": float(held_s[which].sum()) / 3600,
        }
        for tenant, which in sorted(members.items())
    }


def _jain(values: np.ndarray) -> float:
    if not values.size:
        return 1.0
    return float(values.sum() ** 2 / (values.size * (values**2).sum()))
