"""From a policy to decisions: keeps the waiting jobs, walks them in order, says which start now.

The simulator and the queue drive the same `Scheduler`; it knows no clock, no process and no true duration.

What makes it fast: jobs of one `shape` fit or fail alike, so they wait in one lane, sorted by score. A decision
looks only at the first job of each lane, and a shape that has failed is not tried again until GPUs come free.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from torchext.scheduling.state import ClusterState, Running
from torchext.scheduling.types import (
    Discipline,
    Forecasts,
    Job,
    Learns,
    Placement,
    Policy,
    SchedulingError,
    Shape,
    Start,
)

# (-priority, score, submit_s, number of the submission, job): sorts by priority, then score, then submission; numbers
# differ, so jobs never compare.
_Entry = tuple[int, float, float, int, Job]
_Victim = tuple[int, float, float, int, Running]


class Scheduler:
    """Holds waiting jobs and decides which of them start now. Not thread-safe; nothing blocks.

    The driver keeps `state.now_s` true, reports what happens, and calls `decide` after each change::

        scheduler = Scheduler(policy, ClusterState(cluster))
        scheduler.submit(job)
        for start in scheduler.decide():
            ...  # launch start.job on start.placement, after stopping start.displaced

    Args:
        policy: Decides order and place.
        state: The cluster; changed through this object from now on, except for `now_s`.

    Raises:
        TypeError: The policy backfills but cannot forecast, or a preemptive one is not first-fit.
    """

    def __init__(self, policy: Policy, state: ClusterState) -> None:
        if policy.discipline is Discipline.BACKFILL and not isinstance(policy, Forecasts):
            raise TypeError(f"{type(policy).__name__} backfills, so it needs a method forecast_s(job)")
        if policy.preemptive and policy.discipline is not Discipline.FIRST_FIT:
            raise TypeError(f"{type(policy).__name__} is preemptive, so its discipline must be FIRST_FIT")
        self.policy = policy
        self.state = state
        self._learner = policy if isinstance(policy, Learns) else None
        self._lanes: dict[Shape, list[_Entry]] = {}
        # Shapes that cannot start, each with the first job that could not; what comes after it could not either.
        self._blocked: dict[Shape, _Entry] = {}
        self._numbers: dict[str, int] = {}  # of waiting and running jobs
        self._next_number = 0
        # Running jobs of a preemptive policy, each with a bound that its score does not exceed, sorted.
        self._bounds: list[_Victim] = []
        self._bound_of: dict[str, _Victim] = {}

    def copy(self) -> Scheduler:
        """Copies jobs and state, to try decisions on; the policy is shared."""
        other = Scheduler(self.policy, self.state.copy())
        other._lanes = {key: lane.copy() for key, lane in self._lanes.items()}
        other._blocked = self._blocked.copy()
        other._numbers = self._numbers.copy()
        other._next_number = self._next_number
        other._bounds = self._bounds.copy()
        other._bound_of = self._bound_of.copy()
        return other

    @property
    def num_waiting(self) -> int:
        """How many jobs wait."""
        return sum(map(len, self._lanes.values()))

    # What happens

    def submit(self, job: Job, *, service_gpu_s: float = 0.0, progress_s: float = 0.0) -> None:
        """Adds a job that waits.

        Args:
            job: The job.
            service_gpu_s: GPU-seconds that it has held before, as the driver may know of an earlier life.
            progress_s: Work that it has kept of them, in seconds of a machine with speed 1.

        Raises:
            SchedulingError: A job of that id waits or runs.
        """
        self._number(job)
        if service_gpu_s or progress_s:
            self.state.recall(job, service_gpu_s, progress_s)
        self._enqueue(job)

    def adopt(
        self,
        job: Job,
        placement: Placement,
        start_s: float,
        *,
        service_gpu_s: float = 0.0,
        progress_s: float = 0.0,
    ) -> Running:
        """Adds a job that runs already, as a driver does that has been restarted.

        Args:
            job: The job.
            placement: Where it runs; those GPUs must be free here.
            start_s: Since when.
            service_gpu_s: GPU-seconds that it had held before.
            progress_s: Work that it had kept of them, in seconds of a machine with speed 1.

        Raises:
            SchedulingError: A job of that id waits or runs.
        """
        self._number(job)
        self.state.recall(job, service_gpu_s, progress_s)
        running = self.state.start(job, placement)
        running.start_s = running.mark_s = start_s
        if self.policy.preemptive:
            self._bound(running, self._scores([job])[0] if self.policy.settled else math.inf)
        return running

    def withdraw(self, job: Job) -> None:
        """Takes out a job, waiting or running, that will not end by itself: cancelled or failed. Teaches nothing."""
        if job.id in self.state.running:
            self._stop(job)
        else:
            lane = self._lanes[job.shape]
            lane[:] = [entry for entry in lane if entry[4].id != job.id]
            if not lane:
                del self._lanes[job.shape]
            # Whoever was found not to fit was so for want of room; but a strict order may now go on.
            self._blocked.pop(job.shape, None)
            self.state.forget(job)
        del self._numbers[job.id]

    def _number(self, job: Job) -> None:
        if job.id in self._numbers:
            raise SchedulingError(f"a job with id {job.id!r} is waiting or running already; give the new one another")
        self._numbers[job.id] = self._next_number
        self._next_number += 1

    def finish(self, job: Job) -> None:
        """Takes a running job out: it has ended by itself."""
        state = self.state
        running = self._stop(job)
        del self._numbers[job.id]
        if self._learner is not None:
            run_s = running.service_gpu_s(state.now_s) / job.num_gpus
            self._learner.finished(job, run_s, running.progress(state.now_s))

    def evict(self, job: Job, kept_progress_s: float) -> None:
        """Puts a running job back in line, with the progress that a checkpoint has kept: its machine failed."""
        self.state.remember(self._stop(job), kept_progress_s)
        self._enqueue(job)

    def close(self, machine: int) -> None:
        """Lets a machine take no new jobs."""
        self.state.close(machine)

    def open(self, machine: int) -> None:
        """Lets a closed machine take jobs again."""
        self.state.open(machine)
        self._blocked.clear()

    def rescored(self, job: Job) -> None:
        """Says that the score of a running job has risen, so waiting jobs may displace it.

        The driver of a policy that has `Steps` calls this when a job's service reaches the next one.
        """
        self._blocked.clear()
        if self.policy.preemptive:
            self._unbound(job)
            self._bound(self.state.running[job.id], self._scores([job])[0])

    # Decisions

    def decide(self) -> list[Start]:
        """Starts what can start now, in the state too, and says so in the order decided."""
        if not self._lanes:
            return []
        policy = self.policy
        if not policy.settled:
            self._rescore()
        if policy.discipline is Discipline.STRICT:
            return self._decide_strict()
        if policy.discipline is Discipline.BACKFILL:
            return self._decide_backfill()
        return self._decide_first_fit()

    def waiting(self) -> list[tuple[float, Job]]:
        """Lists waiting jobs in the order of the policy, each with its score."""
        if not self.policy.settled:
            self._rescore()
        return [(entry[1], entry[4]) for entry in self._in_order()]

    def _enqueue(self, job: Job) -> None:
        score = self.policy.order([job], self.state)[0] if self.policy.settled else 0.0
        if math.isnan(score):
            raise SchedulingError(f"{type(self.policy).__name__}.order gave a score that is not a number")
        entry = (-job.priority, score, job.submit_s, self._numbers[job.id], job)
        key = self._insert(entry)
        if self.policy.preemptive and key in self._blocked and entry < self._blocked[key]:
            del self._blocked[key]  # what could not displace anybody from a worse place may from this one

    def _insert(self, entry: _Entry) -> Shape:
        key = entry[4].shape
        lane = self._lanes.get(key)
        if lane is None:
            self._lanes[key] = [entry]
        elif entry > lane[-1]:
            lane.append(entry)
        else:
            insort(lane, entry)
        return key

    def _rescore(self) -> None:
        jobs = [entry[4] for lane in self._lanes.values() for entry in lane]
        scores = self._scores(jobs)
        self._lanes.clear()
        self._blocked.clear()
        for job, score in zip(jobs, scores, strict=True):
            entry = (-job.priority, score, job.submit_s, self._numbers[job.id], job)
            self._lanes.setdefault(job.shape, []).append(entry)
        for lane in self._lanes.values():
            lane.sort()

    def _scores(self, jobs: list[Job]) -> Sequence[float]:
        scores = self.policy.order(jobs, self.state)
        if len(scores) != len(jobs):
            raise SchedulingError(f"{type(self.policy).__name__}.order gave {len(scores)} scores for {len(jobs)} jobs")
        if any(map(math.isnan, scores)):
            raise SchedulingError(f"{type(self.policy).__name__}.order gave a score that is not a number")
        return scores

    def _in_order(self) -> Iterable[_Entry]:
        return heapq.merge(*self._lanes.values())

    def _start(self, entry: _Entry, placement: Placement, displaced: tuple[Running, ...] = ()) -> Start:
        """Takes a job out of its lane and its GPUs from the state."""
        _, score, _, _, job = entry
        key = job.shape
        lane = self._lanes[key]
        if lane[0] is entry:
            lane.pop(0)
        else:
            lane.remove(entry)
        if not lane:
            del self._lanes[key]
        running = self.state.start(job, placement)
        if self.policy.preemptive:
            self._bound(running, score if self.policy.settled else math.inf)
        return Start(job, placement, score, displaced)

    def _stop(self, job: Job) -> Running:
        """Takes a running job off its GPUs."""
        self._blocked.clear()
        if self.policy.preemptive:
            self._unbound(job)
        return self.state.stop(job)

    def _bound(self, running: Running, score: float) -> None:
        job = running.job
        victim = self._bound_of[job.id] = (-job.priority, score, job.submit_s, self._numbers[job.id], running)
        insort(self._bounds, victim)

    def _unbound(self, job: Job) -> None:
        del self._bounds[bisect_left(self._bounds, self._bound_of.pop(job.id))]

    def _decide_strict(self) -> list[Start]:
        starts: list[Start] = []
        while self._lanes:
            entry = min(lane[0] for lane in self._lanes.values())
            placement = self.policy.place(entry[4], self.state) if entry[1] < math.inf else None
            if placement is None:
                break
            starts.append(self._start(entry, placement))
        return starts

    def _decide_first_fit(self) -> list[Start]:
        lanes, blocked, state = self._lanes, self._blocked, self.state
        place, preemptive = self.policy.place, self.policy.preemptive
        starts: list[Start] = []
        if preemptive:
            ready = [key for key in lanes if key not in blocked]
        else:  # a shape begins with its number of GPUs: what is more than are free need not be tried
            num_free = state.num_free
            ready = [key for key in lanes if key[0] <= num_free and key not in blocked]
        while ready:
            entry = min([lanes[key][0] for key in ready]) if len(ready) > 1 else lanes[ready[0]][0]
            _, score, _, _, job = entry
            key = job.shape
            placement = place(job, state) if score < math.inf else None
            displaced: list[_Victim] = []
            if placement is None and preemptive and score < math.inf:
                placement, displaced = self._displace(score, job)
            if placement is None:
                blocked[key] = entry
                ready.remove(key)
                continue
            for victim in displaced:
                self._unbound(victim[4].job)
                stopped = state.stop(victim[4].job)
                state.remember(stopped, stopped.progress(state.now_s))
            starts.append(self._start(entry, placement, tuple(victim[4] for victim in displaced)))
            if displaced:
                for below, own, submit_s, number, running in displaced:
                    self._insert((below, own, submit_s, number, running.job))
                # What they leave over may serve jobs that come after this one. Those before it could have had it, too.
                for other in [other for other, failed in blocked.items() if failed > entry]:
                    del blocked[other]
                ready = [key for key in lanes if key not in blocked]
            elif key not in lanes:
                ready.remove(key)
        return starts

    def _decide_backfill(self) -> list[Start]:
        """EASY: the first job that does not fit gets a reservation; others pass if they do not touch it.

        A job passes either because it is forecast to end before the reservation begins, or because it uses none of
        the reserved machines.
        """
        starts = self._decide_strict()
        if not self._lanes or not self.state.num_free:
            return starts
        state, policy = self.state, self.policy
        assert isinstance(policy, Forecasts)
        head, *others = self._in_order()
        if head[1] == math.inf:
            return starts
        reserved, begin_s = self._reserve(head[4], policy)
        no_room: set[Shape] = set()
        no_room_beside: set[Shape] = set()
        for entry in others:
            key = entry[4].shape
            if key in no_room or entry[1] == math.inf:
                continue
            ends_before = state.now_s + policy.forecast_s(entry[4]) <= begin_s
            if not ends_before and key in no_room_beside:
                continue
            for machine in () if ends_before else reserved:
                state.close(machine)
            placement = policy.place(entry[4], state)
            for machine in () if ends_before else reserved:
                state.open(machine)
            if placement is not None:
                starts.append(self._start(entry, placement))
            elif ends_before:
                no_room.add(key)
            else:
                no_room_beside.add(key)
        return starts

    def _reserve(self, job: Job, policy: Forecasts) -> tuple[tuple[int, ...], float]:
        """Says on which machines, and from when on, a job is forecast to fit; never, if not even when all has ended.

        A job that has outrun its forecast is expected to run for twice as long as it has been forecast, or four times,
        and so on.

        Source: Tsafrir, Etsion and Feitelson, "Backfilling Using System-Generated Predictions Rather than User Runtime
        Estimates", TPDS 2007, section 5, corrects predictions in the same spirit.
        """
        state = self.state
        ends: dict[float, list[Running]] = {}
        for running in state.running.values():
            expected_s = max(policy.forecast_s(running.job), 1.0)
            held_s = running.service_gpu_s(state.now_s) / running.job.num_gpus
            while expected_s <= held_s:
                expected_s *= 2
            ends.setdefault(state.now_s + expected_s - held_s, []).append(running)
        given: list[Running] = []
        machines: tuple[int, ...] = ()
        begin_s = math.inf
        for end_s in sorted(ends):
            for running in ends[end_s]:
                state.give(running.placement)
                given.append(running)
            placement = self.policy.place(job, state)
            if placement is not None:
                machines, begin_s = tuple(index for index, _ in placement.gpus), end_s
                break
        for running in given:
            state.take(running.placement)
        return machines, begin_s

    def _victims(self, score: float, priority: int) -> list[_Victim]:
        """Lists running jobs that come after a waiting one, the first to be stopped first.

        That is the one with the lowest priority, then the highest score, then the latest submission.
        """
        above = self._bounds[bisect_left(self._bounds, (-priority, score, math.inf)) :]
        scores = self._scores([victim[4].job for victim in above])
        victims = [
            (below, own, submit_s, number, running)
            for own, (below, _, submit_s, number, running) in zip(scores, above, strict=True)
            if (below, own) > (-priority, score)
        ]
        victims.sort(reverse=True)
        return victims

    def _displace(self, score: float, job: Job) -> tuple[Placement | None, list[_Victim]]:
        """Finds a place for a job where running jobs that come after it make room, and which of them must stop."""
        state, policy = self.state, self.policy
        asked: list[_Victim] = []
        placement = None
        for victim in self._victims(score, job.priority):
            state.give(victim[4].placement)
            asked.append(victim)
            placement = policy.place(job, state)
            if placement is not None:
                break
        room = {} if placement is None else {index: state.free[index] - gpus for index, gpus in placement.gpus}
        for victim in asked:
            state.take(victim[4].placement)
        if placement is None:
            return None, []
        # Of those asked, the ones with the lowest scores stay as far as there is room beside the new job.
        displaced: list[_Victim] = []
        for victim in reversed(asked):
            here = [(index, gpus) for index, gpus in victim[4].placement.gpus if index in room]
            if any(room[index] < gpus for index, gpus in here):
                displaced.append(victim)
                continue
            for index, gpus in here:
                room[index] -= gpus
        return placement, displaced
