"""A scheduler that is too simple to be wrong: small time steps, plain lists, everything looked at again in each step.

Written from the docstrings of torchext.scheduling, and sharing no code with it but the plain data. It advances time by
a fixed step and is exact only if all that happens falls on multiples of it; it notices when something does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torchext.scheduling.simulator import Costs, Outage, RecordedJob
from torchext.scheduling.types import Cluster

Gpus = tuple[tuple[int, int], ...]


@dataclass
class Tracked:
    number: int
    recorded: RecordedJob
    where: Gpus = ()
    submitted: bool = False
    done: bool = False
    ever_started: bool = False
    start: float = 0.0
    warm_up: float = 0.0
    progress: float = 0.0
    saved: float = 0.0
    held: float = 0.0
    score: float = 0.0
    runs: list[tuple[Gpus, float, float, str]] = field(default_factory=list)

    @property
    def gpus(self) -> int:
        return self.recorded.job.num_gpus

    @property
    def waits(self) -> bool:
        return self.submitted and not self.done and not self.where


class Reference:
    def __init__(
        self,
        trace: Sequence[RecordedJob],
        cluster: Cluster,
        policy: str,
        *,
        outages: Sequence[Outage] = (),
        costs: Costs,
        spread: bool = False,
        las_thresholds: tuple[float, float] = (3600.0, 36000.0),
        step: float,
    ) -> None:
        ordered = sorted(trace, key=lambda r: r.job.submit_s)
        self.jobs = [Tracked(i, r) for i, r in enumerate(ordered)]
        self.cluster = cluster
        self.policy = policy
        self.outages = outages
        self.costs = costs
        self.spread = spread
        self.las_thresholds = las_thresholds
        self.step = step
        self.now = 0.0
        self.ended: list[tuple[Tracked, float]] = []  # with what the policy learns: time held, or work

    def run(self) -> list[Tracked]:
        preemptive = self.policy in ("las", "srsf")
        while not all(job.done for job in self.jobs):
            assert self.now < 10_000, "does not end"
            while self._take_in():
                self._decide(preemptive)
            if self.policy != "easy-backfill":  # a second look, with nothing new, changes nothing
                before = [job.where for job in self.jobs]
                self._decide(preemptive)
                assert before == [job.where for job in self.jobs], "decided in two goes"
            self._advance()
        return self.jobs

    # Time

    def _down(self, machine: int) -> bool:
        return any(o.machine == machine and o.start_s <= self.now < o.end_s for o in self.outages)

    def _take_in(self) -> bool:
        """Lets happen what is due; says whether there was something."""
        something = False
        for job in self.jobs:
            if job.where and job.warm_up == 0 and job.progress >= job.recorded.duration_s:
                assert job.progress == job.recorded.duration_s, "the step is too long"
                self._stop(job, "finished")
                job.done = something = True
                self.ended.append((job, job.recorded.duration_s if self.policy == "gavel" else job.held))
        for job in self.jobs:
            if any(self._down(machine) for machine, _ in job.where):
                progress = job.progress
                self._stop(job, "failed")
                every = self.costs.checkpoint_interval_s
                job.progress = job.saved
                while every < math.inf and job.progress != progress:
                    multiples = [k * every for k in range(1000) if k * every <= progress]
                    job.progress = max(job.saved, multiples[-1])
                    break
                job.saved = job.progress
                job.score = self._score(job)
                something = True
        for outage in self.outages:
            something |= self.now in (outage.start_s, outage.end_s) and self._once(outage)
        for job in self.jobs:
            if not job.submitted and job.recorded.job.submit_s <= self.now:
                assert job.recorded.job.submit_s == self.now, "the step is too long"
                job.submitted = something = True
                job.score = self._score(job)
        for job in self.jobs:
            if job.where and self.policy == "las" and self._score(job) != job.score:
                job.score = self._score(job)
                something = True
        return something

    def _once(self, outage: Outage) -> bool:
        seen = self.__dict__.setdefault("seen", set())
        key = (outage, self.now)
        if key in seen:
            return False
        seen.add(key)
        return True

    def _advance(self) -> None:
        speeds = [self._speed(job) if job.where else 0.0 for job in self.jobs]
        for job, speed in zip(self.jobs, speeds, strict=True):
            if not job.where:
                continue
            job.held += self.step
            if job.warm_up > 0:
                job.warm_up -= self.step
                assert job.warm_up >= 0, "the step is too long"
            else:
                job.progress += speed * self.step
        self.now += self.step

    def _speed(self, job: Tracked) -> float:
        kind = job.recorded.job.job_class
        speeds = []
        for machine, own in job.where:
            total = self.cluster.machines[machine].num_gpus
            others = sum(g for j in self.jobs if j is not job for m, g in j.where if m == machine)
            loss = self.cluster.contention.get(kind, self.cluster.contention.get("default", 0.0))
            slowed = 1 - loss * (others / (total - own) if others else 0)
            speeds.append(self._table(kind, self.cluster.machines[machine].type) * slowed)
        return min(speeds)

    def _table(self, kind: str, machine_type: str) -> float:
        table = self.cluster.speeds.get(machine_type, {})
        return table.get(kind, table.get("default", 1.0))

    def _stop(self, job: Tracked, outcome: str) -> None:
        job.runs.append((job.where, job.start, self.now, outcome))
        job.where = ()

    # Decisions

    def _score(self, job: Tracked) -> float:
        submitted, duration = job.recorded.job.submit_s, job.recorded.duration_s
        if self.policy in ("fifo", "fifo-firstfit", "easy-backfill"):
            return submitted
        if self.policy == "sjf":
            return duration
        if self.policy == "srsf":
            return (duration - job.progress) * job.gpus
        if self.policy == "gavel":
            kind = job.recorded.job.job_class
            best = max(self._table(kind, machine.type) for machine in self.cluster.machines)
            return self._forecast(job) * job.gpus / best
        if self.policy == "qssf":
            return self._forecast(job) * job.gpus
        assert self.policy == "las"
        low, high = self.las_thresholds
        service = job.held * job.gpus
        return float((service >= low) + (service >= high))

    def _forecast(self, job: Tracked) -> float:
        mean = 3600.0
        if job.recorded.job.estimate_s is not None:
            mean = job.recorded.job.estimate_s
            if self.policy == "easy-backfill":
                return mean
        mine = job.recorded.job
        groups: list[Callable[[RecordedJob], bool]] = [
            lambda r: True,
            lambda r: r.job.num_gpus == mine.num_gpus,
            lambda r: (r.job.num_gpus, r.job.tenant) == (mine.num_gpus, mine.tenant),
            lambda r: (r.job.num_gpus, r.job.tenant, r.job.job_class) == (mine.num_gpus, mine.tenant, mine.job_class),
        ]
        for belongs in groups:
            times = [held for ended, held in self.ended if belongs(ended.recorded)]
            if times:
                mean = (sum(times) + 5 * mean) / (len(times) + 5)
        return mean

    def _decide(self, preemptive: bool) -> None:
        for job in self.jobs:
            if self.policy in ("las", "srsf"):
                job.score = self._score(job)
        queue = sorted((job for job in self.jobs if job.waits), key=self._rank)
        for place, job in enumerate(queue):
            where = self._find(job, self._free())
            if where is not None:
                self._start(job, where, stopped=False)
                continue
            if self.policy == "fifo":
                return
            if self.policy == "easy-backfill":
                self._backfill(job, queue[place + 1 :])
                return
            if preemptive and self._displace(job):
                self._decide(preemptive)  # from the top: those that were stopped are in the queue now
                return

    def _rank(self, job: Tracked) -> tuple[float, float, int]:
        return (job.score, job.recorded.job.submit_s, job.number)

    def _start(self, job: Tracked, where: Gpus, *, stopped: bool) -> None:
        job.where = where
        job.start = self.now
        job.warm_up = self.costs.checkpoint_s * stopped + self.costs.restart_s * job.ever_started
        job.ever_started = True

    def _displace(self, job: Tracked) -> bool:
        higher = [other for other in self.jobs if other.where and other.score > job.score]
        higher.sort(key=self._rank, reverse=True)
        free = self._free()
        for count in range(1, len(higher) + 1):
            for machine, gpus in higher[count - 1].where:
                free[machine] += 0 if self._down(machine) else gpus
            where = self._find(job, free)
            if where is None:
                continue
            free = self._free()
            for other in higher[:count]:
                for machine, gpus in other.where:
                    free[machine] += gpus
            for machine, gpus in where:
                free[machine] -= gpus
            chosen = {machine for machine, _ in where}
            for other in reversed(higher[:count]):
                if all(free[machine] >= gpus for machine, gpus in other.where if machine in chosen):
                    for machine, gpus in other.where:
                        free[machine] -= gpus
                else:
                    self._stop(other, "displaced")
                    other.saved = other.progress
            self._start(job, where, stopped=True)
            return True
        return False

    def _backfill(self, head: Tracked, rest: list[Tracked]) -> None:
        free = self._free()
        ends = []
        for job in self.jobs:
            if job.where:
                expected = max(self._forecast(job), 1.0)
                while expected <= job.held:
                    expected *= 2
                ends.append((self.now + expected - job.held, job))
        begin, reserved = math.inf, set()
        for end in sorted({end for end, _ in ends}):
            for own_end, job in ends:
                for machine, gpus in job.where if own_end == end else ():
                    free[machine] += gpus
            where = self._find(head, free)
            if where is not None:
                begin, reserved = end, {machine for machine, _ in where}
                break
        for job in rest:
            free = self._free()
            if self.now + self._forecast(job) > begin:
                free = [0 if machine in reserved else f for machine, f in enumerate(free)]
            where = self._find(job, free)
            if where is not None:
                self._start(job, where, stopped=False)

    def _free(self) -> list[int]:
        free = [0 if self._down(i) else m.num_gpus for i, m in enumerate(self.cluster.machines)]
        for job in self.jobs:
            for machine, gpus in job.where:
                free[machine] -= gpus
        return free

    def _find(self, job: Tracked, free: list[int]) -> Gpus | None:
        order = sorted(range(len(free)), key=lambda i: (-free[i] if self.spread else free[i], i))
        sizes = sorted({machine.num_gpus for machine in self.cluster.machines}, reverse=True)
        per_node = job.recorded.job.gpus_per_node
        if per_node is None and job.gpus <= sizes[0]:
            sizes = [job.gpus]
        for size in sizes if per_node is None else [per_node]:
            pieces = [size] * (job.gpus // size) + ([job.gpus % size] if job.gpus % size else [])
            where: list[tuple[int, int]] = []
            for piece in pieces:
                used = {machine for machine, _ in where}
                machine = next((i for i in order if i not in used and free[i] >= piece), None)
                if machine is not None:
                    where.append((machine, piece))
            if len(where) == len(pieces):
                return tuple(where)
        return None
