"""Shortest remaining service first, told the true durations: an oracle, for comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torchext.scheduling.placements import Rule, packed
from torchext.scheduling.state import ClusterState
from torchext.scheduling.types import Discipline, Job, Placement


@dataclass(frozen=True)
class SRSF:
    """Serves the job with the least true work left, times its GPUs, and stops others for it. An oracle.

    Source: Gu et al., "Tiresias: A GPU Cluster Manager for Distributed Deep Learning", NSDI 2019, section 3.1, where
    it is the preemptive reference.

    Args:
        durations_s: True duration of each job on a machine with speed 1, by id.
        placement: Where a job goes.
    """

    discipline: ClassVar = Discipline.FIRST_FIT
    preemptive: ClassVar = True
    settled: ClassVar = True
    durations_s: Mapping[str, float]
    placement: Rule = packed

    def order(self, jobs: Sequence[Job], state: ClusterState) -> Sequence[float]:
        """Scores by remaining service, in GPU-seconds of a machine with speed 1."""
        return [(self.durations_s[job.id] - state.progress_s(job)) * job.num_gpus for job in jobs]

    def place(self, job: Job, state: ClusterState) -> Placement | None:
        """Applies the placement rule."""
        return self.placement(job, state)
