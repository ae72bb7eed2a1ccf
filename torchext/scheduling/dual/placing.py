"""Chooses machines by what their speeds are learned to be.

Each job goes where it has the most advantage: where its class is fast, compared with how fast the machine is for the
others. Ricardo's comparative advantage, per machine and learned, in place of per type and told.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchext.scheduling.dual.speeds import SpeedModel
from torchext.scheduling.placements import packed
from torchext.scheduling.state import ANY_MACHINE, ClusterState
from torchext.scheduling.types import Job, Placement

# What a machine is typically worth changes slowly; it is computed again after this time.
_TYPICAL_FOR_S = 300.0


@dataclass(eq=False)
class Advantage:
    """Places each job on the free machines of the highest value.

    The value is::

        log speed(machine, class) + optimism * sd - comparative * mean over classes of log speed(machine, .)
            - contention * share of the machine's other GPUs in use - emptiness * share of the machine left free

    Among machines of equal value, the fullest. Whether a job fits, and on how many machines, is as `packed` has it.

    Args:
        model: Speeds as learned so far.
        comparative: 0 sends each job to its fastest machine; 1 counts only what it gains more than others do.
        optimism: Standard deviations to add, to try machines of which little is known (UCB); below 0 avoids them.
        emptiness: How much fragmentation is avoided: GPUs left over count against a machine.
    """

    model: SpeedModel
    comparative: float = 0.5
    optimism: float = 0.0
    emptiness: float = 0.1

    def __post_init__(self) -> None:
        self._ended: dict[str, int] = {}  # class -> jobs that have ended: how much it counts in what is typical
        self._typical_then: np.ndarray | None = None  # as of _typical_s
        self._typical_s = 0.0
        self._num_gpus: np.ndarray | None = None

    def __call__(self, job: Job, state: ClusterState, among: int = ANY_MACHINE) -> Placement | None:
        """Places a job, or returns None."""
        shape = packed(job, state, among)
        if shape is None:
            return None
        value = self.values(job, state)
        # As many machines with as many GPUs each as the packed placement, other ones.
        taken: list[tuple[int, int]] = []
        for _, num_gpus in shape.gpus:
            used = {index for index, _ in taken}
            candidates = [index for index in state.fullest(num_gpus, among) if index not in used]
            left = (np.array(state.free)[candidates] - num_gpus) / self._sizes(state)[candidates]
            best = int(np.argmax(value[candidates] - self.emptiness * left))
            taken.append((candidates[best], num_gpus))
        prediction = self.model.predict(job.job_class, state.now_s)
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
            value = value - self.comparative * self._typical(state.now_s)
        loss = state.cluster.contention_of(job.job_class)
        if loss:
            used = 1 - np.array(state.free) / self._sizes(state)
            value = value + np.log1p(-loss * used)
        return value

    def _typical(self, now_s: float) -> np.ndarray:
        """Mean over classes of the log speeds of each machine, (M,)."""
        if self._typical_then is None or not 0 <= now_s - self._typical_s < _TYPICAL_FOR_S:
            shares = np.array(list(self._ended.values()), dtype=np.float64)
            speeds = np.stack([self.model.predict(job_class, now_s).mean for job_class in self._ended])
            self._typical_then, self._typical_s = shares @ speeds / shares.sum(), now_s
        return self._typical_then

    def _sizes(self, state: ClusterState) -> np.ndarray:
        if self._num_gpus is None:
            self._num_gpus = np.array([machine.num_gpus for machine in state.cluster.machines])
        return self._num_gpus
