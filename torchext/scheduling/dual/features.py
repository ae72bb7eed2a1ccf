"""What the agents see of jobs, machines and the cluster, in numbers of about the size of 1.

Shapes: Q waiting jobs, M machines. Everything is causal: what users said, and what has happened so far.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from torchext.scheduling.forecast import History
from torchext.scheduling.state import ClusterState
from torchext.scheduling.types import Job

_SPARE_ROWS = 256
_RECENT = 15  # ended jobs of a group that are remembered one by one

JOB_FEATURES = (
    "forecast service",
    "forecast running time",
    "GPUs",
    "last running time of the tenant's jobs with so many GPUs",
    "median of the latest",
    "lower quartile of the latest",
    "upper quartile of the latest",
    "how many of them are known",
    "last running time of any of the tenant's jobs",
    "median of those",
    "estimate of the user",
    "waited",
    "waited, in forecast running times",
    "time to the deadline",
    "share of GPUs the tenant holds",
)
_NUM_FIXED = 11  # known when the job comes; the rest change as it waits

CLUSTER_FEATURES = (
    "share of GPUs free",
    "share of machines wholly free",
    "largest number of free GPUs on one machine",
    "jobs waiting",
    "GPUs asked for by waiting jobs, in clusters",
    "forecast work waiting, in hours of the cluster",
    "jobs running",
    "mean GPUs of running jobs",
    "mean time running so far",
)


class JobFeatures:
    """Learns from ended jobs and describes waiting ones. Not thread-safe.

    A job's history features are those of when it was first described, as with qssf, whose scores are settled then.
    """

    def __init__(self) -> None:
        self.history = History()
        self._recent: dict[object, deque[float]] = {}
        self._rows: dict[str, int] = {}
        self._table = np.zeros((256, _NUM_FIXED), dtype=np.float32)
        self._free_rows = list(range(255, -1, -1))

    def finished(self, job: Job, work_s: float) -> None:
        """Counts an ended job, which took so long at speed 1."""
        self.history.add(job, work_s)
        for group in ((job.tenant, job.num_gpus), job.tenant):
            self._recent.setdefault(group, deque(maxlen=_RECENT)).append(_log_time(work_s))
        self.forget([job.id])

    def forget(self, job_ids: Iterable[str]) -> None:
        """Drops what is kept of jobs that will not be asked for again."""
        for job_id in job_ids:
            row = self._rows.pop(job_id, None)
            if row is not None:
                self._free_rows.append(row)

    def log_service(self, job: Job) -> float:
        """Returns the log of the forecast service in GPU-seconds, as of when the job was first described."""
        return float(self._table[self._row(job), 0]) + _LOG_HOUR

    def describe(self, jobs: Sequence[Job], state: ClusterState) -> np.ndarray:
        """Returns the features of waiting jobs, (Q, len(JOB_FEATURES)) float32."""
        if len(self._rows) > 2 * (len(jobs) + len(state.running)) + _SPARE_ROWS:
            # Of jobs that were withdrawn, of which nobody tells.
            known = {job.id for job in jobs} | state.running.keys()
            self.forget([job_id for job_id in self._rows if job_id not in known])
        described = np.empty((len(jobs), len(JOB_FEATURES)), dtype=np.float32)
        rows = [self._row(job) for job in jobs]
        described[:, :_NUM_FIXED] = self._table[rows]
        now_s = state.now_s
        waited_s = np.maximum(now_s - np.array([job.submit_s for job in jobs]), 0.0)
        described[:, 11] = np.log1p(waited_s / 3600.0)
        forecast_s = np.exp(described[:, 1] + _LOG_HOUR)
        described[:, 12] = np.log1p(waited_s / forecast_s) / 3.0
        described[:, 13] = [_slack(job, now_s) for job in jobs]
        held: dict[str, int] = {}
        for running in state.running.values():
            held[running.job.tenant] = held.get(running.job.tenant, 0) + running.job.num_gpus
        total = sum(machine.num_gpus for machine in state.cluster.machines)
        described[:, 14] = [held.get(job.tenant, 0) / total for job in jobs]
        return described

    def _row(self, job: Job) -> int:
        row = self._rows.get(job.id)
        if row is None:
            if not self._free_rows:
                size = len(self._table)
                self._table = np.concatenate([self._table, np.zeros_like(self._table)])
                self._free_rows = list(range(2 * size - 1, size - 1, -1))
            row = self._rows[job.id] = self._free_rows.pop()
            self._table[row] = self._fixed(job)
        return row

    def _fixed(self, job: Job) -> list[float]:
        forecast = _log_time(self.history.forecast_s(job))
        own = self._recent.get((job.tenant, job.num_gpus))
        tenants = self._recent.get(job.tenant)
        low, middle, high = np.percentile(own, [25, 50, 75]) if own else (forecast,) * 3
        return [
            forecast + math.log(job.num_gpus),
            forecast,
            math.log(job.num_gpus),
            own[-1] if own else forecast,
            middle,
            low,
            high,
            len(own) / _RECENT if own else 0.0,
            tenants[-1] if tenants else forecast,
            float(np.median(tenants)) if tenants else forecast,
            forecast if job.estimate_s is None else _log_time(job.estimate_s),
        ]


def describe_cluster(jobs: Sequence[Job], described: np.ndarray, state: ClusterState) -> np.ndarray:
    """Returns the features of the cluster and its queue, (len(CLUSTER_FEATURES),) float32."""
    machines = state.cluster.machines
    total = sum(machine.num_gpus for machine in machines)
    free = np.array([gpus if state.is_open(i) else 0 for i, gpus in enumerate(state.free)])
    num_running = len(state.running)
    busy = total - int(sum(state.free))
    running_s = sum(state.now_s - running.start_s for running in state.running.values()) / max(num_running, 1)
    work_h = float(np.exp(np.minimum(described[:, 0], 20.0)).sum()) / total if len(jobs) else 0.0
    return np.array(
        [
            free.sum() / total,
            sum(int(f) == m.num_gpus for f, m in zip(free, machines, strict=True)) / len(machines),
            free.max() / state.sizes[0],
            math.log1p(len(jobs)) / 3.0,
            math.log1p(sum(job.num_gpus for job in jobs) / total),
            math.log1p(work_h) / 3.0,
            math.log1p(num_running) / 5.0,
            math.log1p(busy / max(num_running, 1)),
            math.log1p(running_s / 3600.0) / 3.0,
        ],
        dtype=np.float32,
    )


_LOG_HOUR = math.log(3600.0)


def _log_time(seconds: float) -> float:
    """Log of a time in hours, of at least ten seconds."""
    return math.log(max(seconds, 10.0)) - _LOG_HOUR


def _slack(job: Job, now_s: float) -> float:
    """0 without a deadline; else the time left in hours, its log with its sign, away from 0."""
    if job.deadline_s is None:
        return 0.0
    left_h = (job.deadline_s - now_s) / 3600.0
    return math.copysign(0.5 + math.log1p(abs(left_h)), left_h)
