"""Shortest forecast service first, on machines whose speeds are learned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torchext.scheduling.dual.placing import Advantage
from torchext.scheduling.dual.rwgp_model import RWGP
from torchext.scheduling.dual.speeds import MeanModel
from torchext.scheduling.forecast import History
from torchext.scheduling.state import ClusterState
from torchext.scheduling.types import Cluster, Discipline, Job, Observation, Placement

Placing = Callable[[Cluster], Advantage]


@dataclass(eq=False)
class SpeedLearner:
    """Serves the job with the smallest forecast work times its GPUs first, where it has most advantage.

    The forecast is of work, whatever machines it was done on.

    Args:
        placing: Makes the placement for a cluster, with the model of speeds in it; called once, when the policy first
            sees the cluster. A policy serves one cluster.
    """

    discipline: ClassVar = Discipline.FIRST_FIT
    preemptive: ClassVar = False
    settled: ClassVar = True
    placing: Placing
    history: History = field(default_factory=History)

    def __post_init__(self) -> None:
        self._advantage: Advantage | None = None

    def order(self, jobs: Sequence[Job], state: ClusterState) -> Sequence[float]:
        """Scores by forecast work times GPUs, in GPU-seconds of machines with speed 1."""
        return [self.history.forecast_s(job) * job.num_gpus for job in jobs]

    def place(self, job: Job, state: ClusterState) -> Placement | None:
        """Chooses the machines with most advantage; the placement carries the speed expected there."""
        if self._advantage is None:
            self._advantage = self.placing(state.cluster)
        return self._advantage(job, state)

    def finished(self, job: Job, run_s: float, work_s: float) -> None:
        """Learns from an ended job."""
        self.history.add(job, work_s)
        if self._advantage is not None:
            self._advantage.finished(job)

    def observed(self, observation: Observation) -> None:
        """Learns from the speed of a run."""
        if self._advantage is not None:
            self._advantage.model.observe(observation)


def by_type_mean(cluster: Cluster) -> Advantage:
    """Means by type and class."""
    return Advantage(MeanModel(cluster, per_machine=False))


def by_machine_mean(cluster: Cluster) -> Advantage:
    """Means by machine and class."""
    return Advantage(MeanModel(cluster, per_machine=True))


def by_rwgp(cluster: Cluster) -> Advantage:
    """A random walk Gaussian process."""
    return Advantage(RWGP(cluster), optimism=0.5)
