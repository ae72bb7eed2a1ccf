"""The words of scheduling: jobs, machines, placements, and what a policy is.

A policy sees only what is known when it decides: what the user said when submitting, and what has happened since.
True durations are no part of `Job`; a policy that uses them (an *oracle*, for comparison) is told when it is made.

Times are seconds on one clock (`_s`; the simulator's or the queue's), service is in GPU-seconds, prices are per
GPU-hour. A machine without GPUs offers slots instead; they are called GPUs here too.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torchext.scheduling.state import ClusterState, Running


Shape = tuple[int, int | None, str, float | None]


class SchedulingError(Exception):
    """A trace, a cluster or a request that cannot be used; the message says what to change."""


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """What a user says when submitting a job.

    Args:
        id: Unique name.
        submit_s: When it was submitted.
        num_gpus: GPUs over all machines, at least one. All are taken and given back together (gang scheduling).
        tenant: Who pays: a user, a team, a virtual cluster.
        job_class: Kind of work, the key of speeds (say "resnet50"); "" is a kind of its own.
        estimate_s: The user's own guess of the running time; None when there is none.
        deadline_s: When it should have ended, on the same clock as `submit_s`; None when it does not matter.
        gpus_per_node: GPUs on each machine (torchrun's --nproc-per-node), a divisor of `num_gpus`; None leaves it to
            the placement, which uses as few machines as possible.
        priority: Jobs of a higher one are served before all others, whatever the policy; it orders jobs of one.
        max_price_per_gpu_hour: Runs on no machine that costs more; None when any will do.

    Attributes:
        shape: GPUs, GPUs per machine, class and price cap: all that decides whether a job fits. Computed.

    Raises:
        ValueError: A count or a time makes no sense.
    """

    id: str
    submit_s: float
    num_gpus: int
    tenant: str = ""
    job_class: str = ""
    estimate_s: float | None = None
    deadline_s: float | None = None
    gpus_per_node: int | None = None
    priority: int = 0
    max_price_per_gpu_hour: float | None = None
    shape: Shape = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "shape", (self.num_gpus, self.gpus_per_node, self.job_class, self.max_price_per_gpu_hour)
        )
        if self.num_gpus < 1:
            raise ValueError(f"job {self.id}: num_gpus must be at least 1, got {self.num_gpus}")
        if not math.isfinite(self.submit_s):
            raise ValueError(f"job {self.id}: submit_s must be finite, got {self.submit_s}")
        if self.estimate_s is not None and not 0 <= self.estimate_s < math.inf:
            raise ValueError(f"job {self.id}: estimate_s must be finite and not negative, got {self.estimate_s}")
        if self.deadline_s is not None and not math.isfinite(self.deadline_s):
            raise ValueError(f"job {self.id}: deadline_s must be finite, got {self.deadline_s}")
        price = self.max_price_per_gpu_hour
        if price is not None and not 0 <= price < math.inf:
            raise ValueError(f"job {self.id}: max_price_per_gpu_hour must be finite and not negative, got {price}")
        per_node = self.gpus_per_node
        if per_node is not None and (per_node < 1 or self.num_gpus % per_node):
            raise ValueError(f"job {self.id}: gpus_per_node must divide num_gpus={self.num_gpus}, got {per_node}")


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine of a cluster.

    Args:
        name: Unique name.
        num_gpus: GPUs (or slots), at least one.
        type: Machines of one type run a class of jobs equally fast, as far as the cluster file knows.
        rack: Where it stands.
        price_per_gpu_hour: In any currency.
    """

    name: str
    num_gpus: int
    type: str = "default"
    rack: str = ""
    price_per_gpu_hour: float = 0.0


@dataclass(frozen=True, eq=False)
class Cluster:
    """Machines and how fast they are.

    Args:
        machines: At least one. Policies and placements refer to a machine by its index here.
        speeds: Machine type -> job class -> speed, relative to the machine that durations were measured on. The class
            "default" stands for those not listed; a type that is not listed has speed 1.
        contention: Job class -> share of its speed that it loses when other jobs hold all other GPUs of its machine,
            in [0, 1); in proportion when they hold fewer. "default" as above; classes not listed lose nothing.

    Raises:
        SchedulingError: No machines, two of one name, or numbers outside their ranges.
    """

    machines: tuple[Machine, ...]
    speeds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    contention: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.machines:
            raise SchedulingError("a cluster needs at least one machine")
        names: set[str] = set()
        for machine in self.machines:
            if machine.num_gpus < 1:
                raise SchedulingError(f"machine {machine.name!r}: num_gpus must be at least 1, got {machine.num_gpus}")
            if not 0 <= machine.price_per_gpu_hour < math.inf:
                raise SchedulingError(f"machine {machine.name!r}: the price must be finite and not negative")
            if machine.name in names:
                raise SchedulingError(f"two machines are named {machine.name!r}; names must differ")
            names.add(machine.name)
        for kind, table in self.speeds.items():
            for job_class, speed in table.items():
                if not 0 < speed < math.inf:
                    raise SchedulingError(f"speed of {job_class!r} on {kind!r} must be finite and > 0, got {speed}")
        for job_class, loss in self.contention.items():
            if not 0 <= loss < 1:
                raise SchedulingError(f"contention of {job_class!r} must be in [0, 1), got {loss}")

    @classmethod
    def uniform(cls, num_machines: int, gpus_per_machine: int) -> Cluster:
        """Makes a cluster of machines that are all alike, with speed 1 and no contention."""
        return cls(tuple(Machine(f"node{i}", gpus_per_machine) for i in range(num_machines)))

    def speed(self, job_class: str, machine_type: str) -> float:
        """Says how fast a type runs a class of jobs, alone on the machine; 1 is the speed durations refer to."""
        table = self.speeds.get(machine_type)
        if table is None:
            return 1.0
        speed = table.get(job_class)
        return table.get("default", 1.0) if speed is None else speed

    def contention_of(self, job_class: str) -> float:
        """Says which share of its speed a class loses on a machine full of other jobs."""
        loss = self.contention.get(job_class)
        return self.contention.get("default", 0.0) if loss is None else loss


class Placement(NamedTuple):
    """Where a job runs.

    Args:
        gpus: (index of the machine, GPUs there) for each machine, the one that holds rank 0 first.
        speed: What the policy expects, relative to the speed that durations refer to; None when it has no
            model of its own, then the cluster file's speed holds.
        speed_sd: Standard deviation of `speed`; None when the policy does not know.
    """

    gpus: tuple[tuple[int, int], ...]
    speed: float | None = None
    speed_sd: float | None = None


class Observation(NamedTuple):
    """How fast a job was seen to run over a stretch of time in which its speed did not change.

    Args:
        job: The job.
        placement: Where it ran.
        speed: Work done per second, relative to the speed that durations refer to.
        crowding: For each machine of the placement, the share of its other GPUs that other jobs held.
        start_s: When the stretch began.
        end_s: When it ended: now.
    """

    job: Job
    placement: Placement
    speed: float
    crowding: tuple[float, ...]
    start_s: float
    end_s: float


class Start(NamedTuple):
    """A decision to start a job now, with its reasons.

    Args:
        job: The job.
        placement: Where. Its GPUs are already taken in the state when the decision is handed out.
        score: What its place in the order came from; the lowest is served first.
        displaced: Runs stopped to make room; their jobs wait again, or are started elsewhere by a later decision.
    """

    job: Job
    placement: Placement
    score: float
    displaced: tuple[Running, ...] = ()


class Discipline(enum.Enum):
    """What happens when the first job in the order does not fit."""

    STRICT = "strict"  # all others wait behind it
    FIRST_FIT = "first-fit"  # those that fit pass it
    BACKFILL = "backfill"  # those pass it that do not delay its forecast start


@runtime_checkable
class Policy(Protocol):
    """Who runs next and where: pure decisions, shared by the simulator and the queue.

    `discipline` says who may pass a job that does not fit. With `preemptive`, a job that does not fit may stop running
    jobs whose score is higher than its own. `settled` promises that a job's score changes only while it runs,
    and then it only falls, or rises at the moments that `Steps.next_step` names; the scheduler then asks once per
    submission instead of once per decision. Otherwise it may change at any time.
    """

    discipline: ClassVar[Discipline]
    preemptive: ClassVar[bool]
    settled: ClassVar[bool]

    def order(self, jobs: Sequence[Job], state: ClusterState) -> Sequence[float]:
        """Gives each job its score: the lowest is served first, equal ones by submission. inf means not now."""
        ...

    def place(self, job: Job, state: ClusterState) -> Placement | None:
        """Chooses free GPUs for a job, or None if it has to wait.

        A refusal is one of all jobs of the same `shape`: the scheduler does not ask for them again before GPUs come
        free or, unless the policy is `settled`, before the next `order`; and until then the answer must stay None,
        though GPUs are taken. Where nothing runs and nothing is away, None means that such a job can never run.
        """
        ...


@runtime_checkable
class Learns(Protocol):
    """A policy that learns from the jobs that have ended."""

    def finished(self, job: Job, run_s: float, work_s: float) -> None:
        """Is told of each job that ends by itself.

        Args:
            job: The job.
            run_s: How long it held its GPUs, over all its runs.
            work_s: The time it would have taken at speed 1.
        """
        ...


@runtime_checkable
class Observes(Protocol):
    """A policy that learns from how fast jobs are seen to run."""

    def observed(self, observation: Observation) -> None:
        """Is told of each stretch of at least a minute, when it ends: the run does, or the job's speed changes."""
        ...


@runtime_checkable
class Forecasts(Protocol):
    """A policy that expects running times; `Discipline.BACKFILL` needs one."""

    def forecast_s(self, job: Job) -> float:
        """Says how long a job is expected to run in all, in seconds."""
        ...


@runtime_checkable
class Explains(Protocol):
    """A policy that can say what its latest scores came from."""

    def why(self, job: Job, state: ClusterState) -> str:
        """Says it of a waiting job, or of one just started, in words for the one who asks why it waits."""
        ...


@runtime_checkable
class Steps(Protocol):
    """A settled policy whose scores rise at known amounts of service."""

    def next_step(self, job: Job, service_gpu_s: float) -> float:
        """Says at which attained service, above the one given, the score of a running job rises; inf if never."""
        ...
