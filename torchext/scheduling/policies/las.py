"""Least attained service, in three steps (Tiresias)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torchext.scheduling.placements import Rule, packed
from torchext.scheduling.state import ClusterState
from torchext.scheduling.types import Discipline, Job, Placement

# Finishing a step is decided by floating-point sums of times; this many GPU-seconds short of it still count as there.
_TOLERANCE_GPU_S = 1e-3


@dataclass(frozen=True)
class LAS:
    """Serves jobs that have had little service before those that have had more, and stops the latter for it.

    Jobs move through three queues as they attain service; within one, by submission. Needs no forecast.

    Source: after discretised two-dimensional LAS, Gu et al., "Tiresias", NSDI 2019, sections 3.2 and 3.3. There,
    jobs within a queue are served by the time of their first start, and starved ones may be promoted.

    Args:
        thresholds_gpu_s: Attained service at which a job moves to the second and to the third queue.
        placement: Where a job goes.

    Raises:
        ValueError: The thresholds are not positive and rising.
    """

    discipline: ClassVar = Discipline.FIRST_FIT
    preemptive: ClassVar = True
    settled: ClassVar = True
    thresholds_gpu_s: tuple[float, float] = (3600.0, 36000.0)
    placement: Rule = packed

    def __post_init__(self) -> None:
        low, high = self.thresholds_gpu_s
        if not 0 < low < high:
            raise ValueError(f"thresholds_gpu_s must be positive and rising, got {self.thresholds_gpu_s}")

    def order(self, jobs: Sequence[Job], state: ClusterState) -> Sequence[float]:
        """Scores by queue: 0, 1 or 2."""
        low, high = (threshold - _TOLERANCE_GPU_S for threshold in self.thresholds_gpu_s)
        services = [state.service_gpu_s(job) for job in jobs]
        return [0.0 if service < low else 1.0 if service < high else 2.0 for service in services]

    def place(self, job: Job, state: ClusterState) -> Placement | None:
        """Applies the placement rule."""
        return self.placement(job, state)

    def next_step(self, job: Job, service_gpu_s: float) -> float:
        """Returns the next threshold, in GPU-seconds."""
        for threshold in self.thresholds_gpu_s:
            if service_gpu_s < threshold - _TOLERANCE_GPU_S:
                return threshold
        return math.inf
