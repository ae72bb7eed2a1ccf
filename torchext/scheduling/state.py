"""What a cluster looks like at one moment: free GPUs, running jobs, service attained so far.

Free GPUs are kept as bit sets, one per number of free GPUs: bit `i` of the set for `f` says that machine `i` has
exactly `f` free. Finding the fullest machine that still fits a job is then a few operations on whole integers, also
with a thousand machines, and always gives the machine with the lowest index.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchext.scheduling.types import Cluster, Job, Placement

ANY_MACHINE = -1  # as a bit set: all bits


class Running:
    """A running job; the owner of the state keeps `speed` true as it changes.

    Attributes:
        job: The job.
        placement: Where it runs.
        start_s: When it got its GPUs.
        earlier_gpu_s: Service of its earlier runs, in GPU-seconds.
        progress_s: Work done by `mark_s`, in seconds of a machine with speed 1.
        mark_s: From when on it makes progress at `speed`; in the future while it still loads its checkpoint.
        speed: Its present speed; 0 until the owner of the state has set it.
    """

    __slots__ = ("earlier_gpu_s", "job", "mark_s", "placement", "progress_s", "speed", "start_s")

    def __init__(self, job: Job, placement: Placement, start_s: float, earlier_gpu_s: float, progress_s: float) -> None:
        self.job = job
        self.placement = placement
        self.start_s = start_s
        self.earlier_gpu_s = earlier_gpu_s
        self.progress_s = progress_s
        self.mark_s = start_s
        self.speed = 0.0

    def service_gpu_s(self, now_s: float) -> float:
        """Returns the GPU-seconds held so far, over all runs."""
        return self.earlier_gpu_s + self.job.num_gpus * (now_s - self.start_s)

    def progress(self, now_s: float) -> float:
        """Returns the work done so far, over all runs, in seconds of a machine with speed 1."""
        elapsed_s = now_s - self.mark_s
        return self.progress_s + self.speed * elapsed_s if elapsed_s > 0 else self.progress_s


class ClusterState:
    """The cluster at `now_s`. Policies read it; the scheduler and its driver change it. Not thread-safe.

    Args:
        cluster: The machines; all are open and free at first.

    Attributes:
        cluster: As given.
        now_s: The present time, set by the driver before it asks for decisions.
        free: Free GPUs of each machine, whether or not it is open.
        num_free: Free GPUs of all open machines.
        num_gpus: GPUs of all machines.
        running: Running jobs by id, in the order they were started.
        of_type: Bit set of the machines of each type, in the order of the cluster.
        sizes: Distinct numbers of GPUs per machine, the largest first.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.now_s = 0.0
        self.free = [machine.num_gpus for machine in cluster.machines]
        self.num_free = self.num_gpus = sum(self.free)
        self._total = self.free.copy()
        self.running: dict[str, Running] = {}
        self.of_type: dict[str, int] = {}
        self.sizes = sorted(set(self.free), reverse=True)
        self._bits = [1 << i for i in range(len(self.free))]
        self._with_free = [0] * (self.sizes[0] + 1)
        self._of_size: dict[int, int] = {}
        self._within: dict[float, int] = {}  # price -> machines that cost no more
        self._closed = 0
        self._jobs_on: list[dict[str, None]] = [{} for _ in self.free]
        self._past: dict[str, tuple[float, float]] = {}  # stopped jobs: GPU-seconds and progress
        for i, machine in enumerate(cluster.machines):
            self.of_type[machine.type] = self.of_type.get(machine.type, 0) | self._bits[i]
            self._with_free[machine.num_gpus] |= self._bits[i]
            self._of_size[machine.num_gpus] = self._of_size.get(machine.num_gpus, 0) | self._bits[i]

    def copy(self) -> ClusterState:
        """Copies the state, to try decisions on; the `Running` records are shared."""
        other = ClusterState(self.cluster)
        other.now_s, other.num_free, other._closed = self.now_s, self.num_free, self._closed
        other.free = self.free.copy()
        other.running = self.running.copy()
        other._with_free = self._with_free.copy()
        other._jobs_on = [jobs.copy() for jobs in self._jobs_on]
        other._past = self._past.copy()
        return other

    # Reading

    def fullest(self, num_gpus: int, among: int = ANY_MACHINE) -> Iterator[int]:
        """Yields open machines with at least so many free GPUs, fewest free first, then by index."""
        for bits in self._with_free[num_gpus:]:
            yield from _indices(bits & among)

    def emptiest(self, num_gpus: int, among: int = ANY_MACHINE) -> Iterator[int]:
        """Yields open machines with at least so many free GPUs, most free first, then by index."""
        for bits in reversed(self._with_free[num_gpus:]):
            yield from _indices(bits & among)

    def fullest_one(self, num_gpus: int, among: int = ANY_MACHINE) -> int:
        """Returns the first machine of `fullest`, or -1."""
        for bits in self._with_free[num_gpus:]:
            bits &= among
            if bits:
                return (bits & -bits).bit_length() - 1
        return -1

    def emptiest_one(self, num_gpus: int, among: int = ANY_MACHINE) -> int:
        """Returns the first machine of `emptiest`, or -1."""
        for bits in reversed(self._with_free[num_gpus:]):
            bits &= among
            if bits:
                return (bits & -bits).bit_length() - 1
        return -1

    def fits(self, num_machines: int, num_gpus: int, among: int = ANY_MACHINE) -> bool:
        """Says whether so many open machines have at least so many free GPUs each."""
        for bits in reversed(self._with_free[num_gpus:]):
            num_machines -= (bits & among).bit_count()
            if num_machines <= 0:
                return True
        return False

    @property
    def most_free(self) -> int:
        """Free GPUs of the open machine that has the most; 0 if all are closed."""
        return next((num_gpus for num_gpus in reversed(range(len(self._with_free))) if self._with_free[num_gpus]), 0)

    @property
    def num_idle(self) -> int:
        """How many open machines have all of their GPUs free."""
        return sum((self._with_free[size] & bits).bit_count() for size, bits in self._of_size.items())

    def within(self, max_price_per_gpu_hour: float) -> int:
        """Says, as a bit set, which machines cost no more than this."""
        bits = self._within.get(max_price_per_gpu_hour)
        if bits is None:
            machines = self.cluster.machines
            bits = sum(
                bit
                for bit, machine in zip(self._bits, machines, strict=True)
                if machine.price_per_gpu_hour <= max_price_per_gpu_hour
            )
            self._within[max_price_per_gpu_hour] = bits
        return bits

    def jobs_on(self, machine: int) -> list[Job]:
        """Lists the jobs that run on a machine, in the order they came."""
        return [self.running[job_id].job for job_id in self._jobs_on[machine]]

    def is_open(self, machine: int) -> bool:
        """Says whether a machine takes jobs."""
        return not self._closed & self._bits[machine]

    def service_gpu_s(self, job: Job) -> float:
        """Returns the GPU-seconds that a job, running or waiting, has held so far."""
        running = self.running.get(job.id)
        if running is not None:
            return running.service_gpu_s(self.now_s)
        return self._past.get(job.id, _NOTHING)[0]

    def progress_s(self, job: Job) -> float:
        """Returns the work a job, running or waiting, has done so far, in seconds of a machine with speed 1."""
        running = self.running.get(job.id)
        if running is not None:
            return running.progress(self.now_s)
        return self._past.get(job.id, _NOTHING)[1]

    def worked(self) -> Iterator[tuple[str, float]]:
        """Yields the ids of jobs that run or have run, each with `progress_s` of the job."""
        for job_id, (_, progress_s) in self._past.items():
            yield job_id, progress_s
        for job_id, running in self.running.items():
            yield job_id, running.progress(self.now_s)

    def crowding(self, placement: Placement) -> tuple[float, ...]:
        """Computes, for each machine of a placement that is taken already, the share of its other GPUs in use."""
        shares = []
        for index, num_gpus in placement.gpus:
            total = self.cluster.machines[index].num_gpus
            others = total - self.free[index] - num_gpus
            shares.append(others / (total - num_gpus) if others else 0.0)
        return tuple(shares)

    def speed(self, job: Job, placement: Placement) -> float:
        """Computes the speed the cluster's tables give, with the jobs now beside it; the slowest machine decides.

        The placement must be taken already.
        """
        cluster = self.cluster
        if not cluster.speeds and not cluster.contention:
            return 1.0
        loss = cluster.contention_of(job.job_class)
        return min(
            cluster.speed(job.job_class, cluster.machines[index].type) * (1 - loss * share)
            for (index, _), share in zip(placement.gpus, self.crowding(placement), strict=True)
        )

    # Changing

    def start(self, job: Job, placement: Placement) -> Running:
        """Takes the GPUs of a placement for a job."""
        earlier_gpu_s, progress_s = self._past.pop(job.id, _NOTHING)
        running = self.running[job.id] = Running(job, placement, self.now_s, earlier_gpu_s, progress_s)
        for index, num_gpus in placement.gpus:
            self._shift(index, -num_gpus)
            self._jobs_on[index][job.id] = None
        return running

    def stop(self, job: Job) -> Running:
        """Gives back the GPUs of a running job; `remember` must follow if it will run again."""
        running = self.running.pop(job.id)
        for index, num_gpus in running.placement.gpus:
            self._shift(index, num_gpus)
            del self._jobs_on[index][job.id]
        return running

    def remember(self, stopped: Running, progress_s: float) -> None:
        """Keeps the service that a job has had until it was stopped just now, and its progress as saved."""
        self._past[stopped.job.id] = (stopped.service_gpu_s(self.now_s), progress_s)

    def recall(self, job: Job, service_gpu_s: float, progress_s: float) -> None:
        """Takes note of the service and progress of a job from before this state was made."""
        self._past[job.id] = (service_gpu_s, progress_s)

    def forget(self, job: Job) -> None:
        """Drops what is remembered of a job that will not run again."""
        self._past.pop(job.id, None)

    def close(self, machine: int) -> None:
        """Lets a machine take no new jobs (drained or failed); those on it stay until stopped."""
        assert self.is_open(machine)
        free = self.free[machine]
        self._with_free[free] ^= self._bits[machine]
        self.num_free -= free
        self._closed |= self._bits[machine]

    def open(self, machine: int) -> None:
        """Lets a closed machine take jobs again."""
        assert not self.is_open(machine)
        free = self.free[machine]
        self._closed ^= self._bits[machine]
        self._with_free[free] |= self._bits[machine]
        self.num_free += free

    def give(self, placement: Placement) -> None:
        """Frees GPUs for a trial, without a job; `take` must follow before anybody else looks."""
        for index, num_gpus in placement.gpus:
            self._shift(index, num_gpus)

    def take(self, placement: Placement) -> None:
        """Undoes `give`."""
        for index, num_gpus in placement.gpus:
            self._shift(index, -num_gpus)

    def _shift(self, machine: int, num_gpus: int) -> None:
        """Adds to the free GPUs of a machine."""
        before = self.free[machine]
        after = self.free[machine] = before + num_gpus
        assert 0 <= after <= self._total[machine]
        bit = self._bits[machine]
        if not self._closed & bit:
            self._with_free[before] ^= bit
            self._with_free[after] |= bit
            self.num_free += num_gpus


_NOTHING = (0.0, 0.0)


def _indices(bits: int) -> Iterator[int]:
    """Yields the places of the set bits, the lowest first."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
