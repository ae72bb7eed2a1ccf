"""A real queue for tests: its daemon, and a client."""

from __future__ import annotations

import dataclasses
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.launch.programs import Program
from torchext.launch.queue.client import Client
from torchext.launch.queue.submit import describe


class Queue:
    """Use it in a ``with`` block, which ends the daemon and all jobs.

    Args:
        folder: Where the daemon keeps everything; may hold what an earlier one has left.
        cluster: As ``--cluster`` takes it.
        options: Further words of ``torchext queue start``.
    """

    def __init__(self, folder: Path, cluster: str = "1x2", options: Sequence[str] = ()) -> None:
        self.folder = folder
        self._words = [
            sys.executable,
            "-m",
            "torchext",
            "queue",
            "start",
            "--folder",
            str(folder),
            "--cluster",
            cluster,
        ]
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
        program = Program(self._words)
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

    def wait_until(self, condition: Callable[[], object], timeout_s: float = 90.0) -> None:
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
