"""Starts commands as a user would, follows what they print, and leaves nothing of them behind."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from tests import leaks

WORKER = str(Path(__file__).with_name("worker.py"))
TORCHEXT = (sys.executable, "-m", "torchext", "run")
# For `torchext queue` and `torchext node`, in a process without torch: they need none, and its import takes long.
TORCHLESS = (
    sys.executable,
    "-c",
    "import sys, tests.replication.no_torch\nfrom torchext.cli import main\nsys.exit(main(sys.argv[1:]))",
)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")

_MARKER = "TORCHEXT_TEST_PROGRAM"


class Program:
    """A running command; use it in a ``with`` block, which kills it and all it has started.

    Attributes:
        output: What has been read so far of its output and errors.
        pid: Its process.
        environment: What it was given; what others start with the same counts as started by it.
    """

    def __init__(
        self, words: Sequence[str], *, cwd: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        self._mark = uuid.uuid4().hex
        self.output = ""
        path = os.pathsep.join(p for p in sys.path if p)
        common = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        self.environment = {**os.environ, **common, **(environment or {}), _MARKER: self._mark}
        self._popen = subprocess.Popen(
            list(words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=self.environment,
            start_new_session=True,
        )
        self.pid = self._popen.pid

    def __enter__(self) -> Program:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        while left := self.processes() | ({self.pid} if self._popen.poll() is None else set()):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
        assert self._popen.stdout is not None
        self._popen.stdout.close()

    def processes(self) -> set[int]:
        """Live processes that descend from the command, whoever their parent is now."""
        found = leaks.marked_processes(f"{_MARKER}={self._mark}")
        return {pid for pid in found if leaks.state(pid) not in ("", "Z")}

    def wait_for(self, pattern: str, count: int = 1, timeout_s: float = 60.0) -> list[re.Match[str]]:
        """Blocks until the output holds ``count`` matches; returns those there are."""
        deadline = time.monotonic() + timeout_s
        while len(found := list(re.finditer(pattern, self.output, re.MULTILINE))) < count:
            if not self._read(deadline):
                raise AssertionError(f"no {count} x {pattern!r} in\n{self.output}")
        return found

    def wait(self, timeout_s: float = 60.0) -> int:
        """Blocks until the command has ended; returns its status, -N for signal N."""
        deadline = time.monotonic() + timeout_s
        while self._popen.poll() is None:
            if time.monotonic() > deadline:
                raise AssertionError(f"still running after {timeout_s} s:\n{self.output}")
            # The pipe may be held open by others, so its end says nothing.
            self._read(min(deadline, time.monotonic() + 0.05))
        while self._read(time.monotonic()):
            pass
        return self._popen.returncode

    def running(self) -> bool:
        return self._popen.poll() is None

    def signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def _read(self, deadline: float) -> bool:
        assert self._popen.stdout is not None
        ready, _, _ = select.select([self._popen.stdout], [], [], max(0.0, deadline - time.monotonic()))
        data = os.read(self._popen.stdout.fileno(), 65536) if ready else b""
        self.output += data.decode(errors="replace")
        return bool(data)


def children(pid: int) -> list[int]:
    """The processes that a process has started and that are its own still."""
    return [child for child, parent in leaks._parents().items() if parent == pid]


def wait_until_gone(pids: set[int], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while alive := {pid for pid in pids if leaks.state(pid) not in ("", "Z")}:
        assert time.monotonic() < deadline, [leaks.command(pid) for pid in alive]
        time.sleep(0.01)
