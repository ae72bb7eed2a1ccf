"""A made-up cluster whose machines differ, drift and are shared: the world that learned placements are measured in.

Everything here is synthetic, and every number of it is in this file. What the numbers come from: `SPEEDS` are measured
training speeds; the spread between machines of one type is of the size of the one measured among the V100 nodes of
Longhorn; classes of jobs, stragglers, drift, contention and prices are assumptions.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from torchext.scheduling.simulator import RecordedJob
from torchext.scheduling.state import ClusterState
from torchext.scheduling.types import Cluster, Job, Machine, Placement

# Class of jobs -> type of machine -> speed, relative to a P100 with the same job.
# Source: steps per second, alone on one GPU, of Narayanan et al., "Heterogeneity-Aware Cluster Scheduling Policies for
# Deep Learning Workloads" (Gavel), OSDI 2020, simulation_throughputs.json of stanford-futuredata/gavel (MIT).
SPEEDS = {
    "resnet18-128": {"k80": 0.154, "p100": 1.0, "v100": 1.541},
    "resnet50-64": {"k80": 0.237, "p100": 1.0, "v100": 1.678},
    "transformer-64": {"k80": 0.343, "p100": 1.0, "v100": 1.692},
    "transformer-16": {"k80": 0.573, "p100": 1.0, "v100": 1.160},
    "lm-10": {"k80": 0.308, "p100": 1.0, "v100": 1.059},
    "a3c": {"k80": 0.605, "p100": 1.0, "v100": 1.263},
    "recommendation-2048": {"k80": 0.629, "p100": 1.0, "v100": 0.450},
    "cyclegan": {"k80": 0.210, "p100": 1.0, "v100": 1.842},
}
TYPES = ("k80", "p100", "v100")
PRICES = {"k80": 0.45, "p100": 1.46, "v100": 2.48}  # per GPU-hour, of the order of public clouds' list prices

# Share of its speed that a class loses on a machine full of others.
CONTENTION = {
    "resnet18-128": 0.20,
    "resnet50-64": 0.10,
    "transformer-64": 0.05,
    "transformer-16": 0.05,
    "lm-10": 0.10,
    "a3c": 0.30,
    "recommendation-2048": 0.25,
    "cyclegan": 0.05,
}
CONCENTRATION = 0.5  # of the Dirichlet that a tenant's mix of classes comes from: low, so tenants have favourites

MACHINES_PER_RACK = 6
GPUS_PER_MACHINE = 8

# Standard deviations of log speed.
RACK_SD = 0.05
MACHINE_SD = 0.04
MACHINE_CLASS_SD = 0.02
JOB_SD = 0.10  # jobs of one class differ by so much; what a speed model sees as noise
DRIFT_SD = 0.06

# A machine's drift and whether it is a straggler are constant in steps, each machine's at its own phase.
STEP_S = 6 * 3600.0
DRIFT_MEMORY_S = 48 * 3600.0
STRAGGLERS = 0.10  # share of machines at any moment
STRAGGLER_SPEEDS = (0.45, 0.8)  # times its usual speed, drawn for each episode
STRAGGLING_S = 72 * 3600.0  # mean length of an episode


def make_cluster(num_machines: int) -> Cluster:
    """Makes a cluster of K80, P100 and V100 machines in equal parts, in racks of one type each.

    It knows classes' contention and prices, but no speeds: those are to be learned.
    """
    machines: list[Machine] = []
    for i in range(num_machines):
        kind = TYPES[i * len(TYPES) // num_machines]
        number = sum(machine.type == kind for machine in machines)
        rack = f"{kind}-rack{number // MACHINES_PER_RACK}"
        machines.append(Machine(f"{kind}-{number}", GPUS_PER_MACHINE, kind, rack, PRICES[kind]))
    return Cluster(tuple(machines), contention=CONTENTION)


def classify(trace: Iterable[RecordedJob], seed: int) -> list[RecordedJob]:
    """Gives each job that has none a class, drawn from a mix of its tenant's."""
    classes = list(SPEEDS)
    mixes: dict[str, np.ndarray] = {}
    classified = []
    for recorded in trace:
        job = recorded.job
        if job.tenant not in mixes:
            mixes[job.tenant] = _random(seed, "tenant", job.tenant).dirichlet([CONCENTRATION] * len(classes))
        if not job.job_class:
            drawn = _random(seed, "class", job.id).choice(len(classes), p=mixes[job.tenant])
            recorded = replace(recorded, job=replace(job, job_class=classes[drawn]))
        classified.append(recorded)
    return classified


def mean_speed(cluster: Cluster) -> float:
    """Averages the speed of a cluster's machines over classes; it is as large as so many machines of speed 1."""
    speeds = [
        table.get(machine.type) or cluster.speed(job_class, machine.type)
        for job_class, table in SPEEDS.items()
        for machine in cluster.machines
    ]
    return float(np.mean(speeds))


@dataclass(eq=False)
class SyntheticWorld:
    """How fast jobs truly run: type and class, rack, machine, drift, stragglers, neighbours, and the job itself.

    A gang runs at the speed of its slowest machine. Classes and types that `SPEEDS` lacks have the speed of the
    cluster's own tables. The same seed gives the same world, whatever is asked in which order.

    Args:
        cluster: The machines; those of `make_cluster`, or any.
        seed: Of all that is drawn.
        start_s: When machines begin to drift; say, the first submission.
    """

    cluster: Cluster
    seed: int
    start_s: float = 0.0
    contended: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._drawn: dict[tuple[object, ...], float] = {}
        self._episodes = [_Steps(self.seed, machine.name, self.start_s) for machine in self.cluster.machines]

    def speed(self, job: Job, placement: Placement, state: ClusterState) -> float:
        """Returns the speed of a running job."""
        loss = self.cluster.contention_of(job.job_class)
        slowest = min(
            self.machine_speed(job.job_class, index, state.now_s) * (1 - loss * share)
            for (index, _), share in zip(placement.gpus, state.crowding(placement), strict=True)
        )
        return slowest * math.exp(self._normal(JOB_SD, "job", job.id))

    def machine_speed(self, job_class: str, machine: int, now_s: float) -> float:
        """Returns the speed of a class's median job, alone on a machine."""
        spec = self.cluster.machines[machine]
        table = SPEEDS.get(job_class, {})
        base = table.get(spec.type) or self.cluster.speed(job_class, spec.type)
        fixed = (
            self._normal(RACK_SD, "rack", spec.rack)
            + self._normal(MACHINE_SD, "machine", spec.name)
            + self._normal(MACHINE_CLASS_SD, "machine", spec.name, job_class)
        )
        return base * math.exp(fixed + self._episodes[machine].log_speed(now_s))

    def next_change_s(self, machine: int, now_s: float) -> float:
        """Returns when a machine's drift takes its next step."""
        return self._episodes[machine].next_change_s(now_s)

    def _normal(self, sd: float, *what: str) -> float:
        value = self._drawn.get(what)
        if value is None:
            value = self._drawn[what] = sd * float(_random(self.seed, *what).standard_normal())
        return value


class _Steps:
    """The drift and the straggling of one machine, step by step.

    Drift is a stationary autoregression, straggling a two-state Markov chain, both sampled every `STEP_S`.
    """

    def __init__(self, seed: int, name: str, start_s: float) -> None:
        self._random = _random(seed, "steps", name)
        self._start_s = start_s - STEP_S * float(self._random.random())
        self._drift = DRIFT_SD * float(self._random.standard_normal())
        self._slow = self._slowness() if self._random.random() < STRAGGLERS else 0.0
        self._log_speeds: list[float] = []

    def log_speed(self, now_s: float) -> float:
        number = self._number(now_s)
        while len(self._log_speeds) <= number:
            self._advance()
        return self._log_speeds[number]

    def next_change_s(self, now_s: float) -> float:
        return self._begin_s(self._number(now_s) + 1)

    def _number(self, now_s: float) -> int:
        number = max(math.floor((now_s - self._start_s) / STEP_S), 0)
        # To the bit: a step holds at the moment that it is said to begin.
        return number + 1 if self._begin_s(number + 1) <= now_s else number

    def _begin_s(self, number: int) -> float:
        return self._start_s + number * STEP_S

    def _advance(self) -> None:
        kept = math.exp(-STEP_S / DRIFT_MEMORY_S)
        self._drift = kept * self._drift + math.sqrt(1 - kept**2) * DRIFT_SD * float(self._random.standard_normal())
        leaves = 1 - math.exp(-STEP_S / STRAGGLING_S)
        enters = leaves * STRAGGLERS / (1 - STRAGGLERS)
        changes = self._random.random() < (leaves if self._slow else enters)
        if changes:
            self._slow = 0.0 if self._slow else self._slowness()
        self._log_speeds.append(self._drift + self._slow)

    def _slowness(self) -> float:
        return math.log(self._random.uniform(*STRAGGLER_SPEEDS))


def _random(seed: int, *what: str) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32("\0".join(what).encode())])
