"""One connection to a standby: what a training process, one of its streams or a reader asks, and what it gets."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchext.standby import rdma, wire
from torchext.standby.changes import Changes
from torchext.standby.errors import FencedError, NoStateError, StandbyError
from torchext.standby.handing_out import hand_out
from torchext.standby.jobs import Job
from torchext.standby.source import LocalSource, SharedMemory, Source, TcpSource

if TYPE_CHECKING:
    from torchext.standby.daemon import Daemon
    from torchext.standby.promote import Promoter

logger = logging.getLogger(__name__)

_GREETING_TIMEOUT_S = 10.0
_REQUEST_TIMEOUT_S = 30.0
_DRAIN_S = 2.0


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
        self._source: Source | None = None
        self._sizes: dict[int, int] = {}
        self.is_waiting = False  # a warm worker, to take over
        self._promoter: Promoter | None = None  # of a warm worker that takes over, until it commits a step
        self.is_superseded = False  # another process takes the rank over: guarded by the daemon's condition
        self._watcher: threading.Thread | None = None
        self._can_read_memory = False
        self._ahead: tuple[int, set[int]] = 0, set()  # an image, and its entries that were read ahead of its commit

    def close(self) -> None:
        """Makes the thread end soon; from any thread."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if self._source is not None:
            self._source.interrupt()

    def run(self) -> None:
        """Serves the connection to its end."""
        try:
            try:
                wire.tune(self._sock)
                self.hello = wire.accept(self._sock, _GREETING_TIMEOUT_S)
            finally:
                self._daemon.strangers.release()
            serve = {
                "primary": self._serve_primary,
                "data": self._serve_data,
                "heartbeat": self._serve_heartbeat,
                "reader": self._serve_reader,
            }
            role = self.hello["role"]
            if role != "reader":
                self._check_rank()
            serve[role]()
        except (ConnectionError, TimeoutError) as error:
            logger.info("connection of %s ended: %s", self.peer or "a client", error)
        except Exception as error:  # whatever it is: the other end hears of it
            if not self._closed:
                is_expected = isinstance(error, (StandbyError, OSError))
                logger.warning("connection of %s failed: %s", self.peer or "a client", error, exc_info=not is_expected)
            with contextlib.suppress(OSError):
                self._send(wire.failure(error))
        finally:
            self._leave()

    def _send(self, words: dict[str, Any], data: bytes | memoryview = b"") -> None:
        with self._sending:
            wire.send(self._sock, words, data)

    def mark_lost(self) -> None:
        """Lets warm workers take over, which ends this connection; its process may still come back before they do."""
        with self._daemon.changed:
            if self._job is not None and self._job.ranks[self._rank_number].session is self:
                self._mark_lost(self._job)

    def _mark_lost(self, job: Job) -> None:
        if not self.is_superseded and self._rank_number not in job.finished:
            job.heirs_wanted.update(range(job.world_size))  # when one rank is lost, all have to start again
            self._daemon.changed.notify_all()

    def notify(self, sentence: str) -> None:
        """Tells the training process something that went wrong; from any thread."""
        with contextlib.suppress(OSError):  # its own thread notices
            self._send({"notice": sentence})

    def _leave(self) -> None:
        self._end_takeover()
        job = self._job
        if job is not None:
            with self._daemon.changed:
                rank = job.ranks[self._rank_number]
                if rank.session is self:
                    rank.session = None
                    self._mark_lost(job)
        if self._watcher is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._watcher.join()
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
        same_host = self.hello["boot_id"] == wire.boot_id()
        self._can_read_memory = same_host and self._can_read(self.hello["probe"])
        self._send(
            {
                "boot_id": wire.boot_id(),
                "pid": os.getpid(),
                "local": self._can_read_memory,
                "lacks_rdma": rdma.lacks(self._address()) if self._may_need_rdma() else None,
                "heartbeat_s": self._daemon.heartbeat_s,
            }
        )
        self._sock.settimeout(None)  # it may compute for as long as it likes
        handlers: dict[str, Callable[[dict[str, Any], memoryview], None]] = {
            "claim": self._claim,
            "ahead": self._pull_ahead,
            "commit": self._commit,
            "seal": self._seal,
            "drop": self._drop,
            "start_over": self._start_over,
            "finish": self._finish,
            "warm": self._await_loss,
            "released": self._released,
        }
        while True:
            words, data = wire.receive(self._sock)
            try:
                if words["op"] == "fetch":
                    self._fetch(
                        self.hello["job"],
                        self.hello["rank"],
                        words["step"],
                        run=self.hello["run"],
                        from_memory=words["from_memory"],
                    )
                else:
                    handlers[words["op"]](words, data)
            except (StandbyError, OSError, ValueError) as error:
                level = logging.INFO if isinstance(error, NoStateError) else logging.WARNING
                logger.log(level, "job %s, rank %s: %s", self.hello["job"], self.hello["rank"], error)
                with contextlib.suppress(OSError):  # it is gone; what it said before that is still to be read
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

    def _may_need_rdma(self) -> bool:
        return self.hello["rdma"] and not self._can_read_memory

    def _address(self) -> str:
        """This host's, as the training process has reached it."""
        return str(self._sock.getsockname()[0])

    def _claim(self, words: dict[str, Any], _: memoryview) -> None:
        number, run = self.hello["rank"], self.hello["run"]
        self.transport = words["transport"]
        self._source, endpoint = self._open_source(words)  # first: a process that cannot be read takes over from nobody
        with self._daemon.changed:
            job = self._daemon.job(self.hello["job"], self.hello["world_size"])
            rank = job.ranks[number]
            if run in job.book.members[number].fenced:
                raise FencedError(f"another process has taken over rank {number} of job {job.name!r} from this one")
            before = rank.session if rank.session is not self else None
            if before is not None and before.hello["run"] != run and not words["take_over"]:
                raise FencedError(
                    f"rank {number} of job {job.name!r} is being trained by {before.peer}; end that, resume from the "
                    "standby to take over, or use another job name"
                )
            if before is not None:
                before.is_superseded = True
        self._daemon.free_discarded()  # of another world size
        if before is not None:
            with contextlib.suppress(OSError):
                before._sock.settimeout(1.0)
                before._send(
                    {"error": f"{self.peer} has taken over rank {number} of job {job.name!r}", "kind": "FencedError"}
                )
            before.close()
            before.join(_DRAIN_S)  # what a process said before it died counts
        with rank.hold():  # no write by the one before is under way any more
            with self._daemon.changed:
                if self._daemon.jobs.get(job.name) is not job:
                    raise StandbyError(f"job {job.name!r} was removed while its rank {number} was claimed; try again")
                persister = self._daemon.persister(job, words["persist"])
                term = job.book.claim(number, run)
                job.finished.discard(number)
                job.heirs_wanted.discard(number)
                self._job, self._rank_number = job, number
                rank.session = self
                steps = job.book.steps()
            self._sizes.clear()
            self._ahead = 0, set()
        if self._can_read_memory and self._watcher is None:
            self._watch(self.hello["pid"])
        if persister is not None:
            persister.close()
        self._send({"term": term, "steps": steps, "released": rank.released, "endpoint": endpoint})

    def _open_source(self, words: dict[str, Any]) -> tuple[Source, dict[str, Any] | None]:
        """Where this process's entries will be read, and what its RDMA device, if it is to be read so, has to know."""
        if self.transport == "local":
            return LocalSource(self.hello["pid"]), None
        if self.transport == "tcp":
            return TcpSource(words["streams"]), None
        endpoint = rdma.Endpoint(self._address())
        try:
            endpoint.connect(words["endpoint"])
        except BaseException:
            endpoint.close()
            raise
        return rdma.RdmaSource(endpoint), endpoint.words

    def _start_over(self, words: dict[str, Any], _: memoryview) -> None:
        job = self._claimed()
        with self._daemon.changed:
            job.book.start_over(self._rank_number, self.hello["run"])
            if job.persister is not None:
                job.persister.forget_after(words["step"])

    def _released(self, words: dict[str, Any], _: memoryview) -> None:
        job = self._claimed()
        with self._daemon.changed:
            if job.ranks[self._rank_number].session is self:
                job.ranks[self._rank_number].released = words["number"]

    def _finish(self, words: dict[str, Any], _: memoryview) -> None:
        job = self._claimed()
        with self._daemon.changed:
            if job.ranks[self._rank_number].session is not self:
                raise FencedError(f"another process has taken over rank {self._rank_number} of job {job.name!r}")
            job.finished.add(self._rank_number)

    def _await_loss(self, _: dict[str, Any], __: memoryview) -> None:
        """Keeps a warm worker waiting until it is to take over."""
        name, number = self.hello["job"], self.hello["rank"]

        def is_wanted() -> bool:
            job = self._daemon.jobs.get(name)
            return job is not None and number in job.heirs_wanted

        self.is_waiting = True
        try:
            self._wait(is_wanted)
        finally:
            self.is_waiting = False
        with self._daemon.changed:
            self._daemon.jobs[name].heirs_wanted.discard(number)
        logger.warning("job %s, rank %d: %s takes over", name, number, self.peer)
        self._send({"promoted": True})
        self._promoter = self._daemon.promoter
        if self._promoter is not None:
            self._promoter.has_promoted()

    def _end_takeover(self) -> None:
        if self._promoter is not None:
            self._promoter.has_settled()
            self._promoter = None

    def _watch(self, pid: int) -> None:
        """Ends the connection when the process does, even while a child that it forked keeps the socket open."""
        try:
            process = os.pidfd_open(pid)
        except OSError:  # gone, which the connection shows, or a kernel without
            return

        def wait() -> None:
            poll = select.poll()
            poll.register(process, select.POLLIN)
            poll.register(self._sock, select.POLLRDHUP)
            poll.poll()
            os.close(process)
            self.close()

        self._watcher = threading.Thread(target=wait, name="torchext-standby-watch", daemon=True)
        self._watcher.start()

    # --- its heartbeat ---

    def _serve_heartbeat(self) -> None:
        owner = self._owner()
        silence_s = self._daemon.heartbeat_s
        self._send({})
        self._sock.settimeout(silence_s)
        is_silent = False
        while True:
            try:
                if not self._sock.recv(64):
                    return
                is_silent = False
            except TimeoutError:
                if not is_silent:
                    is_silent = True
                    logger.warning("%s has been silent for %g s and counts as lost", owner.peer, silence_s)
                    owner.mark_lost()

    def _owner(self) -> Session:
        """The connection of the process that this one belongs to."""
        with self._daemon.changed:
            job = self._daemon.job(self.hello["job"])
            number: int = self.hello["rank"]
            owner = job.ranks[number].session if number < job.world_size else None
        if owner is None or owner.hello["run"] != self.hello["run"]:
            raise StandbyError(f"a {self.hello['role']} stream came for a rank that its process has not claimed")
        return owner

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
        with rank.hold():
            with self._daemon.changed:
                is_ready = self._source.is_complete
                index = job.book.begin_ahead(self._rank_number, self.hello["run"]) if is_ready else None
            if index is not None:
                pulled, num_bytes = rank.images.pull_ahead(index, words["entries"], self._source)
                before, numbers = self._ahead
                self._ahead = index, pulled | numbers if index == before else pulled
        with self._daemon.changed:
            rank.stats["bytes"] += num_bytes
        self._send({"ahead": words["order"], "bytes": num_bytes})

    def _commit(self, words: dict[str, Any], data: memoryview) -> None:
        self._end_takeover()
        job, step = self._claimed(), words["step"]
        rank, run = job.ranks[self._rank_number], self.hello["run"]
        source = self._source
        assert source is not None
        for number in words["removed"]:
            self._sizes.pop(number, None)
        source.forget(words["removed"])
        for number, size, *place in words["added"]:
            self._sizes[number] = size
            source.declare(number, size, *place)
        tree_bytes = words["tree_bytes"]
        changes = Changes.from_wire(words["changes"], data[tree_bytes:])
        with self._daemon.changed:
            rank.stats["published"] = step
        self._wait(lambda: source.is_complete)
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
            held = rank.images.images[index].entries if words["audit"] else {}
            checksums = [[number, each.checksum] for number, each in held.items()]
        with self._daemon.changed:
            rank.stats["commits"] += 1
            rank.stats["bytes"] += num_bytes
        self._send({"pulled": step, "bytes": num_bytes, "checksums": checksums})

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
            told = []
            if latest != before:
                told = [each.session for each in job.ranks if each.session is not None]
                job.num_counted += 1
                if job.persister is not None:
                    job.persister.step_counts()
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
        owner = self._owner()
        assert owner._source is not None
        with self._daemon.changed:
            owner._source.add(self._sock)
            self._send({})
            self._sock.settimeout(None)
            self._handed_over = True
            self._daemon.changed.notify_all()

    # --- readers ---

    def _serve_reader(self) -> None:
        self.peer = "a reader"
        self._send({"boot_id": wire.boot_id(), "pid": os.getpid()})
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

    def _fetch(self, name: str, number: int, step: int | None, **options: Any) -> None:
        """See `hand_out`."""
        before = self._sock.gettimeout()
        try:
            hand_out(self._daemon, self._sock, self._sending, name, number, step, **options)
        except OSError:
            self.close()  # no message would be understood in the middle of a state
            raise
        finally:
            self._sock.settimeout(before)


def _hung_up(sock: socket.socket) -> bool:
    """Whether the peer is gone; takes nothing out of the socket."""
    try:
        return sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
