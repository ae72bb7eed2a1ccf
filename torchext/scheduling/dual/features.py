"""What the agents see of jobs, machines and the cluster, in numbers of about the size of 1.

Shapes: Q waiting jobs, M machines. Everything is causal: what users said, and what has happened so far.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from torchext.scheduling.dual.laws import LAW_FEATURES, Laws
from torchext.scheduling.dual.rows import grown
from torchext.scheduling.forecast import History
from torchext.scheduling.state import ClusterState
from torchext.scheduling.types import Job, Shape

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
        slowdown_s: As `Laws` has it.

    Attributes:
        kinds: Where, among the jobs described last, the first of each shape is.
    """

    def __init__(self, preemptive: bool = False, slowdown_s: float = 0.0) -> None:
        self.history = History()
        self.kinds: list[int] = []
        self._preemptive = preemptive
        self._laws = Laws(slowdown_s)
        self._recent: dict[object, deque[float]] = {}
        self._last_s: dict[tuple[str, int], float] = {}  # tenant, GPUs -> when the latest was submitted
        self._tenants: dict[str, int] = {}
        self._shapes: dict[Shape, int] = {}
        # By row of `Laws.rows`.
        self._table = np.zeros((0, _FIXED.stop - _FIXED.start), dtype=np.float32)
        self._times_s = np.zeros((0, 2))  # of submission; deadline, or nan
        self._numbers = np.zeros((0, 2), dtype=np.int64)  # of tenant and shape
        self._positions = np.zeros(0, dtype=np.int64)  # among the jobs described last, or -1

    def finished(self, job: Job, work_s: float) -> None:
        """Counts an ended job, which took so long at speed 1."""
        self.history.add(job, work_s)
        self._laws.finished(job, work_s)
        for group in ((job.tenant, job.num_gpus), job.tenant):
            self._recent.setdefault(group, deque(maxlen=_RECENT)).append(_log_time(work_s))

    def typical_h(self, job: Job, state: ClusterState) -> float:
        """Returns the typical rest of the running time at speed 1, in hours."""
        rows = self._rows_of([job], state)
        return float(np.exp(self._laws.describe([job], rows, np.array([state.progress_s(job)]), state)[0, 0]))

    def position_of(self, job: Job) -> int | None:
        """Says where a job is among those described last, or None."""
        row = self._laws.rows.get(job.id)
        position = -1 if row < 0 else int(self._positions[row])
        return None if position < 0 else position

    def describe(
        self, jobs: Sequence[Job], state: ClusterState, lost: Callable[[Job], float] = lambda job: 0.0
    ) -> np.ndarray:
        """Returns the features of waiting jobs, (Q, len(JOB_FEATURES)) float32.

        Args:
            jobs: Q of them.
            state: The cluster now.
            lost: Says what log speed a job, and any of its shape, would lose on the best machine that is free, to the
                best there are.
        """
        known = self._laws.rows
        if len(known) > 2 * (len(jobs) + len(state.running)) + _SPARE_ROWS:
            # Of jobs that were withdrawn, of which nobody tells.
            wanted = {job.id for job in jobs} | state.running.keys()
            known.forget([job_id for job_id in known if job_id not in wanted])
        rows = self._rows_of(jobs, state)
        self._positions.fill(-1)
        self._positions[rows] = np.arange(len(jobs))
        described = np.empty((len(jobs), len(JOB_FEATURES)), dtype=np.float32)
        described[:, _FIXED] = self._table[rows]
        now_s = state.now_s
        laws = self._laws.describe(jobs, rows, self._done_s(rows, state), state)
        described[:, 1], described[:, _LAW] = laws[:, 0], laws[:, 1:]
        if self._preemptive:
            described[:, 0] = laws[:, 1] + _GPUS_PREEMPTIVE * described[:, 2]
        else:
            described[:, 0] = laws[:, 0] + described[:, 2]
        submit_s, deadline_s = self._times_s[rows].T
        waited_s = np.maximum(now_s - submit_s, 0.0)
        described[:, 16] = np.log1p(waited_s / 3600.0)
        forecast_s = np.exp(described[:, 1] + _LOG_HOUR)
        described[:, 17] = np.log1p(waited_s / forecast_s) / 3.0
        described[:, 18] = _slack(deadline_s - now_s)
        tenants, shapes = self._numbers[rows].T
        described[:, 19] = self._held(state)[tenants]
        first = np.full(len(self._shapes), -1)
        first[shapes[::-1]] = np.arange(len(jobs) - 1, -1, -1)  # of each, what is written last stays
        known_shapes = np.flatnonzero(first >= 0)
        self.kinds = first[known_shapes].tolist()
        losses = np.zeros(len(first))
        losses[known_shapes] = [lost(jobs[i]) for i in self.kinds]
        described[:, 20] = losses[shapes]
        return described

    def _done_s(self, rows: np.ndarray, state: ClusterState) -> np.ndarray:
        """Returns the work that jobs have done, (Q,)."""
        done_s = np.zeros(self._laws.rows.capacity)
        for job_id, work_s in state.worked():
            row = self._laws.rows.get(job_id)
            if row >= 0:
                done_s[row] = work_s
        of_jobs: np.ndarray = done_s[rows]
        return of_jobs

    def _held(self, state: ClusterState) -> np.ndarray:
        """Returns the share of GPUs that each tenant known holds."""
        held = [0] * len(self._tenants)
        for running in state.running.values():
            number = self._tenants.get(running.job.tenant)
            if number is not None:
                held[number] += running.job.num_gpus
        return np.array(held) / state.num_gpus

    def _rows_of(self, jobs: Sequence[Job], state: ClusterState) -> np.ndarray:
        rows, new = self._laws.know(jobs)
        if new:
            peers: dict[tuple[str, int], list[float]] = {}
            for running in state.running.values():
                group = (running.job.tenant, running.job.num_gpus)
                peers.setdefault(group, []).append(state.now_s - running.start_s)
            size = self._laws.rows.capacity
            self._table, self._times_s = grown(self._table, size), grown(self._times_s, size)
            self._numbers, self._positions = grown(self._numbers, size), grown(self._positions, size)
            for job in new:
                self._add(job, peers.get((job.tenant, job.num_gpus), []))
        return rows

    def _add(self, job: Job, peers_s: list[float]) -> None:
        row = self._laws.rows.get(job.id)
        self._table[row] = self._fixed(job, peers_s)
        self._times_s[row] = job.submit_s, math.nan if job.deadline_s is None else job.deadline_s
        self._numbers[row] = (
            self._tenants.setdefault(job.tenant, len(self._tenants)),
            self._shapes.setdefault(job.shape, len(self._shapes)),
        )
        self._positions[row] = -1
        group = (job.tenant, job.num_gpus)
        self._last_s[group] = max(job.submit_s, self._last_s.get(group, -math.inf))

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


def describe_cluster(described: np.ndarray, state: ClusterState) -> np.ndarray:
    """Returns the features of the cluster and its queue, (len(CLUSTER_FEATURES),) float32.

    Args:
        described: (Q, len(JOB_FEATURES)), of the waiting jobs.
        state: The cluster now.
    """
    total, num_running = state.num_gpus, len(state.running)
    busy = total - sum(state.free)
    running_s = sum(state.now_s - running.start_s for running in state.running.values()) / max(num_running, 1)
    work_h = float(np.exp(np.minimum(described[:, 1] + described[:, 2], 20.0)).sum()) / total
    asked = float(np.rint(np.exp(described[:, 2])).sum())
    return np.array(
        [
            state.num_free / total,
            state.num_idle / len(state.free),
            state.most_free / state.sizes[0],
            math.log1p(len(described)) / 3.0,
            math.log1p(asked / total),
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


def _slack(left_s: np.ndarray) -> np.ndarray:
    """0 without a deadline (nan); else the time left in hours, its log with its sign, away from 0; (Q,)."""
    left_h = left_s / 3600.0
    return np.nan_to_num(np.copysign(0.5 + np.log1p(np.abs(left_h)), left_h))
