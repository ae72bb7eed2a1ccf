"""A real queue for tests: its daemon, and a client."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.launch.programs import TORCHLESS, Program
from tests.launch.slurm import Slurm
from torchext.launch.folders import read_json
from torchext.launch.queue.client import Client
from torchext.launch.queue.submit import describe
from torchext.launch.queue.types import PartKey


class Queue:
    """Use it in a ``with`` block, which ends the daemon and all jobs.

    Args:
        folder: Where the daemon keeps everything; may hold what an earlier one has left.
        cluster: As ``--cluster`` takes it; empty: none is said.
        options: Further words of ``torchext queue start``.
        environment: Further variables of the daemon.
        prefix: A command that runs the daemon.
    """

    def __init__(
        self,
        folder: Path,
        cluster: str = "1x2",
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self._environment = environment
        self._words = [
            *prefix,
            *TORCHLESS,
            "queue",
            "start",
            "--folder",
            str(folder),
        ]
        self._words += ["--cluster", cluster] if cluster else []
        self._words += options
        self._programs: list[Program] = []
        self._clients: list[Client] = []

    def __enter__(self) -> Queue:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for client in self._clients:
            client.close()
        for program in reversed(self._programs):
            program.__exit__(kind, error, tb)

    @property
    def daemon(self) -> Program:
        return self._programs[-1]

    @property
    def client(self) -> Client:
        return self._clients[-1]

    def processes(self) -> set[int]:
        """Live processes of all daemons that there were, and of all jobs."""
        return {pid for program in self._programs for pid in program.processes()}

    def start(self) -> None:
        program = Program(self._words, environment=self._environment)
        try:
            program.wait_for("queue ready at .*\n")
        except BaseException as error:
            program.__exit__(type(error), error, None)
            raise
        self._programs.append(program)
        self._clients.append(Client(str(self.folder)))

    def kill(self) -> None:
        self.daemon.signal(signal.SIGKILL)
        self.daemon.wait()

    def submit(self, *words: str) -> int:
        """As ``torchext run --queue URL`` with these words does."""
        made = describe(words)
        # So that it ends with this queue's block, whatever happens.
        return self.client.submit(dataclasses.replace(made, env=self._programs[0].environment))

    def job(self, number: int) -> dict[str, Any]:
        described: dict[str, Any] = self.client.call("job", job=number)
        return described

    def log(self, number: int, run: int = 1, node: int = 0) -> str:
        return b"".join(self.client.log(number, run=run, node=node)).decode()

    def wait_until(self, condition: Callable[[], object], timeout_s: float = 150.0) -> None:
        """Asks again and again until the condition holds."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                jobs = [self.job(job["id"]) for job in self.client.call("jobs")["jobs"]]
                logs = [self.log(job["id"]) for job in jobs if job["num_runs"]]
                raise AssertionError(f"not in {timeout_s} s; jobs {jobs}\nlogs {logs}\ndaemon {self.daemon.output}")
            time.sleep(0.05)

    def wait_for_state(self, number: int, *states: str) -> None:
        self.wait_until(lambda: self.job(number)["state"] in states)

    def wait_for_log(self, number: int, text: str, run: int = 1) -> None:
        self.wait_until(lambda: self.job(number)["num_runs"] >= run and text in self.log(number, run))


class Engine:
    """What runs the jobs of queues: this machine, or a Slurm of its own.

    Args:
        slurm: That Slurm, if so.
    """

    def __init__(self, slurm: Slurm | None) -> None:
        self.slurm = slurm

    def queue(self, folder: Path, cluster: str = "1x2", *options: str) -> Queue:
        """Makes a queue; start it with ``with``."""
        if self.slurm is None:
            return Queue(folder, cluster, options)
        return Queue(folder, cluster, ("--engine", "slurm", *options), self.slurm.environment)

    def part(self, queue: Queue, job: int, run: int = 1, node: int = 0) -> Path:
        """The folder of a part of a run."""
        machine = queue.job(job)["runs"][run - 1]["machines"][node][0]
        root = queue.folder / "slurm" if self.slurm else queue.folder / "machines" / machine
        return PartKey(job, run, node).folder(root)

    def keeper(self, queue: Queue, job: int, run: int = 1, node: int = 0) -> int:
        """The process that runs a part: the keeper of `torchext run`."""
        pid: int = read_json(self.part(queue, job, run, node) / "pid.json")["pid"]
        return pid
