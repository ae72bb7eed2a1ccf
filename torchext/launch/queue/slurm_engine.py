"""Slurm as the machines of a queue: for each run one job of Slurm, held, placed by our policy, released.

A job that waits in the queue waits in Slurm, too, held, where squeue shows it. A thread of its own speaks to Slurm,
again and again, and sees to it that what is there is what should be: it submits what waits, places and releases what
is to start, cancels what nobody knows. A job is released only once its number is on disk: what the sbatch of a killed
daemon leaves behind never runs. Nor does what somebody else releases: where it should run is not known.

What becomes of parts is told by files, in a folder that all nodes share (that of the queue, under ``slurm/``):

====================  ================================================================================================
``JOB/run-N/``        one run:
``batch.sh``          what its job of Slurm runs: `slurm_task` on each node
``held``              the number of that job, which waits for the run to be placed
``run.json``          machines of the parts, their addresses, the grace
``id``                the number again, from the moment on at which it may run
``slurm.log``         what Slurm, and the tasks, have to say
``refused``           why it cannot be started
``part-K.json``       what the K-th node is to start
``end-K``             its part has been told to end
``lost-K``            its part has been given up
``node-K/``           the part itself, see `torchext.launch.folders`
====================  ================================================================================================
"""

from __future__ import annotations

import contextlib
import json
import logging
import shlex
import threading
import time
import uuid
from collections.abc import Iterable
from pathlib import Path

from torchext.launch import folders
from torchext.launch.errors import LaunchError
from torchext.launch.queue import slurm
from torchext.launch.queue.node import SPARE_S
from torchext.launch.queue.types import Part, PartKey, PartReport, PartState, Request
from torchext.scheduling import Cluster, Machine

logger = logging.getLogger(__name__)

# So many jobs of a queue wait in Slurm, too: Slurm bounds all that wait in it, for all (MaxJobCount, 10,000).
NUM_HELD = 500
_HELD_AT_ONCE = 5  # what is to start comes in between
_LOOK_S = 1.0

_BATCH = """\
#!/bin/sh
if ! command -v {python} >/dev/null; then
    echo "torchext: there is no "{python}" on $(hostname)" >refused
    exit 1
fi
exec srun --kill-on-bad-exit=0 --no-kill --wait=0 --cpus-per-task={cpus} --cpu-bind=none \\
    {python} -m torchext.launch.queue.slurm_task {folder}
"""


def discover() -> Cluster:
    """Makes a cluster of Slurm's nodes: of those with GPUs, where there are any, else with a slot for each CPU.

    Raises:
        SlurmError: Slurm cannot be asked.
    """
    found = slurm.machines()
    gpus = [Machine(name, node.gpus, node.gpu_type or "gpu") for name, node in found.items() if node.gpus]
    return Cluster(tuple(gpus or [Machine(name, node.cpus, "cpu") for name, node in found.items()]))


class SlurmEngine:
    """Runs what a queue starts as jobs of Slurm. For the daemon's thread; has one of its own, so that nothing blocks.

    Args:
        folder: For its files; all nodes must see it, under the same path.
        cluster: The machines, named as Slurm names its nodes.

    Raises:
        LaunchError: Slurm cannot be asked, or does not have such machines.
    """

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._ours = f"torchext {_identity(folder)} "
        self._machines = slurm.machines()
        self._has_gpus = any(node.gpus for node in self._machines.values())
        self._check(cluster)
        self.nodes = {machine.name: SlurmNode(machine.name, self) for machine in cluster.machines}
        # These are guarded by the lock:
        self._lock = threading.Lock()
        self._open: set[Path] | None = None  # runs that are not over; None until the dispatcher has said it
        self._upcoming: dict[Path, Request] = {}  # runs that wait, and should wait in Slurm, too
        self._starts: dict[Path, Part] = {}  # to be placed and released
        self._seen: dict[Path, slurm.SlurmJob | None] = {}  # of open runs with a number: what squeue shows
        # The daemon's thread alone:
        self._give_up_at: dict[PartKey, float] = {}  # parts whose job is over, with no word from themselves
        # The engine's thread alone:
        self._kill_at: dict[Path, float] = {}
        self._not_held: set[Path] = set()  # runs that wait, but Slurm does not take them
        self._stopping = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._drive, name="torchext-slurm", daemon=True)
        self._thread.start()

    def _check(self, cluster: Cluster) -> None:
        for machine in cluster.machines:
            node = self._machines.get(machine.name)
            if node is None:
                raise LaunchError(
                    f"Slurm has no node {machine.name!r}, as the cluster file says, only {', '.join(self._machines)}"
                )
            most, what = (node.gpus, "GPUs") if self._has_gpus else (node.cpus, "CPUs")
            if machine.num_gpus > most:
                raise LaunchError(
                    f"node {machine.name!r} has {most} {what} in Slurm; the cluster file says {machine.num_gpus}"
                )

    def close(self) -> None:
        """Ends the thread; jobs go on. Idempotent."""
        self._stopping = True
        self._wake.set()
        self._thread.join()

    def keep(self, open_parts: Iterable[PartKey], upcoming: Iterable[Request]) -> None:
        """Says which parts may run, and which runs wait; jobs of others are ended."""
        runs = {self._run(key) for key in open_parts}
        waiting = {self._run(request.key): request for request in upcoming}
        with self._lock:
            self._open = runs
            if waiting.keys() - self._upcoming.keys():
                self._wake.set()
            self._upcoming = waiting
            for run in self._starts.keys() - runs:
                del self._starts[run]
        for key in [key for key in self._give_up_at if self._run(key) not in runs]:
            del self._give_up_at[key]

    # What is asked of a machine; see `torchext.launch.queue.node.Node`

    def start(self, part: Part) -> None:
        """Starts a part: the first of a run by a job of Slurm, the others by telling the tasks of that job."""
        run = self._run(part.key)
        if part.key.node == 0:
            with self._lock:
                if (run / "id").exists():
                    return
                self._starts.setdefault(run, part)
                if self._open is not None:
                    self._open.add(run)
            self._wake.set()
        elif not (run / f"part-{part.key.node}.json").exists():
            _write_part(run, part)

    def look(self, key: PartKey, machine: str) -> PartReport:
        """Says what has become of a part."""
        run, folder = self._run(key), key.folder(self._folder)
        result = folders.read_json(folder / "result.json")
        if result is not None:
            return PartReport(PartState.ENDED, result["status"], folders.read_endpoint(folder))
        if (folder / "lost").exists() or (run / f"lost-{key.node}").exists():
            return PartReport(PartState.LOST)
        with self._lock:
            starts = run in self._starts
            seen = run in self._seen
            job = self._seen.get(run)
            down = machine in self._machines and self._machines[machine].down
        running = PartReport(PartState.RUNNING, endpoint=folders.read_endpoint(folder))
        if key.node == 0:
            if (run / "refused").exists():
                return PartReport(PartState.ENDED, status=1)
            if starts:
                return running
        if not (run / f"part-{key.node}.json").exists() or not (run / "id").exists():
            return PartReport(PartState.ABSENT)
        if not seen or (job is not None and not job.over and not down):
            self._give_up_at.pop(key, None)
            return running
        if job is not None and job.over and not job.has_run:
            return self._give_up(key)
        # Slurm has lost it, or ended it the hard way. Where the node has but lost its network, the part may live on:
        # its task sees that it should end, or the lease runs out, and the grace begins.
        now = time.monotonic()
        if key not in self._give_up_at:
            (run / f"end-{key.node}").touch()
            self._give_up_at[key] = now + folders.read_json(run / "run.json")["grace_s"] + SPARE_S
        return running if now < self._give_up_at[key] else self._give_up(key)

    def _give_up(self, key: PartKey) -> PartReport:
        with contextlib.suppress(OSError):  # a full disk; we look again
            (self._run(key) / f"lost-{key.node}").touch()
        return PartReport(PartState.LOST)

    def end(self, key: PartKey) -> None:
        """Asks a part to end, within its grace."""
        run = self._run(key)
        with self._lock:
            self._starts.pop(run, None)
        mark = run / f"end-{key.node}"
        if run.exists() and not mark.exists():
            mark.touch()
            self._wake.set()

    def read_log(self, key: PartKey, offset: int, size: int) -> bytes:
        """Reads what a part has printed, or why there is none."""
        run, output = self._run(key), key.folder(self._folder) / "output.log"
        refused = key.node == 0 and not output.exists()
        return folders.read_piece(run / "refused" if refused else output, offset, size)

    def is_away(self, machine: str) -> bool:
        """Whether a machine takes no jobs, as Slurm sees it."""
        with self._lock:
            return machine not in self._machines or not self._machines[machine].usable

    def _run(self, key: PartKey) -> Path:
        return key.folder(self._folder).parent

    # The thread

    def _drive(self) -> None:
        while not self._stopping:
            self._wake.clear()
            try:
                self._look_at_slurm()
                self._release_all()
                if self._hold_some():
                    continue
            except (LaunchError, OSError) as error:
                logger.warning("%s; trying again", error)
            self._wake.wait(_LOOK_S)

    def _look_at_slurm(self) -> None:
        with self._lock:
            if self._open is None:
                return
            open_runs = set(self._open)  # before we ask Slurm: what opens later may not be in its answer
            waiting_runs = set(self._upcoming) - open_runs
        numbers = {run: _number(run / "id") for run in open_runs}
        waiting_runs |= {run for run, number in numbers.items() if number is None}
        held = {run: _number(run / "held") for run in waiting_runs}
        jobs = [job for job in slurm.jobs() if job.comment.startswith(self._ours)]
        machines = slurm.machines()
        by_number = {job.id: job for job in jobs}
        with self._lock:
            self._machines = machines
            self._seen = {run: by_number.get(number) for run, number in numbers.items() if number is not None}
        for over in self._kill_at.keys() - open_runs:
            del self._kill_at[over]
        for run, number in held.items():
            if number is not None and (number not in by_number or by_number[number].over):
                (run / "held").unlink()  # somebody has ended it; the run waits in another
        wanted = {number: run for run, number in numbers.items() if number is not None}
        may_wait = set(held.values())
        for job in jobs:
            if job.over or job.id in may_wait:
                continue
            if job.id in wanted:
                self._follow_up(wanted[job.id], job)
            elif job.state != "COMPLETING":
                logger.info("cancelling job %d of Slurm: its run is over, or has another", job.id)
                slurm.cancel(job.id)

    def _follow_up(self, run: Path, job: slurm.SlurmJob) -> None:
        """Lets a job run that is still held; sees to it that one that has been asked to end does."""
        described = folders.read_json(run / "run.json")
        ends = [(run / f"end-{number}").exists() for number in range(len(described["machines"]))]
        if any(ends) and job.state == "PENDING":
            slurm.cancel(job.id, only_waiting=True)
        elif job.held:
            slurm.release(job.id)
        elif all(ends):
            # Its tasks end their parts, kill them if they have to, and are the last to end; else they are broken.
            now = time.monotonic()
            if now > self._kill_at.setdefault(run, now + described["grace_s"] + 2 * SPARE_S):
                logger.warning("job %d of Slurm has not ended in its grace: cancelling it", job.id)
                slurm.cancel(job.id)

    def _release_all(self) -> None:
        """Lets all jobs run that are to start."""
        with self._lock:
            starts = dict(self._starts)
        for run, part in starts.items():
            try:
                self._release(run, part)
            except (slurm.SlurmError, ValueError) as error:  # ValueError: a name that the system cannot pass on
                if isinstance(error, slurm.SlurmError) and error.passing:
                    raise
                folders.write_whole(run / "refused", f"torchext: cannot start {part.key} by Slurm: {error}\n")
            with self._lock:
                self._starts.pop(run, None)

    def _release(self, run: Path, part: Part) -> None:
        run.mkdir(parents=True, exist_ok=True)
        described = {
            "machines": part.machines,
            "addresses": [self._machines[name].address for name in part.machines],
            "grace_s": part.grace_s,
        }
        folders.write_whole(run / "run.json", json.dumps(described))
        _write_part(run, part)
        number = self._place_held(run, part)
        if number is None:
            number = self._hold(run, Request(part.key, part.python, part.env, len(part.machines), len(part.slots)))
            slurm.place(number, part.machines)
        folders.write_whole(run / "id", str(number))
        slurm.release(number)

    def _place_held(self, run: Path, part: Part) -> int | None:
        """Places the job of Slurm that a run has waited in; None if there is none any more."""
        number = _number(run / "held")
        if number is None:
            return None
        try:
            slurm.place(number, part.machines)
        except slurm.SlurmError as error:
            if error.passing:
                raise
            logger.info("job %d of Slurm is of no use any more (%s): submitting another", number, error)
            return None
        return number

    def _hold_some(self) -> bool:
        """Submits some of what waits; says whether there is more."""
        with self._lock:
            upcoming = dict(self._upcoming)
        self._not_held &= upcoming.keys()
        lacking = [run for run in upcoming if run not in self._not_held and not (run / "held").exists()]
        for run in lacking[:_HELD_AT_ONCE]:
            try:
                self._hold(run, upcoming[run])
            except (slurm.SlurmError, ValueError) as error:
                if isinstance(error, slurm.SlurmError) and error.passing:
                    raise
                self._not_held.add(run)
                logger.warning("job %d waits in the queue alone: %s", upcoming[run].key.job, error)
        return len(lacking) > _HELD_AT_ONCE

    def _hold(self, run: Path, request: Request) -> int:
        """Submits a job of Slurm for a run, held; returns its number."""
        run.mkdir(parents=True, exist_ok=True)
        gpus = request.num_slots if self._has_gpus else 0
        cpus = gpus * self._cpus_per_gpu() if gpus else request.num_slots
        script = run / "batch.sh"
        python, folder = shlex.quote(request.python), shlex.quote(str(run))
        folders.write_whole(script, _BATCH.format(python=python, folder=folder, cpus=cpus))
        number = slurm.submit_held(
            script,
            name=request.env["TORCHEXT_JOB"],
            comment=f"{self._ours}{request.key.job}.{request.key.run}",
            num_nodes=request.num_nodes,
            cpus_per_node=cpus,
            gpus_per_node=gpus,
            env=request.env,
        )
        folders.write_whole(run / "held", str(number))
        return number

    def _cpus_per_gpu(self) -> int:
        """How many CPUs go with a GPU wherever a run may be placed."""
        nodes = [self._machines[name] for name in self.nodes if name in self._machines]
        return min((max(1, node.cpus // max(1, node.gpus)) for node in nodes), default=1)


class SlurmNode:
    """One node of Slurm; see `torchext.launch.queue.node.Node`."""

    def __init__(self, name: str, engine: SlurmEngine) -> None:
        self._name = name
        self._engine = engine
        self.start = engine.start
        self.end = engine.end
        self.read_log = engine.read_log

    @property
    def away(self) -> bool:
        """See `Node`."""
        return self._engine.is_away(self._name)

    def look(self, key: PartKey) -> PartReport:
        """See `Node`."""
        return self._engine.look(key, self._name)


def _write_part(run: Path, part: Part) -> None:
    """Tells a task what to start; what it has as environment is the part's, which may hold secrets."""
    folders.write_whole(run / f"part-{part.key.node}.json", json.dumps({**part.to_dict(), "env": {}}))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return None


def _identity(folder: Path) -> str:
    """Tells the jobs of this queue from those of others."""
    path = folder / "queue.id"
    if not path.exists():
        folders.write_whole(path, uuid.uuid4().hex[:12])
    return path.read_text()
