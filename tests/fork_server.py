"""A process that has loaded torch once and forks the ranks: a new interpreter takes seconds until it has.

A rank is as a new interpreter would be, but for what is loaded: it has a session, an environment and a current folder
of its own and ends as any program ends. The server has one thread and computes nothing: a process that is forked while
it has threads, or after OpenMP was used, is one that hangs.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests import leaks

# What most ranks import sooner or later; the second is what the first step of any optimizer imports.
_PRELOADED = ("torch.distributed", "torch._dynamo")
_ANSWER_S = 100.0  # the first comes once torch is loaded

MARKER = "TORCHEXT_TEST_RANKS"  # in the environment of each rank, and so of each program that it starts
# Loopback only, and one thread for each rank: they share few cores.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"}

# The path first, so that the modules of the tests are found; no module of this folder may stand in for another.
_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from tests.fork_server import serve
from tests.ranks import main_of_rank
rank = serve(int(sys.argv[1]))
if rank is not None:
    main_of_rank(*rank)
"""


# --- In the test process -------------------------------------------------------------------------------------------


class Child:
    """A process that the server has forked, with as much of `subprocess.Popen` as ranks need."""

    def __init__(self, server: ForkServer, pid: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
        self._status = status  # a pipe that tells how it ended, once it has

    def poll(self) -> int | None:
        """Its exit status, or minus the signal that ended it; None while it runs."""
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self._read()
        return self.returncode

    def wait(self, timeout_s: float | None = None) -> int | None:
        """As `poll`, but gives it so much time to end; None: without limit."""
        if self.returncode is None and select.select([self._status], [], [], timeout_s)[0]:
            self._read()
        return self.returncode

    def send_signal(self, number: signal.Signals, *, group: bool = False) -> None:
        """Returns once it has been sent, to its group if so wanted. Does nothing to one that has ended."""
        self._server.ask({"kill": self.pid, "signal": number, "group": group})

    def _read(self) -> None:
        data = os.read(self._status, 16)
        os.close(self._status)
        assert data, "the process that forks the ranks has died"
        self.returncode = int(data)


class ForkServer:
    """A server as its users see it; `fork_servers` gives those of this process. Call `wait` before the first start."""

    def __init__(self) -> None:
        # A fork keeps this to the eyes of others, whatever its own environment is.
        self._mark = uuid.uuid4().hex
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), json.dumps(sys.path)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **ENVIRONMENT, MARKER: self._mark},
                start_new_session=True,  # a Ctrl-C is for us
            )
        self.pid = self._process.pid
        self._socket = ours
        self._socket.settimeout(_ANSWER_S)
        self._asking = threading.Lock()

    def wait(self) -> None:
        """Blocks until it has loaded all."""
        self._answer()

    def start(self, folder: Path, rank: int, environment: Mapping[str, str], pipes: tuple[int, int, int]) -> Child:
        """Starts `main_of_rank`; ``pipes`` are its standard input, its output and errors, and where it announces."""
        start = {"environment": dict(environment), "sys_path": sys.path, "cwd": os.getcwd()}
        (folder / f"{rank}.start").write_text(json.dumps(start))
        status, status_in_server = os.pipe()
        try:
            answer = self.ask({"folder": str(folder), "rank": rank}, *pipes, status_in_server)
        finally:
            os.close(status_in_server)
        return Child(self, answer["pid"], status)

    def forks_in_sessions_of(self, pids: set[int]) -> set[int]:
        """Live processes that are forks of forks of it and so on, and belong to a rank's session."""
        forks = leaks.marked_processes(f"{MARKER}={self._mark}")
        return {pid for pid in forks if leaks.session(pid) in pids}

    def ask(self, request: dict[str, Any], *descriptors: int) -> dict[str, Any]:
        with self._asking:
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
            return self._answer()

    def _answer(self) -> dict[str, Any]:
        data = self._socket.recv(4096)
        assert data, "the process that forks the ranks has died; it has said why among the errors of this one"
        answer: dict[str, Any] = json.loads(data)
        return answer

    def close(self) -> None:
        """Ends it; its children are not waited for."""
        self._socket.close()
        self._process.wait()
        leaks.lasting_processes.discard(self.pid)


@functools.cache
def fork_servers() -> tuple[ForkServer, ...]:
    """The servers, started at the first use; they end with this process.

    There are two, for ranks of even and of odd number, so that not all ranks have the same order of sets: as in new
    interpreters, what depends on it differs between them.
    """
    servers = ForkServer(), ForkServer()
    for server in servers:
        leaks.lasting_processes.add(server.pid)
        atexit.register(server.close)
    for server in servers:
        server.wait()
    return servers


# --- In the server -------------------------------------------------------------------------------------------------


class StartedRank(NamedTuple):
    """What `main_of_rank` takes."""

    folder: Path
    rank: int
    events: int


def serve(requests_descriptor: int) -> StartedRank | None:
    """Forks until the test process ends. Returns once in each child, with what it is to be; and None at the end."""
    for name in _PRELOADED:
        __import__(name)
    num_threads = len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 1
    assert num_threads == 1, f"{num_threads} threads: a child could inherit locks that nobody opens"
    gc.collect()
    gc.freeze()  # what is there now needs neither look nor copy in the children
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writing)
    statuses: dict[int, int] = {}  # of each child that runs, where to tell how it ended
    with socket.socket(fileno=requests_descriptor) as requests:
        requests.sendall(b"{}")
        while True:
            ready, _, _ = select.select([reading, requests], [], [])
            if reading in ready:
                os.read(reading, 4096)
                _reap(statuses)
            if requests not in ready:
                continue
            data, descriptors, _, _ = socket.recv_fds(requests, 4096, 4)
            if not data:
                return None
            request = json.loads(data)
            answer = {}
            if "kill" in request:
                _kill(statuses, **request)
            else:
                *pipes, status = descriptors
                its_own, in_child = os.pipe()
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    os.setsid()  # so that the rank and what it starts can be killed as one group
                    for descriptor in (*statuses.values(), status, reading, writing, its_own, in_child):
                        os.close(descriptor)
                    break
                os.close(in_child)
                os.read(its_own, 1)  # returns once it has its group
                for descriptor in (its_own, *pipes):
                    os.close(descriptor)
                statuses[pid] = status
                answer = {"pid": pid}
            with contextlib.suppress(BrokenPipeError):
                requests.sendall(json.dumps(answer).encode())
    return _become(Path(request["folder"]), request["rank"], *pipes)


def _reap(statuses: dict[int, int]) -> None:
    while statuses:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with open(statuses.pop(pid), "w") as pipe:
            pipe.write(str(os.waitstatus_to_exitcode(status)))


def _kill(statuses: dict[int, int], kill: int, signal: int, group: bool) -> None:
    if kill in statuses:  # else its number may be another's by now
        (os.killpg if group else os.kill)(kill, signal)


def _become(folder: Path, rank: int, commands: int, output: int, events: int) -> StartedRank:
    """Makes a fork what a new interpreter would be."""
    for descriptor, number in ((commands, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, number)
    os.close(commands)
    os.close(output)
    start = json.loads((folder / f"{rank}.start").read_text())
    os.chdir(start["cwd"])
    sys.path[:] = start["sys_path"]
    os.environ.clear()
    os.environ.update(start["environment"])
    return StartedRank(folder, rank, events)
