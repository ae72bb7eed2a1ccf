"""The standby process: holds the images of several jobs and serves their training processes."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchext.standby import wire
from torchext.standby.book import Book
from torchext.standby.changes import Changes
from torchext.standby.errors import FencedError, NoStateError, StandbyError, StateMismatchError
from torchext.standby.images import Budget, Images
from torchext.standby.source import LocalSource, SharedMemory, TcpSource

logger = logging.getLogger(__name__)

_GREETING_TIMEOUT_S = 10.0
_MAX_STRANGERS = 32
_PAUSE_S = 0.2
_REQUEST_TIMEOUT_S = 30.0
# A reader that is slower than a chunk in this time is given up, and any reader once training has waited so long for it:
# together less than the 30 s after which the training process gives up its standby.
_READER_TIMEOUT_S = 10.0
_CHUNK_BYTES = 1 << 20


def boot_id() -> str:
    """Tells this host, as booted, from all others."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass
class Rank:
    """What the standby has of one rank of a job.

    Attributes:
        images: Its two images.
        busy: Held while an image is written or read out; by the training process through `hold`.
        wanted_since: When the training process began to wait for a reader, of `time.monotonic`.
        session: The connection of the process that owns the rank, while there is one.
        stats: For `status`.
    """

    images: Images
    busy: threading.Lock = field(default_factory=threading.Lock)
    wanted_since: float | None = None
    session: Session | None = None
    stats: dict[str, Any] = field(default_factory=lambda: {"commits": 0, "bytes": 0, "published": None, "at": None})

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Holds `busy` for the training process: a reader that has it ends soon."""
        self.wanted_since = time.monotonic()
        with self.busy:
            self.wanted_since = None
            yield


class Job:
    """One training job. All fields are guarded by the daemon's condition, but for the images (see `Rank.busy`)."""

    def __init__(self, name: str, world_size: int, budget: Budget) -> None:
        self.name = name
        self.world_size = world_size
        self.book = Book(world_size)
        self.ranks = [Rank(Images(budget)) for _ in range(world_size)]
        self.finished: set[int] = set()  # ranks whose training is over

    def close(self) -> None:
        """Frees the memory."""
        for rank in self.ranks:
            rank.images.close()


class Daemon:
    """Serves connections until `stop`; use it in a ``with`` block.

    Args:
        listen: Address, as `wire.parse_address` takes it; port 0 takes a free one (see `address`).
        max_jobs: How many jobs it holds at most.
        memory_bytes: What their images may take together; None: no limit.
        linger_s: Ends by itself once all trainings are over, or nobody has been connected for so long; None: never.
    """

    def __init__(
        self, listen: str, *, max_jobs: int = 16, memory_bytes: int | None = None, linger_s: float | None = None
    ) -> None:
        self.jobs: dict[str, Job] = {}  # guarded by changed
        self.changed = threading.Condition()
        self.budget = Budget(memory_bytes)
        self.max_jobs = max_jobs
        self._linger_s = linger_s
        self._last_used = time.monotonic()
        self._sessions: set[Session] = set()  # guarded by changed
        self._stopping = threading.Event()
        self.strangers = threading.BoundedSemaphore(_MAX_STRANGERS)  # one for each connection until it is greeted
        family, target = wire.parse_address(listen)
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            if family != socket.AF_UNIX:
                self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind(target)
            self._listener.listen(64)
        except BaseException:
            self._listener.close()
            raise
        self._family = family
        self._listen = listen

    @property
    def address(self) -> str:
        """What clients connect to."""
        if self._family == socket.AF_UNIX:
            return wire.LOCAL
        host, port = self._listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def serve(self) -> None:
        """Accepts connections, each in a thread of its own, until `stop` is called or `linger_s` has passed."""
        self._listener.settimeout(_PAUSE_S)
        while not self._stopping.is_set() and not self._is_idle():
            if self.strangers.acquire(timeout=_PAUSE_S) and not self._accept():
                self.strangers.release()
        self.stop()

    def _accept(self) -> bool:
        """Starts the session of the next connection; false if none comes within a moment."""
        try:
            sock, _ = self._listener.accept()
        except TimeoutError:
            return False
        except OSError as error:
            if not self._stopping.is_set():  # else closed by stop
                logger.warning("cannot accept a connection: %s", error)
                self._stopping.wait(_PAUSE_S)
            return False
        session = Session(self, sock)
        with self.changed:
            self._sessions.add(session)
        try:
            session.start()
        except RuntimeError as error:  # no more threads
            logger.warning("cannot serve a connection: %s", error)
            sock.close()
            self.forget(session)
            self._stopping.wait(_PAUSE_S)
            return False
        return True

    def stop(self) -> None:
        """Closes all connections, waits for their threads and frees all memory. Idempotent."""
        self._stopping.set()
        self._listener.close()
        with self.changed:
            sessions = list(self._sessions)
            self.changed.notify_all()
        for session in sessions:
            session.close()
        for session in sessions:
            session.join()
        with self.changed:
            for job in self.jobs.values():
                job.close()
            self.jobs.clear()

    @property
    def is_stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping.is_set()

    def forget(self, session: Session) -> None:
        """A session has ended."""
        with self.changed:
            self._sessions.discard(session)
            if session.hello:  # a stranger keeps nothing alive
                self._last_used = time.monotonic()
            self.changed.notify_all()

    def _is_idle(self) -> bool:
        with self.changed:
            if self._linger_s is None or any(session.hello for session in self._sessions):
                return False
            if self.jobs and all(len(job.finished) == job.world_size for job in self.jobs.values()):
                return True
            return time.monotonic() - self._last_used > self._linger_s

    def job(self, name: str, world_size: int | None = None) -> Job:
        """Finds a job; makes it, where a world size is given. Call it with `changed` held."""
        job = self.jobs.get(name)
        if job is None:
            if world_size is None:
                raise NoStateError(f"the standby has no job {name!r}, only {sorted(self.jobs) or 'none at all'}")
            if len(self.jobs) >= self.max_jobs:
                raise StandbyError(
                    f"the standby holds {len(self.jobs)} jobs already, its limit: {sorted(self.jobs)}; "
                    "remove one (torchext standby remove) or allow more (--jobs)"
                )
            job = self.jobs[name] = Job(name, world_size, self.budget)
        elif world_size is not None and job.world_size != world_size:
            if job.book.latest() is not None:
                raise StateMismatchError(
                    f"job {name!r} at the standby has a world size of {job.world_size}, this program one of "
                    f"{world_size}; go on with {job.world_size} ranks, or use another job name"
                )
            self._remove(job)
            return self.job(name, world_size)
        return job

    def remove(self, name: str) -> None:
        """Forgets a job; its training process, if there is one, loses its standby."""
        with self.changed:
            job = self.job(name)
            sessions = [rank.session for rank in job.ranks if rank.session is not None]
        for session in sessions:
            session.close()
            session.join()
        with self.changed:
            self._remove(job)

    def _remove(self, job: Job) -> None:
        del self.jobs[job.name]
        for rank in job.ranks:
            if rank.session is not None:
                rank.session.close()
        job.close()

    def status(self) -> dict[str, Any]:
        """What it holds: see `torchext standby status --json`."""
        with self.changed:
            jobs = {}
            for name, job in self.jobs.items():
                latest = job.book.latest()
                ranks = []
                for number, rank in enumerate(job.ranks):
                    newest = job.book.newest(number)
                    published = rank.stats["published"]
                    ranks.append(
                        {
                            "rank": number,
                            "step": None if newest is None else newest.step,
                            "published": published,
                            "lag": None if published is None or latest is None else published - latest,
                            "connected": rank.session is not None,
                            "peer": None if rank.session is None else rank.session.peer,
                            "transport": None if rank.session is None else rank.session.transport,
                            "term": job.book.term,
                            "size_bytes": rank.images.size_bytes(),
                            "commits": rank.stats["commits"],
                            "bytes": rank.stats["bytes"],
                            "last_commit_unix_s": rank.stats["at"],
                        }
                    )
                jobs[name] = {"world_size": job.world_size, "step": latest, "steps": job.book.steps(), "ranks": ranks}
            return {
                "address": self.address,
                "pid": os.getpid(),
                "memory": {"used_bytes": self.budget.used_bytes, "limit_bytes": self.budget.limit_bytes},
                "max_jobs": self.max_jobs,
                "jobs": jobs,
            }


class Session(threading.Thread):
    """One connection: that of a rank's training process, of one of its data streams, or of a reader."""

    def __init__(self, daemon: Daemon, sock: socket.socket) -> None:
        super().__init__(name="torchext-standby-session", daemon=True)
        self._daemon = daemon
        self._sock = sock
        self._sending = threading.Lock()
        self._closed = False
        self._handed_over = False
        self.hello: dict[str, Any] = {}
        self.peer = ""
        self.transport = ""
        self._job: Job | None = None
        self._rank_number = 0
        self._source: LocalSource | TcpSource | None = None
        self._sizes: dict[int, int] = {}
        self._ahead: tuple[int, set[int]] = 0, set()  # an image, and its entries that were read ahead of its commit

    def close(self) -> None:
        """Makes the thread end soon; from any thread."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        source = self._source
        if isinstance(source, TcpSource):
            source.close()

    def run(self) -> None:
        """Serves the connection to its end."""
        try:
            try:
                wire.tune(self._sock)
                self.hello = wire.accept(self._sock, _GREETING_TIMEOUT_S)
            finally:
                self._daemon.strangers.release()
            serve = {"primary": self._serve_primary, "data": self._serve_data, "reader": self._serve_reader}
            role = self.hello["role"]
            if role != "reader":
                self._check_rank()
            serve[role]()
        except (ConnectionError, TimeoutError) as error:
            logger.info("connection of %s ended: %s", self.peer or "a client", error)
        except (StandbyError, OSError, ValueError, KeyError) as error:
            if not self._closed:
                logger.warning("connection of %s failed: %s", self.peer or "a client", error)
            with contextlib.suppress(OSError):
                self._send(wire.failure(error))
        finally:
            self._leave()

    def _send(self, words: dict[str, Any], data: bytes | memoryview = b"") -> None:
        with self._sending:
            wire.send(self._sock, words, data)

    def _leave(self) -> None:
        if self._job is not None:
            with self._daemon.changed:
                rank = self._job.ranks[self._rank_number]
                if rank.session is self:
                    rank.session = None
        if self._source is not None:
            self._source.close()
        if not self._handed_over:
            self._sock.close()
        self._daemon.forget(self)

    def _check_rank(self) -> None:
        number, world_size = self.hello["rank"], self.hello["world_size"]
        if not (isinstance(number, int) and isinstance(world_size, int) and 0 <= number < world_size):
            raise StandbyError(f"the rank has to be from 0 to the world size - 1, got {number!r} of {world_size!r}")

    # --- the training process ---

    def _serve_primary(self) -> None:
        self.peer = f"process {self.hello['pid']} on {self.hello['host']}"
        same_host = self.hello["boot_id"] == boot_id()
        self._send(
            {"boot_id": boot_id(), "pid": os.getpid(), "local": same_host and self._can_read(self.hello["probe"])}
        )
        self._sock.settimeout(None)  # it may compute for as long as it likes
        handlers: dict[str, Callable[[dict[str, Any], memoryview], None]] = {
            "claim": self._claim,
            "ahead": self._pull_ahead,
            "commit": self._commit,
            "seal": self._seal,
            "drop": self._drop,
            "finish": self._finish,
        }
        while True:
            words, data = wire.receive(self._sock)
            try:
                if words["op"] == "fetch":
                    self._fetch(self.hello["job"], self.hello["rank"], words["step"], run=self.hello["run"])
                else:
                    handlers[words["op"]](words, data)
            except (StandbyError, OSError, ValueError) as error:
                level = logging.INFO if isinstance(error, NoStateError) else logging.WARNING
                logger.log(level, "job %s, rank %s: %s", self.hello["job"], self.hello["rank"], error)
                self._send({**wire.failure(error), "step": words.get("step")})

    def _can_read(self, probe: dict[str, Any] | None) -> bool:
        if probe is None:
            return False
        memory = SharedMemory(self.hello["pid"])
        try:
            memory.open(probe["descriptor"], bytes.fromhex(probe["nonce"]))
        except (OSError, StandbyError) as error:
            logger.info("cannot read the memory of %s (%s); its state will come over the network", self.peer, error)
            return False
        finally:
            memory.close()
        return True

    def _claim(self, words: dict[str, Any], _: memoryview) -> None:
        number, run = self.hello["rank"], self.hello["run"]
        with self._daemon.changed:
            job = self._daemon.job(self.hello["job"], self.hello["world_size"])
            rank = job.ranks[number]
            if run in job.book.members[number].fenced:
                raise FencedError(f"another process has taken over rank {number} of job {job.name!r} from this one")
            before = rank.session
            if before is not None and before.hello["run"] != run and not words["take_over"]:
                raise FencedError(
                    f"rank {number} of job {job.name!r} is being trained by {before.peer}; end that, resume from the "
                    "standby to take over, or use another job name"
                )
        if before is not None:
            with contextlib.suppress(OSError):
                before._sock.settimeout(1.0)
                before._send(
                    {"error": f"{self.peer} has taken over rank {number} of job {job.name!r}", "kind": "FencedError"}
                )
            before.close()
        with rank.hold():  # no write by the one before is under way any more
            with self._daemon.changed:
                if self._daemon.jobs.get(job.name) is not job:
                    raise StandbyError(f"job {job.name!r} was removed while its rank {number} was claimed; try again")
                term = job.book.claim(number, run)
                job.finished.discard(number)
                self._job, self._rank_number = job, number
                rank.session = self
                steps = job.book.steps()
            self._sizes.clear()
            self._ahead = 0, set()
            self.transport = words["transport"]
            self._source = LocalSource(self.hello["pid"]) if self.transport == "local" else TcpSource(words["streams"])
        self._send({"term": term, "steps": steps})

    def _finish(self, words: dict[str, Any], _: memoryview) -> None:
        job = self._claimed()
        with self._daemon.changed:
            if job.ranks[self._rank_number].session is not self:
                raise FencedError(f"another process has taken over rank {self._rank_number} of job {job.name!r}")
            job.finished.add(self._rank_number)

    def _claimed(self) -> Job:
        if self._job is None:
            raise StandbyError("this connection has not claimed its rank")
        return self._job

    def _pull_ahead(self, words: dict[str, Any], _: memoryview) -> None:
        """Reads what an optimizer has changed while the rest of its step goes on."""
        job = self._claimed()
        rank = job.ranks[self._rank_number]
        assert self._source is not None
        num_bytes = 0
        is_ready = not isinstance(self._source, TcpSource) or self._source.is_complete
        with rank.hold():
            with self._daemon.changed:
                index = job.book.begin_ahead(self._rank_number, self.hello["run"]) if is_ready else None
            if index is not None:
                pulled, num_bytes = rank.images.pull_ahead(index, words["entries"], self._source)
                before, numbers = self._ahead
                self._ahead = index, pulled | numbers if index == before else pulled
        with self._daemon.changed:
            rank.stats["bytes"] += num_bytes
        self._send({"ahead": words["order"], "bytes": num_bytes})

    def _commit(self, words: dict[str, Any], data: memoryview) -> None:
        job, step = self._claimed(), words["step"]
        rank, run = job.ranks[self._rank_number], self.hello["run"]
        source = self._source
        assert source is not None
        for number in words["removed"]:
            self._sizes.pop(number, None)
        source.forget(words["removed"])
        for number, size, descriptor, offset, nonce in words["added"]:
            self._sizes[number] = size
            if isinstance(source, LocalSource):
                source.declare(number, size, descriptor, offset, bytes.fromhex(nonce))
        tree_bytes = words["tree_bytes"]
        changes = Changes.from_wire(words["changes"], data[tree_bytes:])
        with self._daemon.changed:
            rank.stats["published"] = step
        self._wait(lambda: not isinstance(source, TcpSource) or source.is_complete)
        image: list[int | None] = [None]

        def may_begin() -> bool:
            image[0] = job.book.begin(self._rank_number, run, step)
            return image[0] is not None

        self._wait(may_begin)
        index = image[0]
        assert index is not None
        before, numbers = self._ahead
        self._ahead = index, set()
        ahead = numbers.intersection(words["ahead"]) if before == index else set()
        with rank.hold():
            num_bytes = rank.images.write(index, step, bytes(data[:tree_bytes]), self._sizes, changes, source, ahead)
        with self._daemon.changed:
            rank.stats["commits"] += 1
            rank.stats["bytes"] += num_bytes
        self._send({"pulled": step, "bytes": num_bytes})

    def _wait(self, condition: Callable[[], bool]) -> None:
        """Until the condition holds. The training process bounds the wait: it hangs up when it gives up."""
        with self._daemon.changed:
            while not condition():
                if self._closed or self._daemon.is_stopping or _hung_up(self._sock):
                    raise ConnectionAbortedError("the connection ended while its commit waited")
                self._daemon.changed.wait(0.1)

    def _seal(self, words: dict[str, Any], _: memoryview) -> None:
        job = self._claimed()
        rank = job.ranks[self._rank_number]
        with rank.hold(), self._daemon.changed:
            before = job.book.latest()
            writing = job.book.members[self._rank_number].writing
            job.book.seal(self._rank_number, self.hello["run"], words["step"])
            assert writing is not None
            rank.images.seal(writing[0])
            rank.stats["at"] = time.time()
            latest = job.book.latest()
            told = [each.session for each in job.ranks if each.session is not None] if latest != before else []
            self._daemon.changed.notify_all()
        for session in told:
            with contextlib.suppress(OSError):  # its own thread notices
                session._send({"committed": latest})

    def _drop(self, words: dict[str, Any], _: memoryview) -> None:
        job = self._claimed()
        rank = job.ranks[self._rank_number]
        with rank.hold(), self._daemon.changed:
            writing = job.book.members[self._rank_number].writing
            if writing is not None:
                rank.images.drop(writing[0])
            job.book.drop(self._rank_number, self.hello["run"])

    # --- its data streams ---

    def _serve_data(self) -> None:
        with self._daemon.changed:
            job = self._daemon.job(self.hello["job"])
            owner = job.ranks[self.hello["rank"]].session if self.hello["rank"] < job.world_size else None
            if owner is None or owner.hello["run"] != self.hello["run"] or not isinstance(owner._source, TcpSource):
                raise StandbyError("a data stream came for a rank that its process has not claimed")
            self._send({})
            self._sock.settimeout(None)
            owner._source.add(self._sock)
            self._handed_over = True
            self._daemon.changed.notify_all()

    # --- readers ---

    def _serve_reader(self) -> None:
        self.peer = "a reader"
        self._send({"boot_id": boot_id(), "pid": os.getpid()})
        self._sock.settimeout(_REQUEST_TIMEOUT_S)
        words, _ = wire.receive(self._sock)
        if words["op"] == "status":
            self._send(self._daemon.status())
        elif words["op"] == "fetch":
            self._fetch(words["job"], words["rank"], words["step"])
        elif words["op"] == "remove":
            self._daemon.remove(words["job"])
            self._send({})
        else:
            raise StandbyError(f"unknown request {words['op']!r}")

    def _fetch(self, name: str, number: int, step: int | None, run: str | None = None) -> None:
        """Sends the state of a step, by default of the one that counts; no image of the rank changes meanwhile.

        A training process, ``run``, goes on from that step: what its rank has beyond does not count from then on, so
        that no late message of another rank's dead process can make the ranks go on from different steps.
        """
        with self._daemon.changed:
            job = self._daemon.job(name)
            if not 0 <= number < job.world_size:
                raise StateMismatchError(
                    f"job {name!r} has ranks 0 to {job.world_size - 1}, rank {number} was asked for"
                )
            rank = job.ranks[number]
        before = self._sock.gettimeout()
        with rank.busy:
            with self._daemon.changed:
                if step is None:
                    step = job.book.latest()
                if step is None:
                    raise NoStateError(f"the standby holds no complete state of job {name!r}: {_progress(job)}")
                image = rank.images.images[job.book.image(number, step)]
                if run is not None:
                    job.book.resume(number, run, step)
            entries = [[n, held.slot.size_bytes, held.checksum] for n, held in sorted(image.entries.items())]
            words = {"step": step, "world_size": job.world_size, "entries": entries, "record": image.record}
            self._sock.settimeout(_READER_TIMEOUT_S)
            try:
                with self._sending:  # nothing else may come in between
                    wire.send(self._sock, words, image.tree)
                    for _, held in sorted(image.entries.items()):
                        memory = held.slot.base.numpy().data
                        for at in range(0, len(memory), _CHUNK_BYTES):
                            self._sock.sendall(memory[at : at + _CHUNK_BYTES])
                            since = rank.wanted_since
                            if since is not None and time.monotonic() - since > _READER_TIMEOUT_S:
                                raise TimeoutError(f"it was reading step {step} while training waited to go on")
            except OSError:
                self.close()  # no message would be understood in the middle of a state
                raise
            finally:
                self._sock.settimeout(before)


def _progress(job: Job) -> str:
    newest = [job.book.newest(rank) for rank in range(job.world_size)]
    return ", ".join(
        f"rank {rank} has {'nothing' if record is None else f'step {record.step}'}"
        for rank, record in enumerate(newest)
    )


def _hung_up(sock: socket.socket) -> bool:
    """Whether the peer is gone; takes nothing out of the socket."""
    try:
        return sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
