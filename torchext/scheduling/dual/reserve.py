"""Machines set aside for one job that has waited for too long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torchext.scheduling.placements import packed
from torchext.scheduling.state import ANY_MACHINE, ClusterState
from torchext.scheduling.types import Job


@dataclass(frozen=True, eq=False)
class Reservation:
    """Machines that take no other job until one job has started.

    Args:
        job: For whom.
        machines: Which; empty if it fits right now, or not without machines that take no jobs at present.
    """

    job: Job
    machines: tuple[int, ...]

    @classmethod
    def choose(cls, job: Job, state: ClusterState, forecast_s: Callable[[Job], float]) -> Reservation:
        """Sets aside the machines that are forecast to come free first, as many as the job needs.

        Args:
            job: For whom.
            state: The cluster now.
            forecast_s: Expected running time of a job.
        """
        if packed(job, state) is not None:
            return cls(job, ())
        busy_s = [0.0] * len(state.free)
        for running in state.running.values():
            expected_s = max(forecast_s(running.job), 1.0)
            while expected_s <= state.now_s - running.start_s:
                expected_s *= 2  # it has outrun its forecast
            for index, _ in running.placement.gpus:
                busy_s[index] = max(busy_s[index], running.start_s + expected_s - state.now_s)
        able = sorted((index for index in range(len(state.free)) if state.is_open(index)), key=lambda i: busy_s[i])
        chosen: list[int] = []
        for index in able:
            chosen.append(index)
            if _fits_on(job, chosen, state):
                # Not all of the earlier ones need be of use: a machine too small for the job is not.
                needed = [other for other in chosen if not _fits_on(job, [c for c in chosen if c != other], state)]
                return cls(job, tuple(sorted(needed if _fits_on(job, needed, state) else chosen)))
        return cls(job, ())  # nothing that is kept free would help it

    def open_to(self, job: Job) -> int:
        """Returns the machines that a job may use, as a bit set.

        Those of the same shape may use all: one of a higher priority is served first, and would else be in the way.
        """
        if job.shape == self.job.shape:
            return ANY_MACHINE
        reserved = 0
        for index in self.machines:
            reserved |= 1 << index
        return ~reserved

    def holds(self, state: ClusterState) -> bool:
        """Whether it still makes sense: all its machines are open, and there are some."""
        return bool(self.machines) and all(state.is_open(index) for index in self.machines)

    def words(self, state: ClusterState) -> str:
        """Says which machines are kept."""
        if not self.machines:
            return "it fits now" if packed(self.job, state) is not None else "it needs machines that take no jobs now"
        return "kept free for it: " + ", ".join(state.cluster.machines[index].name for index in self.machines)


def _fits_on(job: Job, machines: list[int], state: ClusterState) -> bool:
    """Whether a job would fit on some machines, were they empty."""
    empty = ClusterState(state.cluster)
    among = 0
    for index in machines:
        among |= 1 << index
    return packed(job, empty, among) is not None
