"""Chooses machines by what their speeds are learned to be.

Each job goes where it has the most advantage: where its class is fast, compared with how fast the machine is for the
others. Ricardo's comparative advantage, per machine and learned, in place of per type and told.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from torchext.scheduling.dual.speeds import SpeedModel
from torchext.scheduling.placements import packed
from torchext.scheduling.state import ANY_MACHINE, ClusterState
from torchext.scheduling.types import Job, Placement

# A job may wait for a machine as fast as this quantile of all that are large enough.
_WANTED = 0.75
# The heuristic has it wait if it would get less than this share of that speed now, and until it has waited for so many
# times what starting now would cost; the time added keeps short jobs from waiting at all.
_WORTH_IT, _PATIENCE, _SOON_H = 0.4, 3.0, 300 / 3600.0
# What a machine is typically worth changes slowly; it is computed again after this time.
_TYPICAL_FOR_S = 300.0
# Hopes that are remembered until speeds are predicted anew.
_MOST_HOPED = 1000
# Not worth a thought.
_LEAST_LOST = 0.05


@dataclass(eq=False)
class Advantage:
    """Places each job on the free machines of the highest value.

    The value is::

        log speed(machine, class) + optimism * sd - comparative * mean over classes of log speed(machine, .)
            - contention * share of the machine's other GPUs in use - emptiness * share of the machine left free
            - thrift * log price

    Among machines of equal value, the fullest. Whether a job fits, and on how many machines, is as `packed` has it.

    Args:
        model: Speeds as learned so far.
        comparative: 0 sends each job to its fastest machine; 1 counts only what it gains more than others do.
        optimism: Standard deviations to add, to try machines of which little is known (UCB); below 0 avoids them.
        emptiness: How much fragmentation is avoided: GPUs left over count against a machine.
        thrift: How much prices count, in [0, 1]. 0: not at all; 1: what counts is speed per money, and no more what
            other classes would gain.
    """

    model: SpeedModel
    comparative: float = 0.5
    optimism: float = 0.0
    emptiness: float = 0.1
    thrift: float = 0.0

    def __post_init__(self) -> None:
        self._ended: dict[str, int] = {}  # class -> jobs that have ended: how much it counts in what is typical
        self._typical_then: np.ndarray | None = None  # as of _typical_s
        self._typical_s = 0.0
        self._num_gpus: np.ndarray | None = None
        # What a class with so many GPUs on a machine may hope for, and the prediction that says so.
        self._hoped: dict[tuple[str, int, float | None], tuple[np.ndarray, float]] = {}
        self._relative_prices: np.ndarray | None = None

    def __call__(self, job: Job, state: ClusterState, among: int = ANY_MACHINE) -> Placement | None:
        """Places a job, or returns None."""
        shape = packed(job, state, among)
        if shape is None:
            return None
        return self.choose(job, state, shape, among, lambda features: int(features[:, 0].argmax()))

    def choose(
        self, job: Job, state: ClusterState, shape: Placement, among: int, pick: Callable[[np.ndarray], int]
    ) -> Placement:
        """Places a job on as many machines, with as many GPUs each, as a given placement; which, `pick` says.

        Args:
            job: The job.
            state: The cluster now.
            shape: How many GPUs on how many machines: a placement that is possible.
            among: The machines that may be used, as a bit set.
            pick: Is given the candidates' features (N, 8) float32, as `networks.MACHINE_FEATURES` lists them, for one
                machine after another, and returns a row.
        """
        prediction = self.model.predict(job.job_class, state.now_s)
        value = self.values(job, state)
        typical = self._typical(state.now_s) if self._ended else np.zeros_like(value)
        sizes, free = self._sizes(state), np.array(state.free)
        prices = self._prices(state) - 1.0
        loss = state.cluster.contention_of(job.job_class)
        taken: list[tuple[int, int]] = []
        for _, num_gpus in shape.gpus:
            used = {index for index, _ in taken}
            rows = [index for index in state.fullest(num_gpus, among) if index not in used]
            left = (free[rows] - num_gpus) / sizes[rows]
            features = np.stack(
                [
                    value[rows] - self.emptiness * left,
                    prediction.mean[rows],
                    prediction.sd[rows],
                    typical[rows],
                    free[rows] / sizes[rows],
                    left,
                    np.full(len(rows), loss),
                    prices[rows],
                ],
                axis=1,
            )
            taken.append((rows[pick(features.astype(np.float32))], num_gpus))
        slowest = min((index for index, _ in taken), key=lambda index: float(prediction.mean[index]))
        speed = float(np.exp(prediction.mean[slowest]))
        return Placement(tuple(taken), speed, speed * float(prediction.sd[slowest]))

    def finished(self, job: Job) -> None:
        """Counts an ended job: classes that are often there decide what a machine is typically worth."""
        self._ended[job.job_class] = self._ended.get(job.job_class, 0) + 1

    def values(self, job: Job, state: ClusterState) -> np.ndarray:
        """Returns the value of each machine for a job, (M,) float64, whether or not it is free."""
        prediction = self.model.predict(job.job_class, state.now_s)
        value = prediction.mean + self.optimism * prediction.sd
        if self.comparative and self._ended:
            value = value - (1 - self.thrift) * self.comparative * self._typical(state.now_s)
        if self.thrift:
            value = value - self.thrift * np.log(np.maximum(self._prices(state), 1e-9))
        loss = state.cluster.contention_of(job.job_class)
        if loss:
            used = 1 - np.array(state.free) / self._sizes(state)
            value = value + np.log1p(-loss * used)
        return value

    def lost(self, job: Job, state: ClusterState, among: int = ANY_MACHINE) -> float:
        """Returns the log speed that a job would lose by starting now, to what it may hope for; 0 if it does not fit.

        It may hope for the speed of the `_WANTED` quantile of the machines that are large enough. A gang is as fast as
        its slowest machine.
        """
        now, wanted = self._prospects(job, state, among)
        return max(wanted - now, 0.0)

    def hold_features(
        self, job: Job, state: ClusterState, forecast_h: float, among: int = ANY_MACHINE
    ) -> np.ndarray | None:
        """Describes the choice to let a job wait although it fits.

        Args:
            job: The job.
            state: The cluster now.
            forecast_h: Its running time at speed 1, in hours.
            among: The machines that may be used, as a bit set.

        Returns:
            (4,) float32 as `networks.HOLD_FEATURES` lists them, or None where there is nothing to wait for. The first
            is above 0 when the heuristic lets it wait.
        """
        now, wanted = self._prospects(job, state, among)
        lost = wanted - now
        if lost < _LEAST_LOST:
            return None
        cost_h = max(forecast_h, 1e-3) * (math.exp(-now) - math.exp(-wanted))
        waited_h = max(state.now_s - job.submit_s, 0.0) / 3600.0 + _SOON_H
        urge = min(lost + math.log(_WORTH_IT), math.log(_PATIENCE * cost_h / waited_h))
        return np.array([urge, lost, math.log(cost_h), math.log(waited_h)], dtype=np.float32)

    def _prospects(self, job: Job, state: ClusterState, among: int) -> tuple[float, float]:
        """Log speed on the best machines that are free, and what the job may hope for; equal if it does not fit."""
        num_gpus, largest = job.num_gpus, state.sizes[0]
        each = min(num_gpus, largest) if job.gpus_per_node is None else job.gpus_per_node
        price = job.max_price_per_gpu_hour
        if price is not None:
            among &= state.within(price)
        mean = self.model.predict(job.job_class, state.now_s).mean
        num_machines = -(-num_gpus // each)
        if not state.fits(num_machines, each, among):
            return 0.0, 0.0
        free = np.sort(mean[list(state.fullest(each, among))])
        key = (job.job_class, each, price)
        known = self._hoped.get(key)
        if known is None or known[0] is not mean:
            if len(self._hoped) >= _MOST_HOPED:
                self._hoped.clear()
            able = mean[self._able(state, each, price)]
            at = int(_WANTED * (len(able) - 1))
            known = self._hoped[key] = (mean, float(np.partition(able, at)[at]))
        return float(free[-num_machines]), known[1]

    def _able(self, state: ClusterState, num_gpus: int, price: float | None) -> np.ndarray:
        """Which machines are large enough and not too dear, (M,) bool."""
        able: np.ndarray = self._sizes(state) >= num_gpus
        if price is not None:
            able = able & np.array([machine.price_per_gpu_hour <= price for machine in state.cluster.machines])
        return able

    def _typical(self, now_s: float) -> np.ndarray:
        """Mean over classes of the log speeds of each machine, (M,)."""
        if self._typical_then is None or not 0 <= now_s - self._typical_s < _TYPICAL_FOR_S:
            shares = np.array(list(self._ended.values()), dtype=np.float64)
            speeds = np.stack([self.model.predict(job_class, now_s).mean for job_class in self._ended])
            self._typical_then, self._typical_s = shares @ speeds / shares.sum(), now_s
        return self._typical_then

    def _prices(self, state: ClusterState) -> np.ndarray:
        """Prices of machines relative to the mean; 1 if all are free of charge."""
        if self._relative_prices is None:
            prices = np.array([machine.price_per_gpu_hour for machine in state.cluster.machines])
            self._relative_prices = prices / prices.mean() if prices.any() else np.ones(len(prices))
        return self._relative_prices

    def _sizes(self, state: ClusterState) -> np.ndarray:
        if self._num_gpus is None:
            self._num_gpus = np.array([machine.num_gpus for machine in state.cluster.machines])
        return self._num_gpus
