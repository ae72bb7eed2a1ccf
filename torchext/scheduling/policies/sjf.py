"""Shortest job first, told the true durations: an oracle, for comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torchext.scheduling.placements import Rule, packed
from torchext.scheduling.state import ClusterState
from torchext.scheduling.types import Discipline, Job, Placement


@dataclass(frozen=True)
class SJF:
    """Serves the job with the shortest true duration first. An oracle: no real queue can know this.

    Args:
        durations_s: True duration of each job, by id.
        placement: Where a job goes.
    """

    discipline: ClassVar = Discipline.FIRST_FIT
    preemptive: ClassVar = False
    settled: ClassVar = True
    durations_s: Mapping[str, float]
    placement: Rule = packed

    def order(self, jobs: Sequence[Job], state: ClusterState) -> Sequence[float]:
        """Scores by true duration, in seconds."""
        return [self.durations_s[job.id] for job in jobs]

    def place(self, job: Job, state: ClusterState) -> Placement | None:
        """Applies the placement rule."""
        return self.placement(job, state)
