"""Quasi shortest service first: shortest forecast service, learned from the jobs that have ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torchext.scheduling.forecast import History
from torchext.scheduling.placements import Rule, packed
from torchext.scheduling.state import ClusterState
from torchext.scheduling.types import Discipline, Job, Placement


@dataclass(frozen=True)
class QSSF:
    """Serves the job with the smallest forecast running time times its GPUs first; what fits may pass.

    Causal: a job is judged when it joins the queue, by jobs that have ended by then.

    Source: after QSSF of Hu et al. (Helios), SC 2021, section 4.2; see `History` for the forecast.

    Args:
        placement: Where a job goes.
    """

    discipline: ClassVar = Discipline.FIRST_FIT
    preemptive: ClassVar = False
    settled: ClassVar = True
    placement: Rule = packed
    history: History = field(default_factory=History)

    def order(self, jobs: Sequence[Job], state: ClusterState) -> Sequence[float]:
        """Scores by forecast service, in GPU-seconds."""
        return [self.history.forecast_s(job) * job.num_gpus for job in jobs]

    def place(self, job: Job, state: ClusterState) -> Placement | None:
        """Applies the placement rule."""
        return self.placement(job, state)

    def finished(self, job: Job, run_s: float, work_s: float) -> None:
        """Learns from an ended job."""
        self.history.add(job, run_s)

    def forecast_s(self, job: Job) -> float:
        """Returns the expected running time, in seconds."""
        return self.history.forecast_s(job)
