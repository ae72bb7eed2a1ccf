"""Speeds learned by a random walk Gaussian process, online."""

from __future__ import annotations

import logging
import math
from collections import deque
from typing import Any

import numpy as np
import torch

from torchext.scheduling.dual.rwgp import (
    Cells,
    Observations,
    Posterior,
    WalkKernel,
    cliques,
    fit,
    nearest,
    walks,
)
from torchext.scheduling.dual.speeds import Prediction, residual, table_log_speed
from torchext.scheduling.types import Cluster, Observation

_LOG = logging.getLogger(__name__)

# Kernels are fitted to so many observations at most, the latest.
_FIT_ON = 1000
_FIT_STEPS = 40
# Fitted first after so many observations, then each time there are so many times as many.
_FIRST_FIT = 100
_FIT_AGAIN = 3
# Rows of repeated cells that are let in before all are added up again.
_SPARE_ROWS = 128
# Ages of observations are brought up to date when this share of the kernel's memory has passed.
_AGEING = 0.05
_NUM_NEIGHBOURS = 4
# Sums of less than this, in new observations, are left out.
_FORGOTTEN = 1e-6
# A log speed further off than this is a fault of measurement: no machine is 20,000 times as fast as another.
_FARTHEST = 10.0


class RWGP:
    """A speed model over the graph of machines; see `rwgp` for the process.

    Observations count at once. Their ages, sums by cell, and now and then the kernel's parameters and its graph of
    machines alike in their running times, are brought up to date as they come.

    Args:
        cluster: The machines; types, racks and the tables of speeds count.
        longest: Longest walk.
        alike: Whether machines that have run alike so far are joined, too. Such a graph is made of the observations
            that the process is to explain, so it finds likeness in noise: on measured spread it made predictions worse
            (tests/benchmarks/speeds.py), hence off.
    """

    def __init__(self, cluster: Cluster, *, longest: int = 2, alike: bool = False) -> None:
        self._cluster = cluster
        self._alike = alike
        self._longest = longest
        machines = cluster.machines
        self._fixed = [
            walks(cliques([0] * len(machines)), longest),
            walks(cliques([machine.type for machine in machines]), longest),
            walks(cliques([(machine.type, machine.rack) for machine in machines]), longest),
        ]
        self._classes: dict[str, int] = {}
        self._tables: dict[str, np.ndarray] = {}
        self._raw: deque[tuple[int, int, float, float]] = deque(maxlen=_FIT_ON)
        self._num_seen = 0
        self._fit_at = _FIRST_FIT
        # Sums by (machine, class), as of a time: precision, in units of a new observation's, and precision times value.
        self._sums = np.zeros((2, len(machines), 0))
        self._sums_s = 0.0
        self._kernel = WalkKernel(self._paths(None), 0)
        self._posterior: Posterior | None = None
        self._num_cells = 0  # that it was made of
        self._posterior_s = 0.0  # from when the ages of what it was made of are
        self._known: dict[str, Prediction] = {}

    def observe(self, observation: Observation) -> None:
        """Takes in how fast a job was.

        Raises:
            ValueError: The speed is not above 0 and finite.
        """
        if not 0 < observation.speed < math.inf:
            raise ValueError(f"job {observation.job.id}: a speed must be finite and > 0, got {observation.speed}")
        job_class, now_s = observation.job.job_class, observation.end_s
        number = self._number(job_class)
        posterior = self._up_to_date(now_s)
        table = self._table(job_class)
        machine, value = residual(
            self._cluster, observation, lambda index: float(posterior.mean[index, number]) + float(table[index])
        )
        value = min(max(value, -_FARTHEST), _FARTHEST)
        self._raw.append((machine, number, value, now_s))
        self._num_seen += 1
        self._age_sums(now_s)
        self._sums[:, machine, number] += 1.0, value
        self._known.clear()
        if self._num_seen >= self._fit_at:
            self._fit_at = self._num_seen * _FIT_AGAIN
            self._learn(now_s)
        else:
            posterior.extend(_cells([machine], [number], [value], [self._noise()]))

    def predict(self, job_class: str, now_s: float) -> Prediction:
        """Says how fast a class is on each machine; of a class never seen, what the others suggest."""
        known = self._known.get(job_class)
        if known is None or self._is_old(now_s):
            number = self._number(job_class)
            posterior = self._up_to_date(now_s)
            mean = posterior.mean[:, number].numpy() + self._table(job_class)
            known = self._known[job_class] = Prediction(mean, posterior.variance[:, number].sqrt().numpy())
        return known

    def _number(self, job_class: str) -> int:
        """Numbers classes as they come; a new one joins the kernel as a typical one."""
        number = self._classes.get(job_class)
        if number is None:
            number = self._classes[job_class] = len(self._classes)
            self._sums = np.concatenate([self._sums, np.zeros((2, len(self._cluster.machines), 1))], axis=2)
            self._kernel = self._kernel.with_class()
            self._posterior = None
        return number

    def _table(self, job_class: str) -> np.ndarray:
        table = self._tables.get(job_class)
        if table is None:
            table = self._tables[job_class] = table_log_speed(self._cluster, job_class)
        return table

    def _noise(self) -> float:
        return math.exp(self._kernel.log_noise.item())

    def _is_old(self, now_s: float) -> bool:
        return now_s - self._posterior_s > _AGEING * self._kernel.memory_s

    def _up_to_date(self, now_s: float) -> Posterior:
        """Returns the posterior, made anew from the sums if too much has changed since it was made."""
        posterior = self._posterior
        if posterior is None or self._is_old(now_s) or posterior.num_rows > self._num_cells + _SPARE_ROWS:
            self._age_sums(now_s)
            machine, number = np.nonzero(self._sums[0] > _FORGOTTEN)
            precision, weighted = self._sums[:, machine, number]
            cells = _cells(machine, number, weighted / precision, self._noise() / precision)
            posterior = self._posterior = Posterior(self._kernel, cells)
            self._posterior_s = now_s
            self._num_cells = len(machine)
            self._known.clear()
        return posterior

    def _age_sums(self, now_s: float) -> None:
        if now_s > self._sums_s:
            self._sums *= math.exp(-(now_s - self._sums_s) / self._kernel.memory_s)
            self._sums_s = now_s

    def _paths(self, profiles: torch.Tensor | None) -> torch.Tensor:
        """Walks on the graphs of machines; without profiles of running times yet, those of one type are alike."""
        if not self._alike:
            return torch.stack(self._fixed)
        alike = self._fixed[1] if profiles is None else walks(nearest(profiles, _NUM_NEIGHBOURS), self._longest)
        return torch.stack([*self._fixed, alike])

    def _learn(self, now_s: float) -> None:
        """Fits the kernel to the latest observations, over a new graph of what runs alike."""
        kernel = self._kernel.with_paths(self._paths(self._up_to_date(now_s).mean))
        machine, number, value, time_s = zip(*self._raw, strict=True)
        seen = Observations(
            torch.tensor(machine),
            torch.tensor(number),
            torch.tensor(value, dtype=torch.float64),
            torch.tensor(time_s, dtype=torch.float64),
        )
        reached = fit(kernel, seen, now_s, num_steps=_FIT_STEPS)
        _LOG.debug("kernel fitted to %d observations, log posterior %.1f", len(machine), reached)
        self._kernel = kernel
        self._posterior = None


def _cells(machine: Any, number: Any, value: Any, variance: Any) -> Cells:
    return Cells(
        torch.as_tensor(machine),
        torch.as_tensor(number),
        torch.as_tensor(value, dtype=torch.float64),
        torch.as_tensor(variance, dtype=torch.float64),
    )
