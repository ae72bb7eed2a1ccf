"""First in, first out, but what fits may pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torchext.scheduling.placements import Rule, packed
from torchext.scheduling.state import ClusterState
from torchext.scheduling.types import Discipline, Job, Placement


@dataclass(frozen=True)
class FIFOFirstFit:
    """Serves jobs in the order they came; those that fit pass those that do not.

    A large job may wait for as long as smaller ones keep coming.

    Args:
        placement: Where a job goes.
    """

    discipline: ClassVar = Discipline.FIRST_FIT
    preemptive: ClassVar = False
    settled: ClassVar = True
    placement: Rule = packed

    def order(self, jobs: Sequence[Job], state: ClusterState) -> Sequence[float]:
        """Scores by time of submission, in seconds."""
        return [job.submit_s for job in jobs]

    def place(self, job: Job, state: ClusterState) -> Placement | None:
        """Applies the placement rule."""
        return self.placement(job, state)
