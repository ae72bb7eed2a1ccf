"""For how long will a job run? Not a number but a law, from jobs like it that have ended, and that still run.

Jobs come in batches: the best witnesses of a job's running time are those submitted at about the same time, by the same
tenant, with as many GPUs. So each ended job counts in another's law by how alike the two are; and each that still runs
says that it is longer than its age, which counts as much (a sample of ended jobs alone has too many short ones). What
is known changes as the job waits, and so does its law.

Of a law two numbers matter most. The typical time, its geometric mean, decides who is served first where nothing is
stopped (the mean itself would be best if laws were known, but with few witnesses it is all tail). Where running jobs
can be stopped, Gittins' index does: the smallest ratio, over spans of service, of the service to be invested to the
probability that the job ends within. It is low while a job may well be a short one, and rises once it has proved long.

Source: the index, Gittins, "Bandit Processes and Dynamic Allocation Indices", Journal of the Royal Statistical Society
B 41, 1979; that it orders jobs of unknown length in GPU clusters, Gu et al., "Tiresias", NSDI 2019, section 3.2
(2D-Gittins, with one law for all). For what running jobs say, Efron, "The Two Sample Problem with Censored Data",
Berkeley Symposium 1967: the mass of one that still runs is given to what is longer.

Shapes: Q jobs to describe, E ended jobs remembered, R running ones, B bins of the running time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from torchext.scheduling.dual.rows import Rows, grown
from torchext.scheduling.state import ClusterState
from torchext.scheduling.types import Job

# Bins of the running time, evenly in its logarithm.
_NUM_BINS = 28
_UPPER_S = np.geomspace(10.0, 40 * 86400.0, _NUM_BINS)
_LOWER_S = np.concatenate([[5.0], _UPPER_S[:-1]])
_MIDDLE_S = np.sqrt(_LOWER_S * _UPPER_S)
_WIDTH = np.log(_UPPER_S / _LOWER_S)

# Two jobs are half as alike when this far apart; and e times less for each factor of two in GPUs; and so much as this
# where tenants differ.
_NEAR_S, _OTHER_TENANT = 3600.0, 0.1
_REMEMBERED = 2000  # ended jobs
# All ended jobs together count as much as one that is alike in all.
_PRIOR = 1.0
# Before anything has ended, jobs run for an hour, give or take e^2: that counts as so many. So does a user's estimate.
_ESTIMATE, _SPREAD = 5.0, 2.0
# Of a law's mass, spread evenly: nothing is impossible.
_DOUBT = 1e-3
# Shorter jobs' slowdowns count as if they ran for so long.
_SHORTEST_S = 60.0
# A running job younger than this says nothing.
_OLD_S = 60.0
# Numbers of pairs of jobs to compare in one decision; in long queues, laws are renewed in turn. To renew a law takes as
# long as so many pairs, at least.
_MOST_PAIRS, _FEWEST_PAIRS = 2**16, 4 * _NUM_BINS
# Running jobs that are heard, the latest to start: others are hardly like any that wait.
_MOST_WITNESSES = 256

LAW_FEATURES = (
    "typical running time",
    "Gittins' index",
    "mean running time",
    "lower decile",
    "median",
    "upper decile",
    "how many jobs it is known from",
)


class _Alike(NamedTuple):
    """What makes jobs alike, of N: (N,) each."""

    submit_s: np.ndarray
    log2_gpus: np.ndarray
    tenant: np.ndarray


class Laws:
    """Laws of running times. Not thread-safe.

    Everything is of work: seconds on machines of speed 1.

    Args:
        slowdown_s: Job-seconds that one unit of slowdown counts. An end then is worth the more the shorter the job, and
            Gittins' index is per worth, so that jobs come earlier that may end after a short time.

    Attributes:
        rows: Of the jobs that are known, see `know`.
    """

    def __init__(self, slowdown_s: float = 0.0) -> None:
        self._slowdown_s = slowdown_s
        self._tenants: dict[str, int] = {}
        self._all = _ESTIMATE * _around(3600.0, _SPREAD)  # (B,) of all ended jobs
        self._ended = _Alike(*np.zeros((3, 0), dtype=np.float32))
        self._ended_bins = np.zeros(0, dtype=np.int64)
        self._new: list[tuple[float, float, float, int]] = []  # ended jobs not among those yet
        self.rows = Rows()
        # By row.
        self._alike = _Alike(*np.zeros((3, 0)))
        self._counts = np.zeros((0, _NUM_BINS))
        self._told = np.zeros((0, len(LAW_FEATURES)), dtype=np.float32)
        self._next = 0  # whose law is renewed next in a long queue

    def finished(self, job: Job, work_s: float) -> None:
        """Counts an ended job, in the laws of those known too."""
        self.rows.forget([job.id])
        at = min(int(np.searchsorted(_UPPER_S, work_s)), _NUM_BINS - 1)
        submit_s, log2_gpus, tenant = entry = self._entry(job)
        self._all[at] += 1.0
        self._new.append((*entry, at))
        if self.rows:
            rows = self.rows.all()
            one = _Alike(*(np.array([value]) for value in (submit_s, log2_gpus, tenant)))
            self._counts[rows, at] += _likeness(_take(self._alike, rows), one)[:, 0]

    def know(self, jobs: Sequence[Job]) -> tuple[np.ndarray, Sequence[Job]]:
        """Gets to know jobs, until they have finished or are taken out of `rows`.

        Returns:
            The row of each, (Q,) int64, and those that are new.
        """
        try:
            return self.rows.of(jobs), ()
        except KeyError:
            new = [job for job in {job.id: job for job in jobs}.values() if job.id not in self.rows]
            for job in new:
                self._add(job)
            return self.rows.of(jobs), new

    def describe(self, jobs: Sequence[Job], rows: np.ndarray, done_s: np.ndarray, state: ClusterState) -> np.ndarray:
        """Tells of the laws of what is left of each job.

        Args:
            jobs: Q of them.
            rows: (Q,), theirs, as `know` gave them.
            done_s: (Q,), the work that each has done.
            state: The cluster now.

        Returns:
            (Q, len(LAW_FEATURES)) float32: times as logs of hours, and the log of 1 + the number of jobs.
        """
        witnesses, ages_s = self._witnesses(jobs, done_s, state)
        # In long queues the laws of waiting jobs are renewed in turn.
        most = max(_MOST_PAIRS // max(len(witnesses), _FEWEST_PAIRS), 1)
        due = np.isnan(self._told[rows, 0]) | (done_s > 0) | (len(jobs) <= most)
        if len(jobs) > most:
            due[(self._next + np.arange(most)) % len(jobs)] = True
            self._next = (self._next + most) % len(jobs)
        due_rows, due_done_s = rows[due], done_s[due]
        for begin in range(0, len(due_rows), most):
            part = slice(begin, begin + most)
            law = self._laws(due_rows[part], witnesses, ages_s)
            self._told[due_rows[part]] = _tell(law, due_done_s[part], self._slowdown_s)
        told: np.ndarray = self._told[rows]
        return told

    def _witnesses(
        self, jobs: Sequence[Job], done_s: np.ndarray, state: ClusterState
    ) -> tuple[Sequence[Job], np.ndarray]:
        """Lists jobs that have run for some time and not ended, and for how long."""
        some: list[Job] = []
        ages_s: list[float] = []
        for running in islice(reversed(state.running.values()), _MOST_WITNESSES):
            some.append(running.job)
            ages_s.append(running.progress(state.now_s))
        for i in np.flatnonzero(done_s).tolist():
            if jobs[i].id not in state.running:
                some.append(jobs[i])
                ages_s.append(float(done_s[i]))
        old = [i for i, age_s in enumerate(ages_s) if age_s >= _OLD_S]
        return [some[i] for i in old], np.array([ages_s[i] for i in old])

    def _laws(self, rows: np.ndarray, witnesses: Sequence[Job], ages_s: np.ndarray) -> np.ndarray:
        """Computes how many jobs, by likeness, took how long, (Q, B)."""
        counts: np.ndarray = self._counts[rows] + (_PRIOR / self._all.sum()) * self._all + _DOUBT / _NUM_BINS
        if not witnesses:
            return counts
        theirs = _Alike(*np.array([self._entry(job) for job in witnesses]).T)
        alike = _likeness(_take(self._alike, rows), theirs)  # (Q, R)
        alike[rows[:, None] == np.array([self.rows.get(job.id) for job in witnesses])] = 0.0
        at = np.minimum(np.searchsorted(_UPPER_S, ages_s), _NUM_BINS - 1)
        longer = alike @ np.eye(_NUM_BINS, dtype=alike.dtype)[at]  # (Q, B), of those that have come to each bin
        beyond = counts[:, ::-1].cumsum(1)[:, ::-1]
        given: np.ndarray = counts * (1 + (longer / beyond).cumsum(1))
        return given

    def _add(self, job: Job) -> None:
        row = self.rows.add(job.id)
        if row >= len(self._counts):
            size = self.rows.capacity
            self._alike = _Alike(*(grown(values, size) for values in self._alike))
            self._counts, self._told = grown(self._counts, size), grown(self._told, size)
        one = self._entry(job)
        for values, value in zip(self._alike, one, strict=True):
            values[row] = value
        ended, bins = self._remembered()
        alike = _likeness(_take(self._alike, np.array([row])), ended)[0]
        self._counts[row] = np.bincount(bins, weights=alike, minlength=_NUM_BINS)
        if job.estimate_s is not None:
            self._counts[row] += _ESTIMATE * _around(job.estimate_s, 0.0)
        self._told[row] = math.nan

    def _entry(self, job: Job) -> tuple[float, float, float]:
        tenant = self._tenants.setdefault(job.tenant, len(self._tenants))
        return job.submit_s, math.log2(job.num_gpus), float(tenant)

    def _remembered(self) -> tuple[_Alike, np.ndarray]:
        """Returns the ended jobs, E of them, and the bin of each, (E,)."""
        if self._new:
            columns = np.array(self._new).T
            self._new = []
            self._ended = _Alike(
                *(np.concatenate([old, new])[-_REMEMBERED:] for old, new in zip(self._ended, columns, strict=False))
            )
            self._ended_bins = np.concatenate([self._ended_bins, columns[3].astype(np.int64)])[-_REMEMBERED:]
        return self._ended, self._ended_bins


def _take(alike: _Alike, rows: np.ndarray) -> _Alike:
    return _Alike(*(values[rows] for values in alike))


def _likeness(ours: _Alike, theirs: _Alike) -> np.ndarray:
    """How much each of theirs says of each of ours, (Q, N) float32, up to 1."""
    apart = (np.abs(ours.submit_s[:, None] - theirs.submit_s) / _NEAR_S).astype(np.float32)
    octaves = np.abs(ours.log2_gpus[:, None] - theirs.log2_gpus).astype(np.float32)
    of_tenant = np.where(ours.tenant[:, None] == theirs.tenant, np.float32(1), np.float32(_OTHER_TENANT))
    alike: np.ndarray = of_tenant * np.exp(-octaves) / (1 + apart)
    return alike


def _around(time_s: float, spread: float) -> np.ndarray:
    """A law about some time, (B,), with an sd of its log; 0: all in one bin."""
    at = min(int(np.searchsorted(_UPPER_S, time_s)), _NUM_BINS - 1)
    law: np.ndarray = np.eye(_NUM_BINS)[at]
    if spread:
        law = np.exp(-0.5 * (np.log(_MIDDLE_S / time_s) / spread) ** 2)
        law /= law.sum()
    return law


def _tell(counts: np.ndarray, done_s: np.ndarray, slowdown_s: float) -> np.ndarray:
    """Says what is left of jobs that took so long how often, (Q, B), once some work is done, (Q,)."""
    begin_s = np.maximum(_LOWER_S, done_s[:, None])
    end_s = np.maximum(_UPPER_S, 1.05 * begin_s)
    # Of a bin that it is in the midst of, the part that is left; of the last, always something.
    ahead = np.clip(np.log(_UPPER_S / begin_s) / _WIDTH, 0.0, 1.0)
    ahead[:, -1] = np.maximum(ahead[:, -1], _DOUBT)
    mass = counts * ahead
    upto = mass.cumsum(1)
    whole = upto[:, -1:]
    middle_s = np.sqrt(begin_s * end_s)
    left_s = np.maximum(middle_s - done_s[:, None], 5.0)
    spent_s = (mass * left_s).cumsum(1)
    worth = (mass * (1 + slowdown_s / np.maximum(middle_s, _SHORTEST_S))).cumsum(1) if slowdown_s else upto
    with np.errstate(divide="ignore"):
        index_s = np.where(mass > 0, (spent_s + (whole - upto) * (end_s - done_s[:, None])) / worth, np.inf).min(1)
    deciles = [left_s[np.arange(len(mass)), (upto < share * whole).sum(1)] for share in (0.1, 0.5, 0.9)]
    typical = (mass * np.log(left_s)).sum(1) / whole[:, 0]
    logs = np.stack([typical, *np.log([index_s, spent_s[:, -1] / whole[:, 0], *deciles])], axis=1) - math.log(3600.0)
    return np.concatenate([logs, np.log1p(counts.sum(1, keepdims=True))], axis=1).astype(np.float32)
