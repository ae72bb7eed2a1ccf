"""Turns decisions of the policy into runs, and what becomes of runs into what the policy knows.

Everything that matters is in the `Store` before it is done. What runs is found again by its folder (see `folders`), so
that a dispatcher made anew goes on where another was killed.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Mapping
from pathlib import Path

from torchext.launch.errors import LaunchError
from torchext.launch.queue.clock import Clock
from torchext.launch.queue.node import Node
from torchext.launch.queue.parts import make_part, make_request
from torchext.launch.queue.store import JobRow, RunRow, Store
from torchext.launch.queue.types import JobState, PartKey, PartReport, PartState, Request, Submission, Why
from torchext.launch.queue.verdict import goes_on_without, judge
from torchext.launch.queue.words import explain, too_large
from torchext.scheduling import (
    Cluster,
    ClusterState,
    Job,
    Learns,
    Placement,
    Plan,
    PlannedStart,
    Policy,
    Running,
    Scheduler,
    Start,
    Steps,
    explain_starts,
    plan,
)

logger = logging.getLogger(__name__)


class Dispatcher:
    """The queue of one cluster. Not thread-safe; `tick` has to be called again and again.

    Args:
        store: Its memory; what it holds is taken over.
        cluster: The machines.
        policy: Who runs next and where.
        nodes: The machines again, by name, as things that can start processes.
        folder: For files of jobs.

    Raises:
        LaunchError: A job runs on a machine that the cluster does not have.
    """

    def __init__(
        self, store: Store, cluster: Cluster, policy: Policy, nodes: Mapping[str, Node], *, folder: Path
    ) -> None:
        self._store = store
        self._nodes = nodes
        self._folder = folder
        self._clock = Clock(store.clock_s())
        self._clock_saved_s = 0.0
        self._machines = {machine.name: index for index, machine in enumerate(cluster.machines)}
        self._cluster = cluster
        self._scheduler = Scheduler(policy, ClusterState(cluster))
        self._rows: dict[int, JobRow] = {}  # jobs that have not ended
        self._jobs: dict[int, Job] = {}  # those of them that the scheduler knows
        self._runs: list[RunRow] = []  # not over, by decision
        self._next_step: dict[int, float] = {}
        self._away: set[str] = set()  # machines that cannot be asked
        self._drained = store.drained()
        self._recover()

    # What users ask for

    def submit(self, submission: Submission) -> int:
        """Takes a job in; it is kept once this returns.

        Returns:
            Its number.

        Raises:
            LaunchError: The cluster could never run it.
        """
        if submission.nproc_per_node is None:
            largest = max(machine.num_gpus for machine in self._cluster.machines)
            submission = dataclasses.replace(submission, nproc_per_node=largest)
        try:
            job = _job(JobRow(0, submission, self._clock.now_s(), JobState.WAITING))
        except ValueError as error:
            raise LaunchError(str(error)) from None
        if self._scheduler.policy.place(job, ClusterState(self._cluster)) is None:
            raise LaunchError(too_large(submission, self._cluster))
        with self._store.transaction():
            row = self._store.add_job(submission, self._clock.now_s())
        self._rows[row.id] = row
        self._enter(row)
        return row.id

    def cancel(self, number: int) -> None:
        """Ends a job for good: at once if it waits, within its grace if it runs.

        Raises:
            LaunchError: There is no such job, or it has ended.
        """
        row = self._find(number)
        if row.state.ended:
            raise LaunchError(f"job {number} has ended already: {row.state.value}")
        started = [run for run in self._runs_of(number) if run.start_s is not None]
        # A run that makes room is out of the scheduler's books already, its job in line or placed anew.
        in_line = all(run.why is not None and run.why.makes_room for run in started)
        with self._store.transaction():
            self._drop_unstarted(number, "cancelled before it started")
            for run in started:
                run.why = Why.PREEMPT_CANCEL if run.why is not None and run.why.makes_room else Why.CANCEL
                self._store.save_run(run)
            if not started:
                self._end_job(row, JobState.CANCELLED, "cancelled")
        if in_line:
            self._leave(number)

    def requeue(self, number: int) -> None:
        """Puts a job back in line: a running one is stopped first, within its grace; an ended one starts anew.

        Raises:
            LaunchError: There is no such job, or it waits already.
        """
        row = self._find(number)
        if row.state.ended:
            row.state, row.reason, row.failures, row.losses, row.end_s = JobState.WAITING, "requeued", 0, 0, None
            with self._store.transaction():
                self._store.save_job(row)
            self._rows[number] = row
            self._enter(row)
            return
        started = [run for run in self._runs_of(number) if run.start_s is not None and run.why is None]
        if not started:
            if any(run.why in (Why.CANCEL, Why.PREEMPT_CANCEL) for run in self._runs_of(number)):
                raise LaunchError(f"job {number} is being cancelled; requeue it once it has ended")
            raise LaunchError(f"job {number} waits already")
        self._ask_to_end(started, Why.REQUEUE)

    def drain(self, machine: str, *, now: bool = False) -> None:
        """Lets a machine take no new jobs; with ``now``, also stops those on it and puts them back in line.

        Raises:
            LaunchError: There is no such machine.
        """
        self._check_machine(machine)
        self._store.set_drained(machine, True)
        self._drained.add(machine)
        self._open_or_close(machine)
        if now:
            here = [run for run in self._runs if run.why is None and machine in dict(run.machines)]
            self._ask_to_end([run for run in here if run.start_s is not None], Why.REQUEUE)

    def undrain(self, machine: str) -> None:
        """Lets a machine take jobs again.

        Raises:
            LaunchError: There is no such machine.
        """
        self._check_machine(machine)
        self._store.set_drained(machine, False)
        self._drained.discard(machine)
        self._open_or_close(machine)

    # What users ask about

    def plan(self) -> Plan:
        """Says what would start now, and why; and why others wait."""
        self._scheduler.state.now_s = self._clock.now_s()
        return plan(self._scheduler)

    def now_s(self) -> float:
        """The time on the clock of the queue."""
        return self._clock.now_s()

    def jobs(self, ended_within_s: float = math.inf) -> list[JobRow]:
        """Lists jobs that have not ended, or only lately."""
        return self._store.recent_jobs(self._clock.now_s() - ended_within_s)

    def job(self, number: int) -> JobRow:
        """Finds a job.

        Raises:
            LaunchError: There is none of that number.
        """
        return self._find(number)

    def runs(self, number: int) -> list[RunRow]:
        """Lists the runs of a job."""
        return self._store.runs(number)

    def machines(self) -> list[tuple[str, str, int, int, list[int]]]:
        """Lists machines: name, state, slots, free slots, jobs there."""
        listed = []
        for machine in self._cluster.machines:
            state = "away" if machine.name in self._away else "drained" if machine.name in self._drained else "up"
            here = [run for run in self._runs if run.start_s is not None and machine.name in dict(run.machines)]
            used = sum(dict(run.machines)[machine.name] for run in here)
            listed.append(
                (machine.name, state, machine.num_gpus, machine.num_gpus - used, sorted(run.job for run in here))
            )
        return listed

    def read_log(self, key: PartKey, offset: int, size: int) -> tuple[bytes, bool]:
        """Reads what a part has printed; says, too, whether more may come.

        Raises:
            LaunchError: There is no such part.
        """
        run = next((run for run in self._store.runs(key.job) if run.number == key.run), None)
        if run is None or not 0 <= key.node < len(run.machines):
            raise LaunchError(f"job {key.job} has no run {key.run} with a node {key.node}")
        over = run.outcome is not None
        return self._nodes[run.machines[key.node][0]].read_log(key, offset, size), not over

    # What happens

    def tick(self) -> None:
        """Looks at what runs, decides what starts, starts it."""
        for run in list(self._runs):
            if run.start_s is not None:
                self._watch(run)
        self._decide()
        for run in list(self._runs):
            if run.start_s is None:
                self._try_to_launch(run)
        now_s = self._clock.now_s()
        if now_s > self._clock_saved_s + 10:
            self._store.save_clock(now_s)
            self._clock_saved_s = now_s

    def open_parts(self, machine: str | None = None) -> dict[PartKey, float]:
        """Parts of runs that have been started and are not over, with the grace of each; of one machine, or of all."""
        return {
            key: self._rows[run.job].submission.grace_s
            for run in self._runs
            if run.start_s is not None
            for key, (name, _) in zip(run.keys(), run.machines, strict=True)
            if machine in (None, name)
        }

    def upcoming(self, limit: int) -> list[Request]:
        """Describes the next runs of jobs that hold nothing yet, of the first of them up to a limit."""
        decided = {run.job: run.number for run in self._runs if run.start_s is None}
        waiting = (row for row in self._rows.values() if row.state is JobState.WAITING or row.id in decided)
        return [
            make_request(
                row.submission,
                PartKey(row.id, decided.get(row.id, row.num_runs + 1), 0),
                job_folder=self._job_folder(row.id),
            )
            for row in itertools.islice(waiting, limit)
        ]

    def set_away(self, machine: str, away: bool) -> None:
        """Takes note that a machine can, or cannot, be asked for new work."""
        (self._away.add if away else self._away.discard)(machine)
        self._open_or_close(machine)

    def _recover(self) -> None:
        """Takes over what the store knows."""
        policy = self._scheduler.policy
        self._scheduler.state.now_s = self._clock.now_s()
        if isinstance(policy, Learns):
            for row in self._store.jobs(JobState.DONE):
                policy.finished(_job(row), row.run_s, row.run_s)
        for row in self._store.jobs(JobState.WAITING, JobState.RUNNING):
            self._rows[row.id] = row
        self._runs = self._store.open_runs()
        for run in self._runs:
            for name, _ in run.machines:
                self._check_machine(name)
        for row in self._rows.values():
            runs = self._runs_of(row.id)
            holding = [run for run in runs if run.why is None or not run.why.makes_room]
            if not holding:
                if not any(run.why is Why.PREEMPT_CANCEL for run in runs):
                    self._enter(row)
                continue
            job = self._jobs[row.id] = _job(row)
            placement = Placement(tuple((self._machines[name], slots) for name, slots in holding[-1].machines))
            if any(self._scheduler.state.free[index] < slots for index, slots in placement.gpus):
                raise LaunchError(
                    f"job {row.id} runs on {', '.join(name for name, _ in holding[-1].machines)}, which the cluster "
                    "file now gives fewer slots than are in use; let it end, or cancel it, with the old file first"
                )
            running = self._scheduler.adopt(
                job,
                placement,
                holding[-1].start_s or self._clock.now_s(),
                service_gpu_s=row.run_s * job.num_gpus,
                progress_s=row.run_s,
            )
            running.speed = self._scheduler.state.speed(job, placement)
            self._expect_step(running)
        for name in self._machines:
            self._open_or_close(name)

    def _watch(self, run: RunRow) -> None:
        reports = [self._nodes[name].look(key) for key, (name, _) in zip(run.keys(), run.machines, strict=True)]
        states = [report.state for report in reports]
        if run.why is None:
            failed = any(report.state is PartState.LOST or report.status for report in reports)
            if failed and goes_on_without(self._rows[run.job].submission, reports):
                return None
            if failed and len(reports) > 1 and not all(state.idle for state in states):
                self._ask_to_end([run], Why.PEER)
            elif not failed:
                for key, report in zip(run.keys(), reports, strict=True):
                    # The first says where the others find it. It is absent only if we were killed before starting it.
                    if report.state is PartState.ABSENT and (key.node == 0 or reports[0].endpoint is not None):
                        self._start_part(run, key, reports[0].endpoint)
                return self._conclude(run, reports) if all(s is PartState.ENDED for s in states) else None
        if run.why is not None:
            for key, (name, _), state in zip(run.keys(), run.machines, states, strict=True):
                if state is PartState.RUNNING:
                    self._nodes[name].end(key)
        if all(state.idle for state in states):
            self._conclude(run, reports)
        return None

    def _conclude(self, run: RunRow, reports: list[PartReport]) -> None:
        """All of a run has ended: says what that means for its job."""
        row = self._rows[run.job]
        now_s = self._clock.now_s()
        run.end_s = now_s
        assert run.start_s is not None
        row.run_s += now_s - run.start_s
        ended, outcome, again = judge(row, run, reports)
        run.outcome = outcome
        with self._store.transaction():
            self._store.save_run(run)
            self._runs.remove(run)
            if ended is not None:
                # A run that was to make room has done so, and another may have been decided; it is not needed.
                self._drop_unstarted(row.id, "not needed: the job has ended")
                self._end_job(row, ended, outcome)
            else:
                if not self._runs_of(row.id):
                    row.state = JobState.WAITING
                row.reason = outcome
                self._store.save_job(row)
        self._tell_scheduler(row, run, ended, again)
        logger.info("job %d, run %d: %s", row.id, run.number, outcome)

    def _tell_scheduler(self, row: JobRow, run: RunRow, ended: JobState | None, again: bool) -> None:
        job = self._jobs.get(row.id)
        if job is None:
            return
        scheduler = self._scheduler
        scheduler.state.now_s = self._clock.now_s()
        holds = job.id in scheduler.state.running and not (run.why is not None and run.why.makes_room)
        if ended is JobState.DONE and holds:
            scheduler.finish(job)
            del self._jobs[row.id]
            self._next_step.pop(row.id, None)
        elif ended is not None:
            self._leave(row.id)
        elif again and holds:
            scheduler.evict(job, scheduler.state.running[job.id].progress(scheduler.state.now_s))

    def _decide(self) -> None:
        scheduler = self._scheduler
        scheduler.state.now_s = self._clock.now_s()
        self._rescore()
        starts = scheduler.decide()
        for start, planned in zip(starts, explain_starts(starts, scheduler), strict=True):
            if int(start.job.id) in self._jobs:  # else it was cancelled, and has been displaced in this very moment
                self._place(start, planned)

    def _rescore(self) -> None:
        """Tells a scheduler whose policy has steps which jobs have reached the next."""
        state = self._scheduler.state
        for running in list(state.running.values()):
            if running.service_gpu_s(state.now_s) >= self._next_step[int(running.job.id)]:
                self._scheduler.rescored(running.job)
                self._expect_step(running)

    def _expect_step(self, running: Running) -> None:
        """Takes note of the service at which the score of a running job will rise."""
        policy = self._scheduler.policy
        service = running.service_gpu_s(self._scheduler.state.now_s)
        step = policy.next_step(running.job, service) if isinstance(policy, Steps) else math.inf
        self._next_step[int(running.job.id)] = step

    def _place(self, start: Start, planned: PlannedStart) -> None:
        """Keeps a decision; it is carried out once there is room."""
        row = self._rows[int(start.job.id)]
        running = self._scheduler.state.running.get(start.job.id)
        if running is not None:  # else another of the same moment has displaced it
            running.speed = self._scheduler.state.speed(start.job, start.placement)
            self._expect_step(running)
        row.num_runs += 1
        row.state, row.reason = JobState.RUNNING, ""
        machines = tuple((self._cluster.machines[index].name, slots) for index, slots in start.placement.gpus)
        run = RunRow(row.id, row.num_runs, machines, self._clock.now_s(), explain(planned))
        with self._store.transaction():
            for displaced in start.displaced:
                number = int(displaced.job.id)
                self._drop_unstarted(number, "preempted before it started")
                for other in self._runs_of(number):
                    if other.why is None or not other.why.makes_room:
                        other.why = Why.PREEMPT_CANCEL if other.why is Why.CANCEL else Why.PREEMPT
                        self._store.save_run(other)
                if not self._runs_of(number):
                    self._rows[number].state = JobState.WAITING
                    self._store.save_job(self._rows[number])
            self._store.save_run(run)
            self._store.save_job(row)
        self._runs.append(run)
        for displaced in start.displaced:  # the scheduler has put them in line, those that were cancelled, too
            if any(other.why is Why.PREEMPT_CANCEL for other in self._runs_of(int(displaced.job.id))):
                self._leave(int(displaced.job.id))

    def _try_to_launch(self, run: RunRow) -> None:
        """Starts a run if its slots are free and an earlier run of its job is over."""
        closed = [name for name, _ in run.machines if not self._scheduler.state.is_open(self._machines[name])]
        if closed:
            self._take_back(run, f"not started: {', '.join(closed)} takes no new jobs")
            return
        started = [other for other in self._runs if other.start_s is not None]
        if any(other.job == run.job for other in started):
            return
        slots: list[tuple[int, ...]] = []
        for name, count in run.machines:
            taken = {
                slot
                for other in started
                for (there, _), used in zip(other.machines, other.slots or (), strict=True)
                if there == name
                for slot in used
            }
            free = [slot for slot in range(self._cluster.machines[self._machines[name]].num_gpus) if slot not in taken]
            if len(free) < count:
                return
            slots.append(tuple(free[:count]))
        run.slots, run.start_s = tuple(slots), self._clock.now_s()
        with self._store.transaction():
            self._store.save_run(run)
        self._start_part(run, run.keys()[0], None)

    def _take_back(self, run: RunRow, reason: str) -> None:
        """Undoes the decision on a run that has not started: its job is in line again."""
        row = self._rows[run.job]
        with self._store.transaction():
            self._drop_unstarted(run.job, reason)
            if not self._runs_of(run.job):
                row.state = JobState.WAITING
            row.reason = reason
            self._store.save_job(row)
        running = self._scheduler.state.running[str(run.job)]
        running.start_s = running.mark_s = self._scheduler.state.now_s = self._clock.now_s()  # it has held nothing yet
        self._scheduler.evict(running.job, running.progress_s)
        self._next_step.pop(run.job, None)
        logger.info("job %d, run %d: %s", run.job, run.number, reason)

    def _start_part(self, run: RunRow, key: PartKey, endpoint: str | None) -> None:
        asked = self._rows[run.job].submission
        job_folder = self._job_folder(run.job)
        job_folder.mkdir(parents=True, exist_ok=True)
        self._nodes[run.machines[key.node][0]].start(make_part(asked, run, key, endpoint, job_folder=job_folder))

    # Helpers

    def _find(self, number: int) -> JobRow:
        row = self._rows.get(number) or self._store.job(number)
        if row is None:
            raise LaunchError(f"there is no job {number}")
        return row

    def _job_folder(self, number: int) -> Path:
        return self._folder / "jobs" / str(number)

    def _runs_of(self, number: int) -> list[RunRow]:
        return [run for run in self._runs if run.job == number]

    def _check_machine(self, name: str) -> None:
        if name not in self._machines:
            raise LaunchError(f"the cluster has no machine {name!r}, only {', '.join(self._machines)}")

    def _open_or_close(self, name: str) -> None:
        index = self._machines[name]
        wanted = name not in self._away and name not in self._drained
        if wanted != self._scheduler.state.is_open(index):
            (self._scheduler.open if wanted else self._scheduler.close)(index)

    def _enter(self, row: JobRow) -> None:
        job = self._jobs[row.id] = _job(row)
        self._scheduler.state.now_s = self._clock.now_s()
        self._scheduler.submit(job, service_gpu_s=row.run_s * job.num_gpus, progress_s=row.run_s)

    def _leave(self, number: int) -> None:
        job = self._jobs.pop(number, None)
        if job is not None:
            self._scheduler.withdraw(job)
        self._next_step.pop(number, None)

    def _end_job(self, row: JobRow, state: JobState, reason: str) -> None:
        row.state, row.reason, row.end_s = state, reason, self._clock.now_s()
        self._store.save_job(row)
        self._rows.pop(row.id, None)

    def _drop_unstarted(self, number: int, outcome: str) -> None:
        for run in self._runs_of(number):
            if run.start_s is None:
                run.outcome, run.end_s = outcome, self._clock.now_s()
                self._store.save_run(run)
                self._runs.remove(run)

    def _ask_to_end(self, runs: list[RunRow], why: Why) -> None:
        with self._store.transaction():
            for run in runs:
                run.why = why
                self._store.save_run(run)


def _job(row: JobRow) -> Job:
    asked = row.submission
    assert asked.nproc_per_node is not None
    return Job(
        id=str(row.id),
        submit_s=row.submit_s,
        num_gpus=asked.num_nodes * asked.nproc_per_node,
        tenant=asked.user,
        job_class=asked.job_class,
        estimate_s=asked.estimate_s,
        deadline_s=asked.deadline_s,
        gpus_per_node=asked.nproc_per_node,
        priority=asked.priority,
        max_price_per_gpu_hour=asked.max_price_per_gpu_hour,
    )
