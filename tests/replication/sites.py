"""Real site processes for tests: started, told what to do over a pipe, killed, started again.

The links between them go through `Proxy` where a test wants to cut them.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
KEY = "the key of the tests"
DEADLINE_S = 60.0
_PROGRAM = "import tests.replication.no_torch\nfrom tests.replication.sites import serve\nserve()"


def content(origin: str, seq: int, size: int) -> bytes:
    """What a site's message holds: anybody can tell whether it is whole and in its place."""
    return random.Random(f"{origin} {seq}").randbytes(size)


def reserve_port() -> socket.socket:
    """A port that nobody else is given while this socket is open, and on which a site can listen."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    return sock


class Cluster:
    """Sites, one process each.

    Args:
        folder: For their stores.
        names: The sites.
        proxied: Whether each site reaches each other one through a `Proxy` of its own.
        settings: More of the configuration.
    """

    def __init__(
        self, folder: Path, names: Sequence[str], *, proxied: bool = False, settings: dict[str, Any] | None = None
    ) -> None:
        self.names = list(names)
        self.folder = folder
        self._ports = {name: reserve_port() for name in names}
        self.processes: dict[str, Site] = {}
        self.proxies: dict[tuple[str, str], Proxy] = {}
        self._settings = {"dead_after_s": 2.0, "segment_bytes": 2 << 20, **(settings or {})}
        if proxied:
            for one in names:
                for other in names:
                    if one != other:
                        self.proxies[one, other] = Proxy(self._ports[other].getsockname())

    def config(self, me: str) -> dict[str, Any]:
        """As site ``me`` sees it: the proxies of its own connections."""
        sites = {}
        for name in self.names:
            own = f"127.0.0.1:{self._ports[name].getsockname()[1]}"
            proxy = self.proxies.get((me, name))
            address = own if proxy is None else f"127.0.0.1:{proxy.port}"
            sites[name] = {"address": address, "listen": own, "store": str(self.folder / name)}
        return {"key": KEY, "sites": sites, **self._settings}

    def start(self, name: str, **settings: Any) -> Site:
        site = self.processes[name] = Site(name, {**self.config(name), **settings})
        return site

    def start_all(self) -> list[Site]:
        return [self.start(name) for name in self.names]

    def __getitem__(self, name: str) -> Site:
        return self.processes[name]

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for site in self.processes.values():
            site.end()
        for proxy in self.proxies.values():
            proxy.close()
        for sock in self._ports.values():
            sock.close()


class Site:
    """One site's process, where ``at`` puts it; calls are answered in order."""

    def __init__(self, name: str, config: dict[str, Any], at: Sequence[str] = ()) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [*at, sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        self._unread = b""
        self.post("start", config, name)

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, method: str, *args: Any, timeout_s: float = DEADLINE_S) -> Any:
        """Calls a function of `_Commands` there; what it raises is raised here, as text."""
        self.post(method, *args)
        return self.answer(timeout_s)

    def post(self, method: str, *args: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([method, *args]).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self, timeout_s: float = DEADLINE_S) -> Any:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"site {self.name} did not answer within {timeout_s:g} s")
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise ConnectionResetError(f"site {self.name} ended")
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and waits for the end."""
        self._process.kill()
        self._process.wait()
        self._close_pipes()

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
        self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class Proxy:
    """Carries connections to an address, until it is told not to.

    `cut` breaks what is there and refuses what comes; with `swallows` it takes bytes and delivers none, as a link
    that is half open; `heal` ends both.
    """

    def __init__(self, to: tuple[str, int]) -> None:
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._socks: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._cut = self.swallows = self._closed = False
        self.carried_bytes = 0
        self.cut_after_bytes: int | None = None
        self._start(self._accept)

    def cut(self) -> None:
        self._cut = True
        self.hang_up()

    def heal(self) -> None:
        self._cut = False
        if self.swallows:
            self.swallows = False
            self.hang_up()

    def close(self) -> None:
        self._closed = True
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hang_up()
        for thread in list(self._threads):
            thread.join()

    def _start(self, target: Any, *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def hang_up(self) -> None:
        """Breaks what is there; new connections are carried."""
        with self._lock:
            for sock in self._socks:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._closed:
            try:
                one, _ = self._listener.accept()
            except OSError:
                return
            try:
                if self._cut:
                    raise ConnectionRefusedError
                other = socket.create_connection(self._to, timeout=5)
            except OSError:
                one.close()
                continue
            other.settimeout(None)
            with self._lock:
                self._socks |= {one, other}
            ends = threading.Semaphore(0)
            self._start(self._carry, one, other, ends)
            self._start(self._carry, other, one, ends)

    def _carry(self, source: socket.socket, target: socket.socket, ends: threading.Semaphore) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if self.swallows:
                    continue
                target.sendall(data)
                self.carried_bytes += len(data)
                if self.cut_after_bytes is not None and self.carried_bytes > self.cut_after_bytes:
                    self.cut_after_bytes = None
                    break
        with self._lock:
            for sock in (source, target):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            if not ends.acquire(blocking=False):
                ends.release()  # the other direction closes them
                return
            self._socks -= {source, target}
        source.close()
        target.close()


# In the site's process.


class _Commands:
    def __init__(self) -> None:
        self.node: Any = None
        self.moves: list[list[Any]] = []

    def start(self, config: dict[str, Any], me: str) -> int:
        from torchext.replication import Node

        self.node = Node(config, me=me)
        return os.getpid()

    def send(self, count: int, size: int, timeout: float | None = None) -> int:
        seq = 0
        me = self.node.me
        for _ in range(count):
            tail = self.node._core.logs[me].tail
            due = tail.seq + 1 + (tail.offset > 0)  # a message that a former life was killed in keeps its number
            seq = self.node.send(content(me, due, size), timeout=timeout)
            if seq != due:
                raise AssertionError(f"message {due} got the number {seq}")
        return seq

    def latencies(self, count: int, size: int, name: str) -> list[float]:
        """Milliseconds from `send` to stable, one message after the other."""
        times = []
        for _ in range(count):
            begin = time.perf_counter()
            self.node.waitfor(self.node.send(bytes(size)), name, DEADLINE_S)
            times.append(1e3 * (time.perf_counter() - begin))
        return times

    def throughput(self, count: int, size: int, name: str) -> float:
        """Bytes per second, until the last of so many messages is stable."""
        data = random.Random(0).randbytes(size)
        begin = time.perf_counter()
        for _ in range(count):
            seq = self.node.send(data)
        self.node.waitfor(seq, name, 300)
        return count * size / (time.perf_counter() - begin)

    def send_file(self, path: str) -> int:
        seq: int = self.node.send(Path(path))
        return seq

    def register(self, name: str, text: str) -> None:
        self.node.register_predicate(name, text)

    def change(self, name: str, text: str) -> None:
        self.node.change_predicate(name, text)

    def waitfor(self, seq: int, name: str, timeout: float, origin: str | None = None) -> int:
        reached: int = self.node.waitfor(seq, name, timeout, origin=origin)
        return reached

    def frontier(self, name: str, origin: str | None = None) -> int:
        reached: int = self.node.get_stability_frontier(name, origin=origin)
        return reached

    def monitor(self, name: str) -> None:
        self.node.monitor_stability_frontier(name, lambda frontier: self.moves.append([name, frontier]))

    def moved(self) -> list[list[Any]]:
        return self.moves

    def held(self, origin: str, may_lack: Sequence[int] = ()) -> int:
        """Reads all messages of a site, checks each against what it must be, and returns the last one's number.

        ``may_lack``: numbers that `send` never returned, for their sender was killed in the middle.
        """
        first = self.node.first(origin)
        expected = first
        for message in self.node.receive(origin, after=first - 1, timeout=0):
            data = message.payload
            while expected < message.seq and expected in may_lack:
                expected += 1
            if message.seq != expected:
                raise AssertionError(f"message {message.seq} where {expected} is due")
            if data != content(origin, message.seq, len(data)):
                raise AssertionError(f"message {message.seq} of {origin} is torn")
            expected += 1
        return int(expected - 1)

    def save(self, origin: str, seq: int, path: str) -> None:
        """Writes a message of a site to a file."""
        next(self.node.receive(origin, after=seq - 1, timeout=0)).save(path)

    def held_since(self, origin: str, after: int) -> int:
        """Reads what follows a message, and returns the last one's number."""
        return max((message.seq for message in self.node.receive(origin, after=after, timeout=0)), default=0)

    def last(self, origin: str) -> int:
        last: int = self.node.last(origin)
        return last

    def first(self, origin: str) -> int:
        first: int = self.node.first(origin)
        return first

    def truncate(self, seq: int) -> None:
        self.node.truncate(seq)

    def ack(self, origin: str, seq: int, ack: str) -> None:
        self.node.ack(origin, seq, ack)

    def add_site(self, name: str, address: str) -> None:
        self.node.add_site(name, address=address)

    def remove_site(self, name: str) -> None:
        self.node.remove_site(name)

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.node.status()
        return status

    def limit_file_size(self, size: int) -> None:
        """From now on no file of more than this can be made: as on a full disk. 0: no limit."""
        import resource

        infinite = resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (size or infinite, infinite))

    def close(self) -> None:
        self.node.close()


def serve() -> None:
    """The loop of a site's process: a call a line, until the pipe ends."""
    commands = _Commands()
    for line in sys.stdin:
        method, *args = json.loads(line)
        try:
            answer = {"value": getattr(commands, method)(*args)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    if commands.node is not None:
        commands.node.close()
