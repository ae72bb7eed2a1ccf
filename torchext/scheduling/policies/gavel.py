"""Heterogeneity-aware order and packing, after Gavel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torchext.scheduling.forecast import History
from torchext.scheduling.placements import Rule, TypeAware, comparative_advantage
from torchext.scheduling.state import ClusterState
from torchext.scheduling.types import Discipline, Job, Placement


@dataclass(frozen=True)
class Gavel:
    """Serves the job with the smallest forecast service on its best machines first, where it has most advantage.

    The forecast is of work, whatever machines it was done on, and the order divides it by the job's speed on its
    fastest type; the placement (by default) keeps fast types for those jobs that gain most from them.

    Source: after the heterogeneity-aware shortest-job-first of Narayanan et al., "Heterogeneity-Aware Cluster
    Scheduling Policies for Deep Learning Workloads" (Gavel), OSDI 2020, section 4.2. Greedy in place of its
    linear programme; no rounds, no two jobs on one GPU.

    Args:
        placement: Where a job goes.
    """

    discipline: ClassVar = Discipline.FIRST_FIT
    preemptive: ClassVar = False
    settled: ClassVar = True
    placement: Rule = field(default_factory=lambda: TypeAware(comparative_advantage))
    history: History = field(default_factory=History)

    def order(self, jobs: Sequence[Job], state: ClusterState) -> Sequence[float]:
        """Scores by forecast service on the fastest type, in GPU-seconds."""
        speed = state.cluster.speed
        return [
            self.history.forecast_s(job) * job.num_gpus / max(speed(job.job_class, kind) for kind in state.of_type)
            for job in jobs
        ]

    def place(self, job: Job, state: ClusterState) -> Placement | None:
        """Applies the placement rule."""
        return self.placement(job, state)

    def finished(self, job: Job, run_s: float, work_s: float) -> None:
        """Learns from an ended job."""
        self.history.add(job, work_s)
