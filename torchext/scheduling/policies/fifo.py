"""First in, first out, with nobody passing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torchext.scheduling.placements import Rule, packed
from torchext.scheduling.state import ClusterState
from torchext.scheduling.types import Discipline, Job, Placement


@dataclass(frozen=True)
class FIFO:
    """Serves jobs in the order they came; while the first does not fit, all wait.

    Args:
        placement: Where a job goes.
    """

    discipline: ClassVar = Discipline.STRICT
    preemptive: ClassVar = False
    settled: ClassVar = True
    placement: Rule = packed

    def order(self, jobs: Sequence[Job], state: ClusterState) -> Sequence[float]:
        """Scores by time of submission, in seconds."""
        return [job.submit_s for job in jobs]

    def place(self, job: Job, state: ClusterState) -> Placement | None:
        """Applies the placement rule."""
        return self.placement(job, state)
