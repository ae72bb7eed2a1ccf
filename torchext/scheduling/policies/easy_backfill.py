"""EASY backfilling: first in, first out, with passing that does not delay the first in line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torchext.scheduling.forecast import History
from torchext.scheduling.placements import Rule, packed
from torchext.scheduling.state import ClusterState
from torchext.scheduling.types import Discipline, Job, Placement


@dataclass(frozen=True)
class EasyBackfill:
    """Serves jobs in the order they came; others pass the first in line where that does not delay its forecast start.

    Only the first in line has a reservation. As good as the forecasts: with bad ones it does get delayed.

    Source: after Lifka, "The ANL/IBM SP Scheduling System", JSSPP 1995 (EASY); with forecasts in place of users'
    estimates as in Tsafrir, Etsion and Feitelson, TPDS 2007.

    Args:
        durations_s: True duration of each job, by id, which makes it an oracle; None forecasts from ended jobs.
        placement: Where a job goes.
    """

    discipline: ClassVar = Discipline.BACKFILL
    preemptive: ClassVar = False
    settled: ClassVar = True
    durations_s: Mapping[str, float] | None = None
    placement: Rule = packed
    history: History = field(default_factory=History)

    def order(self, jobs: Sequence[Job], state: ClusterState) -> Sequence[float]:
        """Scores by time of submission, in seconds."""
        return [job.submit_s for job in jobs]

    def place(self, job: Job, state: ClusterState) -> Placement | None:
        """Applies the placement rule."""
        return self.placement(job, state)

    def finished(self, job: Job, run_s: float, work_s: float) -> None:
        """Learns from an ended job."""
        self.history.add(job, run_s)

    def forecast_s(self, job: Job) -> float:
        """Returns the expected running time, in seconds; the user's estimate counts before the history."""
        if self.durations_s is not None:
            return self.durations_s[job.id]
        return self.history.forecast_s(job) if job.estimate_s is None else job.estimate_s
