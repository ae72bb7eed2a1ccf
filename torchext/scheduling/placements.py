"""Where a job goes: packed, spread, and choices of machine type that use either.

A placement rule takes a job and the state and returns free GPUs or None. All rules here keep a job on one machine
when some machine of the cluster is large enough, and otherwise give it whole machines of one size and one smaller rest;
a job with `gpus_per_node` gets that many on each of several machines, and one with a price cap no machine above it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Protocol

from torchext.scheduling.state import ANY_MACHINE, ClusterState
from torchext.scheduling.types import Job, Placement

_Candidates = Callable[[int, int], Iterator[int]]


class Rule(Protocol):
    """A way to place a job on some of the machines: a bit set, or all."""

    def __call__(self, job: Job, state: ClusterState, among: int = ANY_MACHINE) -> Placement | None: ...


def packed(job: Job, state: ClusterState, among: int = ANY_MACHINE) -> Placement | None:
    """Uses the machines with the fewest free GPUs that fit, which keeps whole machines free for large jobs."""
    if job.num_gpus > state.num_free:
        return None
    if job.max_price_per_gpu_hour is not None:
        among &= state.within(job.max_price_per_gpu_hour)
    if job.gpus_per_node is None and job.num_gpus <= state.sizes[0]:
        return _on_one(state.fullest_one(job.num_gpus, among), job.num_gpus)
    return _on_many(job, state, among, state.fullest)


def spread(job: Job, state: ClusterState, among: int = ANY_MACHINE) -> Placement | None:
    """Uses the machines with the most free GPUs, which keeps neighbours apart."""
    if job.num_gpus > state.num_free:
        return None
    if job.max_price_per_gpu_hour is not None:
        among &= state.within(job.max_price_per_gpu_hour)
    if job.gpus_per_node is None and job.num_gpus <= state.sizes[0]:
        return _on_one(state.emptiest_one(job.num_gpus, among), job.num_gpus)
    return _on_many(job, state, among, state.emptiest)


class TypeAware:
    """Tries machine types in an order that depends on the job, and places within the first that fits.

    Only a job that fits in no single type is spread over several.

    Args:
        preference: Gives the order of types for a job.
        within: The rule within a type.
    """

    def __init__(self, preference: Callable[[Job, ClusterState], list[str]], within: Rule = packed) -> None:
        self._preference = preference
        self._within = within

    def __call__(self, job: Job, state: ClusterState, among: int = ANY_MACHINE) -> Placement | None:
        """Places a job, or returns None."""
        if len(state.of_type) > 1:
            for kind in self._preference(job, state):
                placement = self._within(job, state, state.of_type[kind] & among)
                if placement is not None:
                    return placement
        return self._within(job, state, among)


def fastest_type(job: Job, state: ClusterState) -> list[str]:
    """Orders types by the job's speed on them; the order of the cluster file breaks ties."""
    cluster = state.cluster
    return sorted(state.of_type, key=lambda kind: -cluster.speed(job.job_class, kind))


def comparative_advantage(job: Job, state: ClusterState) -> list[str]:
    """Orders types by how much more the job gains from them than the classes of the cluster file do on average.

    A class that is hardly faster on the newest machines leaves them to those that are.

    Source: Ricardo's comparative advantage; Gavel (Narayanan et al., OSDI 2020, section 3) normalises throughputs
    per job for the same reason.
    """
    cluster = state.cluster
    classes = sorted({c for table in cluster.speeds.values() for c in table} | {job.job_class})
    # Each class by its own mean over types, so that classes that are fast everywhere count no more than others.
    scale = {c: sum(cluster.speed(c, kind) for kind in state.of_type) for c in classes}

    def advantage(kind: str) -> float:
        typical = sum(cluster.speed(c, kind) / scale[c] for c in classes)
        return cluster.speed(job.job_class, kind) / scale[job.job_class] / typical

    return sorted(state.of_type, key=lambda kind: -advantage(kind))


def _on_one(index: int, num_gpus: int) -> Placement | None:
    return None if index < 0 else Placement(((index, num_gpus),))


def _on_many(job: Job, state: ClusterState, among: int, candidates: _Candidates) -> Placement | None:
    num_gpus, per_node = job.num_gpus, job.gpus_per_node
    for size in state.sizes if per_node is None else (per_node,):
        num_full, rest = divmod(num_gpus, size)
        if not state.fits(num_full, size, among):
            continue
        chosen = list(islice(candidates(size, among), num_full))
        gpus = [(index, size) for index in chosen]
        if rest:
            taken = set(chosen)
            # A machine of the whole ones has at least as many free as the rest needs, so skip those.
            last = next((index for index in candidates(rest, among) if index not in taken), None)
            if last is None:
                continue
            gpus.append((last, rest))
        return Placement(tuple(gpus))
    return None
