"""What machines' speeds are learned to be: the interface of speed models, and two simple ones.

All of them work on log speeds relative to the cluster file's tables, with the tables' contention taken out, so that
a machine that behaves as the file says is at 0. `M` is the number of machines, as the cluster counts them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from torchext.scheduling.types import Cluster, Observation

# A mean counts as much as the wider group's once it has seen this many observations.
_PRIOR_OBSERVATIONS = 2.0


class Prediction(NamedTuple):
    """Log speeds of a class alone on each machine.

    Args:
        mean: (M,) float64.
        sd: (M,) float64, of the mean speed, not of one job's.
    """

    mean: np.ndarray
    sd: np.ndarray


class SpeedModel(Protocol):
    """Learns how fast machines are for classes of jobs."""

    def observe(self, observation: Observation) -> None:
        """Takes in how fast a job was; observations come in the order of their ends."""
        ...

    def predict(self, job_class: str, now_s: float) -> Prediction:
        """Says how fast a class is on each machine; the arrays must not be changed."""
        ...


def residual(cluster: Cluster, observation: Observation, expected: Callable[[int], float]) -> tuple[int, float]:
    """Reads an observation as one machine's: the index, and its log speed relative to the cluster's tables.

    A gang tells about its slowest machine, which is taken to be the one that is expected to be.

    Args:
        cluster: The machines.
        observation: A stretch of a run.
        expected: Expected log speed of the class alone on a machine.
    """
    job_class = observation.job.job_class
    loss = cluster.contention_of(job_class)
    alone = [
        (expected(index) + math.log1p(-loss * share), index, share)
        for (index, _), share in zip(observation.placement.gpus, observation.crowding, strict=True)
    ]
    _, index, share = min(alone)
    table = cluster.speed(job_class, cluster.machines[index].type)
    return index, math.log(observation.speed) - math.log1p(-loss * share) - math.log(table)


def table_log_speed(cluster: Cluster, job_class: str) -> np.ndarray:
    """Returns the log speeds that the cluster file gives a class, (M,) float64."""
    return np.log([cluster.speed(job_class, machine.type) for machine in cluster.machines])


class MeanModel:
    """Mean log speed of each (type or machine, class), drawn towards wider groups by less the more it has seen.

    The groups, from wide to narrow: type; type and class; with `per_machine`, machine (what it is off its types'
    means, over all classes); machine and class.

    Args:
        cluster: The machines.
        per_machine: Whether machines of one type are told apart.
    """

    def __init__(self, cluster: Cluster, *, per_machine: bool) -> None:
        self._cluster = cluster
        self._per_machine = per_machine
        self._kinds = sorted({machine.type for machine in cluster.machines})
        self._kind_of = np.array([self._kinds.index(machine.type) for machine in cluster.machines])
        # Each (number of observations, sum of log speeds) by type or machine; by class, for the dicts.
        self._of_kind = np.zeros((2, len(self._kinds)))
        self._of_kind_class: dict[str, np.ndarray] = {}
        self._of_machine = np.zeros((2, len(cluster.machines)))
        self._of_machine_class: dict[str, np.ndarray] = {}
        self._known: dict[str, Prediction] = {}  # predictions since the last observation

    def observe(self, observation: Observation) -> None:
        """Takes in how fast a job was."""
        job_class = observation.job.job_class
        mean = self.predict(job_class, observation.end_s).mean
        machine, value = residual(self._cluster, observation, lambda index: float(mean[index]))
        kind = self._kind_of[machine]
        by_class = self._of_kind_class.setdefault(job_class, np.zeros_like(self._of_kind))
        self._of_kind[:, kind] += 1.0, value
        by_class[:, kind] += 1.0, value
        if self._per_machine:
            off = value - _drawn(by_class, _drawn(self._of_kind, np.zeros(len(self._kinds))))[kind]
            self._of_machine[:, machine] += 1.0, off
            own = self._of_machine_class.setdefault(job_class, np.zeros_like(self._of_machine))
            own[:, machine] += 1.0, value
        self._known.clear()

    def predict(self, job_class: str, now_s: float) -> Prediction:
        """Returns the means; their sd is that of a mean of so many, were one observation's 0.2."""
        known = self._known.get(job_class)
        if known is not None:
            return known
        of_kind = _drawn(self._of_kind, np.zeros(len(self._kinds)))
        of_kind = _drawn(self._of_kind_class.get(job_class, np.zeros_like(self._of_kind)), of_kind)
        value = of_kind[self._kind_of]
        seen = np.zeros_like(self._of_machine)
        if self._per_machine:
            value = value + _drawn(self._of_machine, np.zeros(len(value)))
            seen = self._of_machine_class.get(job_class, seen)
            value = _drawn(seen, value)
        sd = 0.2 / np.sqrt(seen[0] + 1.0)
        known = self._known[job_class] = Prediction(value + table_log_speed(self._cluster, job_class), sd)
        return known


def _drawn(seen: np.ndarray, wider: np.ndarray) -> np.ndarray:
    """Means of (number, sum), (2, N), drawn towards those of a wider group, (N,)."""
    drawn: np.ndarray = (seen[1] + _PRIOR_OBSERVATIONS * wider) / (seen[0] + _PRIOR_OBSERVATIONS)
    return drawn
