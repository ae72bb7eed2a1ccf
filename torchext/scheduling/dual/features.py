"""What the agents see of jobs, machines and the cluster, in numbers of about the size of 1.

Shapes: Q waiting jobs, M machines. Everything is causal: what users said, and what has happened so far.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from torchext.scheduling.dual.laws import LAW_FEATURES, Laws
from torchext.scheduling.forecast import History
from torchext.scheduling.state import ClusterState
from torchext.scheduling.types import Job

_SPARE_ROWS = 256
_RECENT = 15  # ended jobs of a group that are remembered one by one

JOB_FEATURES = (
    "what the heuristic orders by",
    "typical running time",
    "GPUs",
    "forecast running time as of qssf",
    "how many of the tenant's jobs with so many GPUs run now",
    "median time that they have run so far",
    "longest",
    "since the last such job came",
    "last running time of the tenant's jobs with so many GPUs",
    "median of the latest",
    "lower quartile of the latest",
    "upper quartile of the latest",
    "how many of them are known",
    "last running time of any of the tenant's jobs",
    "median of those",
    "estimate of the user",
    "waited",
    "waited, in typical running times",
    "time to the deadline",
    "share of GPUs the tenant holds",
    "log speed lost on the best machine that is free",
    *LAW_FEATURES[1:],
)
_FIXED = slice(2, 16)  # known when the job comes; the rest change as it waits
_LAW = slice(21, 21 + len(LAW_FEATURES) - 1)
# How much the number of GPUs counts to the heuristic, where jobs are stopped: less than as service, as a job that is
# stopped soon again does not hold them for long.
_GPUS_PREEMPTIVE = 0.5

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

    What is expected of a job's running time, see `Laws`, changes as it waits. Its other features of history are those
    of when it was first described, as with qssf, whose scores are settled then.

    Args:
        preemptive: The heuristic orders by Gittins' index; otherwise by typical service.
    """

    def __init__(self, preemptive: bool = False) -> None:
        self.history = History()
        self._preemptive = preemptive
        self._laws = Laws()
        self._recent: dict[object, deque[float]] = {}
        self._last_s: dict[tuple[str, int], float] = {}  # tenant, GPUs -> when the latest was submitted
        self._rows: dict[str, int] = {}
        self._table = np.zeros((256, _FIXED.stop - _FIXED.start), dtype=np.float32)
        self._free_rows = list(range(255, -1, -1))

    def finished(self, job: Job, work_s: float) -> None:
        """Counts an ended job, which took so long at speed 1."""
        self.history.add(job, work_s)
        self._laws.finished(job, work_s)
        for group in ((job.tenant, job.num_gpus), job.tenant):
            self._recent.setdefault(group, deque(maxlen=_RECENT)).append(_log_time(work_s))
        self.forget([job.id])

    def forget(self, job_ids: Iterable[str]) -> None:
        """Drops what is kept of jobs that will not be asked for again."""
        job_ids = list(job_ids)
        self._laws.forget(job_ids)
        for job_id in job_ids:
            row = self._rows.pop(job_id, None)
            if row is not None:
                self._free_rows.append(row)

    def typical_h(self, job: Job, state: ClusterState) -> float:
        """Returns the typical rest of the running time at speed 1, in hours."""
        return float(np.exp(self._laws.describe([job], np.array([state.progress_s(job)]), state)[0, 0]))

    def describe(
        self, jobs: Sequence[Job], state: ClusterState, lost: Callable[[Job], float] = lambda job: 0.0
    ) -> np.ndarray:
        """Returns the features of waiting jobs, (Q, len(JOB_FEATURES)) float32.

        Args:
            jobs: Q of them.
            state: The cluster now.
            lost: Says of a job what log speed it would lose on the best machine that is free, to the best there are.
        """
        if len(self._rows) > 2 * (len(jobs) + len(state.running)) + _SPARE_ROWS:
            # Of jobs that were withdrawn, of which nobody tells.
            known = {job.id for job in jobs} | state.running.keys()
            self.forget([job_id for job_id in self._rows if job_id not in known])
        described = np.empty((len(jobs), len(JOB_FEATURES)), dtype=np.float32)
        rows = self._rows_of(jobs, state)  # may put a larger table in place
        described[:, _FIXED] = self._table[rows]
        now_s = state.now_s
        laws = self._laws.describe(jobs, np.array([state.progress_s(job) for job in jobs]), state)
        described[:, 1], described[:, _LAW] = laws[:, 0], laws[:, 1:]
        if self._preemptive:
            described[:, 0] = laws[:, 1] + _GPUS_PREEMPTIVE * described[:, 2]
        else:
            described[:, 0] = laws[:, 0] + described[:, 2]
        waited_s = np.maximum(now_s - np.array([job.submit_s for job in jobs]), 0.0)
        described[:, 16] = np.log1p(waited_s / 3600.0)
        forecast_s = np.exp(described[:, 1] + _LOG_HOUR)
        described[:, 17] = np.log1p(waited_s / forecast_s) / 3.0
        described[:, 18] = [_slack(job, now_s) for job in jobs]
        held: dict[str, int] = {}
        for running in state.running.values():
            held[running.job.tenant] = held.get(running.job.tenant, 0) + running.job.num_gpus
        total = sum(machine.num_gpus for machine in state.cluster.machines)
        described[:, 19] = [held.get(job.tenant, 0) / total for job in jobs]
        described[:, 20] = [lost(job) for job in jobs]
        return described

    def _rows_of(self, jobs: Sequence[Job], state: ClusterState) -> list[int]:
        peers: dict[tuple[str, int], list[float]] | None = None
        rows = []
        for job in jobs:
            row = self._rows.get(job.id)
            if row is None:
                if peers is None:
                    peers = {}
                    for running in state.running.values():
                        group = (running.job.tenant, running.job.num_gpus)
                        peers.setdefault(group, []).append(state.now_s - running.start_s)
                row = self._add(job, peers.get((job.tenant, job.num_gpus), []))
            rows.append(row)
        return rows

    def _add(self, job: Job, peers_s: list[float]) -> int:
        if not self._free_rows:
            size = len(self._table)
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
            self._free_rows = list(range(2 * size - 1, size - 1, -1))
        row = self._rows[job.id] = self._free_rows.pop()
        self._table[row] = self._fixed(job, peers_s)
        group = (job.tenant, job.num_gpus)
        self._last_s[group] = max(job.submit_s, self._last_s.get(group, -math.inf))
        return row

    def _fixed(self, job: Job, peers_s: list[float]) -> list[float]:
        forecast = _log_time(self.history.forecast_s(job))
        own = self._recent.get((job.tenant, job.num_gpus))
        since_s = job.submit_s - self._last_s.get((job.tenant, job.num_gpus), -math.inf)
        tenants = self._recent.get(job.tenant)
        low, middle, high = np.percentile(own, [25, 50, 75]) if own else (forecast,) * 3
        return [
            math.log(job.num_gpus),
            forecast,
            math.log1p(len(peers_s)),
            _log_time(float(np.median(peers_s))) if peers_s else 0.0,
            _log_time(max(peers_s)) if peers_s else 0.0,
            _log_time(min(since_s, _LONG_S)),
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
    work_h = float(np.exp(np.minimum(described[:, 1] + described[:, 2], 20.0)).sum()) / total if len(jobs) else 0.0
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
_LONG_S = 30 * 86400.0


def _log_time(seconds: float) -> float:
    """Log of a time in hours, of at least ten seconds."""
    return math.log(max(seconds, 10.0)) - _LOG_HOUR


def _slack(job: Job, now_s: float) -> float:
    """0 without a deadline; else the time left in hours, its log with its sign, away from 0."""
    if job.deadline_s is None:
        return 0.0
    left_h = (job.deadline_s - now_s) / 3600.0
    return math.copysign(0.5 + math.log1p(abs(left_h)), left_h)
