"""A queue of short jobs on three machines while all sorts of things go wrong, at random.

    python -m tests.launch.drill --faults 100 --seed 0

Daemon, agents of machines, keepers, agents of jobs and workers are killed, the clock of all of them jumps by days, and
for root, who may mount a file system of its own for it, the disk is full for a while.

Each job writes a line when it begins, holds a lock while it runs, and writes another when it ends. At the end every job
must have ended exactly once, none may have met its own lock, and no process may be left.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.launch.programs import TORCHLESS, Program, children
from tests.launch.queues import Queue
from torchext.launch.folders import read_json

_JOB = str(Path(__file__).with_name("drill_job.py"))
_MACHINES = ("node0", "node1", "node2")
_RECOVERY_S = 90.0
_SHIFTED = str(Path(__file__).with_name("shifted_clock"))


class Drill:
    """One drill; raises AssertionError where a promise is broken.

    Args:
        folder: For everything.
        seed: Of the choices.
        small_disk: Whether the folder is on a file system that may be filled.
    """

    def __init__(self, folder: Path, seed: int, *, small_disk: bool = False) -> None:
        self._folder = folder
        self._random = random.Random(seed)
        self._clock = folder / "clock"
        path = os.pathsep.join([_SHIFTED, *(p for p in sys.path if p)])
        self._environment = {"PYTHONPATH": path, "TORCHEXT_TEST_CLOCK": str(self._clock)}
        self._queue = Queue(folder / "q", "3x1", ("--engine", "nodes", "--lease", "20"), self._environment)
        self._agents: dict[str, Program] = {}
        self._stack = contextlib.ExitStack()
        self._jobs: list[int] = []
        kinds = ("daemon", "agent of a machine", "keeper", "agent of a job", "worker", "clock")
        self.counts = dict.fromkeys((*kinds, "full disk") if small_disk else kinds, 0)

    def run(self, num_faults: int, num_jobs: int) -> None:
        """Submits jobs, injects faults while they run, and waits for the end of all."""
        with self._stack:
            self._stack.enter_context(self._queue)
            for name in _MACHINES:
                self._join(name)
            for number in range(num_jobs):
                words = ("--retries", "1000", "--grace", "5", _JOB, str(self._folder), str(number))
                self._jobs.append(self._queue.submit(*words))
            deadline = time.monotonic() + num_faults * 20 + _RECOVERY_S
            while sum(self.counts.values()) < num_faults:
                assert time.monotonic() < deadline, f"only {self.counts} so far"
                self._inject(self._random.choice(list(self.counts)))
                self._requeue_those_given_up()
                if all(self._queue.job(job)["end_s"] is not None for job in self._jobs):
                    break
                time.sleep(self._random.uniform(0.0, 1.5))
            self._queue.wait_until(self._all_done, _RECOVERY_S + 10 * num_jobs)
            self._check(num_jobs)
            others = {self._queue.daemon.pid, *(agent.pid for agent in self._agents.values())}
            self._queue.wait_until(lambda: self._processes() <= others, 30)

    def _join(self, name: str) -> None:
        words = [*TORCHLESS, "node", "join", str(self._queue.folder), "--name", name]
        program = Program([*words, "--folder", str(self._folder / name)], environment=self._environment)
        self._agents[name] = self._stack.enter_context(program)

    def _inject(self, what: str) -> None:
        if what == "daemon":
            self._queue.kill()
            self._queue.start()
        elif what == "agent of a machine":
            name = self._random.choice(_MACHINES)
            self._agents[name].signal(signal.SIGKILL)
            self._agents[name].wait()
            assert self._agents[name].processes() == set()  # jobs carry the mark of the queue
            self._join(name)
        elif what == "clock":
            self._clock.write_text(str(self._random.uniform(-1e6, 1e6)))
        elif what == "full disk":
            self._fill_disk(self._random.uniform(0.1, 3.0))
        else:
            found: list[int] = []

            def look() -> bool:
                found[:] = self._targets(what)
                return bool(found) or self._all_done()

            self._queue.wait_until(look)
            if not found:
                return
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._random.choice(found), signal.SIGKILL)
        self.counts[what] += 1

    def _fill_disk(self, seconds: float) -> None:
        filler = self._folder / "filler"
        end = time.monotonic() + seconds
        with open(filler, "wb", buffering=0) as file:
            while time.monotonic() < end:  # what others give back is taken, too
                try:
                    file.write(b"x" * 4096)
                except OSError:
                    time.sleep(0.005)
        filler.unlink()

    def _targets(self, what: str) -> list[int]:
        """Processes of running jobs: their keepers, the agents below, or the workers below those."""
        running = [path for name in _MACHINES for path in (self._folder / name).glob("*/run-*/node-*/pid.json")]
        found: list[int] = [read_json(path)["pid"] for path in running if not (path.parent / "result.json").exists()]
        for _ in range(("keeper", "agent of a job", "worker").index(what)):
            found = [child for pid in found for child in children(pid)]
        return found

    def _requeue_those_given_up(self) -> None:
        """A job that is killed from outside four times is given up; here that is nobody's fault."""
        for job in self._jobs:
            if self._queue.job(job)["state"] == "failed":
                self._queue.client.call("requeue", job=job)

    def _all_done(self) -> bool:
        self._requeue_those_given_up()
        return all(self._queue.job(job)["state"] == "done" for job in self._jobs)

    def _check(self, num_jobs: int) -> None:
        lines = (self._folder / "ledger").read_text().splitlines()
        assert not [line for line in lines if line.startswith("double")], lines
        ends = [line for line in lines if line.startswith("end")]
        # A job that is killed between its last line and its end runs again; so it may have several, but never none.
        assert {int(line.split()[1]) for line in ends} == set(range(num_jobs)), lines
        for job in self._jobs:
            outcomes = [run["outcome"] for run in self._queue.job(job)["runs"]]
            assert outcomes.count("done") == 1, outcomes
            assert outcomes[-1] == "done", outcomes

    def _processes(self) -> set[int]:
        found = set(self._queue.processes())
        for agent in self._agents.values():
            found |= agent.processes()
        return found


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mounts a file system that is easily filled; needs root."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def main() -> None:
    """Runs one drill and says what it did."""
    parser = argparse.ArgumentParser(description="Kill parts of a queue at random.")
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=0, help="default: enough to be busy for so many faults")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    begin = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torchext-drill-")))
        if os.geteuid() == 0:
            stack.enter_context(small_disk(folder))
        drill = Drill(folder, args.seed, small_disk=os.geteuid() == 0)
        drill.run(args.faults, args.jobs or 3 + args.faults // 2)
        print(f"seed {args.seed}: all jobs done after {drill.counts}, in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
