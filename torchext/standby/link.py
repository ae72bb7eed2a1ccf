"""The training process's connection to its standby."""

from __future__ import annotations

import contextlib
import logging
import queue
import select
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from torchext._native import standby as native
from torchext.standby import rdma, wire
from torchext.standby import tree as trees
from torchext.standby.arena import Slot
from torchext.standby.errors import StandbyError, StandbyLostError
from torchext.standby.fetching import copy_state, receive_state
from torchext.standby.ledger import Publication
from torchext.standby.persist import State
from torchext.standby.source import serve

logger = logging.getLogger(__name__)

_NUM_BEATS = 5  # in the time after which silence means loss


@dataclass(frozen=True)
class Identity:
    """Who a training process is to a standby.

    Attributes:
        job: Name of the job, the same after a restart.
        rank: Its rank.
        world_size: Number of ranks.
        run: Different for each process.
    """

    job: str
    rank: int
    world_size: int
    run: str

    @classmethod
    def of_this_process(cls, job: str, rank: int, world_size: int) -> Identity:
        """A new run."""
        return cls(job, rank, world_size, uuid.uuid4().hex)


# Gives what to send; called in the thread that sends.
_Message = Callable[[], tuple[dict[str, Any], bytes]]


class Link:
    """One connection; made by `open_link`. Not thread-safe.

    All is encoded and sent by one thread, in order: the standby, woken by a message, does not take the core from the
    thread that trains, and a connection that is stuck holds nobody up before the gate.

    Attributes:
        transport: ``"local"``, ``"rdma"`` or ``"tcp"``.
        committed: The step that counts, as far as this process has heard.
        bytes_pulled: What the standby has read in all.
        released: The last output that a process of this rank has let out, at the time of `claim`; -1: none.
        notices: What it has said to have gone wrong, and nobody has taken out yet.
        publication: The last one that was sent.
        read_ahead: How many orders to read ahead the standby has followed.
    """

    def __init__(
        self,
        sock: socket.socket,
        address: str,
        identity: Identity,
        timeout_s: float,
        *,
        transport: str,
        heartbeat_s: float | None,
        standby_pid: int,
    ) -> None:
        self._sock = sock
        self._address = address
        self._identity = identity
        self._timeout_s = timeout_s
        self._threads: list[threading.Thread] = []
        self._streams: list[socket.socket] = []
        self._fault: BaseException | None = None  # of a sending thread
        self._outbox: queue.SimpleQueue[_Message | threading.Event | None] = queue.SimpleQueue()
        self._sealed = threading.Event()  # whether the last seal was sent
        self._sealed.set()
        self._data = memoryview(b"")  # what came with the last answer
        self._inbox: list[tuple[dict[str, Any], memoryview]] = []  # came before it was waited for
        self._heartbeat_s = heartbeat_s  # a silence after which the standby takes this process for lost
        self._heartbeat: native.Heartbeat | None = None
        self.transport = transport
        self._standby_pid = standby_pid
        self._endpoint: rdma.Endpoint | None = None
        self.committed: int | None = None
        self.bytes_pulled = 0
        self.released = -1
        self.notices: list[str] = []
        self.publication: Publication | None = None
        self.read_ahead = 0
        self._num_orders = 0  # to read ahead
        # A socket of its own, as the timeout of the other one is that of the answer that is being waited for. Made
        # here, as both share whether they block, which the thread must not change while an answer is waited for.
        outgoing = sock.dup()
        outgoing.settimeout(timeout_s)
        sender = threading.Thread(target=self._send_all, args=(outgoing,), name="torchext-standby-send", daemon=True)
        sender.start()
        self._threads.append(sender)

    def claim(
        self,
        *,
        take_over: bool,
        num_streams: int,
        find: Callable[[int], torch.Tensor],
        persist: dict[str, Any] | None = None,
    ) -> None:
        """Becomes the owner of the rank, and opens the data streams where there are to be any.

        Args:
            take_over: Whether to fence a process that owns it and is connected.
            num_streams: How many, over TCP.
            find: Gives the bytes of an entry by its number.
            persist: The ``directory`` that the standby is to write a state to after each ``every_n_commits``.

        Raises:
            StandbyError: Another process owns it and is connected, or the standby refuses for another reason.
        """
        streams = {"local": 0, "rdma": min(1, num_streams), "tcp": num_streams}[self.transport]
        words = {"op": "claim", "take_over": take_over, "transport": self.transport, "streams": streams}
        if self.transport == "rdma":
            endpoint = self._endpoint = rdma.Endpoint(self._sock.getsockname()[0])
            words["endpoint"] = endpoint.words
        self._post({**words, "persist": persist})
        answer = self._answer("term")
        if self._endpoint is not None:
            self._endpoint.connect(answer["endpoint"])
        if answer["steps"]:
            self.committed = answer["steps"][-1]
        self.released = answer["released"]
        if self._heartbeat_s is not None and self._heartbeat is None:
            beats = wire.connect(self._address, self._timeout_s)
            self._streams.append(beats)
            wire.greet(beats, {"role": "heartbeat", **self._names()}, self._timeout_s)
            self._heartbeat = native.Heartbeat(beats.fileno(), max(1, int(1000 * self._heartbeat_s / _NUM_BEATS)))
        for _ in range(streams):
            stream = wire.connect(self._address, self._timeout_s)
            self._streams.append(stream)
            wire.greet(stream, {"role": "data", **self._names()}, self._timeout_s)
            stream.settimeout(None)  # it rests between two commits; `close` ends it
            thread = threading.Thread(
                target=self._serve, args=(stream, find), name="torchext-standby-stream", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def await_promotion(self) -> None:
        """Blocks until the job has lost its training process and this one is to take over, for however long.

        Raises:
            StandbyLostError: The standby is gone.
        """
        self._post({"op": "warm"})
        self._sock.settimeout(None)
        try:
            while "promoted" not in wire.raised(wire.receive(self._sock)[0]):
                pass
        except OSError as error:
            raise StandbyLostError(f"the standby at {self._address} is gone: {error}") from error
        finally:
            self._sock.settimeout(self._timeout_s)

    def start_over(self, step: int) -> None:
        """Goes on from a step that the standby does not hold: nothing that it holds counts. Returns once that is sent.

        Raises:
            OSError: It cannot be sent.
        """
        self._post({"op": "start_over", "step": step})
        self.flush()
        self.committed = None

    def publish(self, step: int, complete: Callable[[], Publication], *, audit: bool = False) -> None:
        """Tells the standby what to pull; does not wait, but for what was sealed before to be on its way.

        So a process that dies from here on has lost no more than this step.

        Args:
            step: The step.
            complete: Gives the publication; called by the thread that sends it, before `wait_pulled` returns.
            audit: Whether the standby is to say the checksums of all that it has then.

        Raises:
            TimeoutError: It is not within the timeout.
        """
        if not self._sealed.wait(self._timeout_s):
            raise TimeoutError(f"the connection has taken nothing for {self._timeout_s:g} s")

        def encode() -> tuple[dict[str, Any], bytes]:
            publication = self.publication = complete()
            changes, data = publication.changes.to_wire()
            added = [[e.number, e.slot.size_bytes, *self._place(e.slot)] for e in publication.added]
            words = {
                "op": "commit",
                "step": step,
                "added": added,
                "removed": publication.removed,
                "changes": changes,
                "ahead": sorted(publication.ahead),
                "tree_bytes": len(publication.tree),
                "audit": audit,
            }
            return words, publication.tree + data

        self._outbox.put(encode)

    def pull_ahead(self, numbers: list[int]) -> int:
        """Lets the standby read entries that belong to the next commit; does not wait. Returns the order's number."""
        self._num_orders += 1
        self._post({"op": "ahead", "order": self._num_orders, "entries": numbers})
        return self._num_orders

    def wait_ahead(self, order: int) -> None:
        """Blocks until the standby has followed an order of `pull_ahead`."""
        while self.read_ahead < order:
            self._answer("ahead")

    def wait_pulled(self, step: int) -> dict[int, int]:
        """Blocks until the standby has everything of the step, or the timeout has passed.

        Returns:
            Of an audited step, the checksum of each entry at the standby by its number; else nothing.
        """
        answer = self._answer("pulled", step)
        self.bytes_pulled += answer["bytes"]
        return dict(answer["checksums"])

    def seal(self, step: int) -> None:
        """The step, pulled whole, is to count; does not wait."""
        self._sealed = threading.Event()
        self._post({"op": "seal", "step": step})
        self._outbox.put(self._sealed)

    def wait_committed(self, step: int) -> None:
        """Blocks until the step counts: all ranks have sealed it."""
        while self.committed is None or self.committed < step:
            self._answer("committed")

    def note_released(self, number: int) -> None:
        """Lets the standby remember the last output that was let out. Returns once that is sent.

        Raises:
            OSError: It cannot be sent.
        """
        self._post({"op": "released", "number": number})
        self.flush()

    def finish(self) -> None:
        """The training is over: nobody will resume it. Does not wait."""
        self._post({"op": "finish"})

    def flush(self) -> None:
        """Blocks until all of the above is sent, or the timeout has passed.

        Raises:
            OSError: It cannot be sent.
        """
        sent = threading.Event()
        self._outbox.put(sent)
        if not sent.wait(self._timeout_s):
            raise TimeoutError(f"the connection has taken nothing for {self._timeout_s:g} s")
        if self._fault is not None:
            raise self._fault

    def drop(self, step: int) -> None:
        """The step is not to count; does not wait."""
        self._post({"op": "drop", "step": step})

    def fetch(self, step: int | None, find_mesh: trees.FindMesh | None = None) -> State:
        """The state of a step, by default of the one that counts, to go on from.

        What this rank committed beyond it does not count any more. For ``find_mesh`` see `tree.load`.
        """
        words = self._ask_for_state(step, from_memory=self.transport == "local")
        if "places" not in words:
            return receive_state(self._sock, words, self._data, find_mesh)
        try:
            return copy_state(self._standby_pid, words, self._data, find_mesh)
        except (OSError, StandbyError) as error:
            # Also of a wrong checksum: a process that was stopped meanwhile may have been given up, and the image be
            # written to. Then the connection has ended, which is what went wrong.
            logger.info("cannot read the standby's memory (%s); the state comes over the connection", error)
        finally:
            self._post({"op": "has_read"})  # until then no image changes
        words = self._ask_for_state(words["step"], from_memory=False)
        return receive_state(self._sock, words, self._data, find_mesh)

    def _ask_for_state(self, step: int | None, *, from_memory: bool) -> dict[str, Any]:
        self._post({"op": "fetch", "step": step, "from_memory": from_memory})
        return self._answer("entries")

    def check(self) -> None:
        """Raises what a sending thread met, or what the standby has said, without waiting."""
        while _readable(self._sock):
            self._inbox.append(self._receive(time.monotonic() + self._timeout_s, "a message that has begun"))
            self._take_note(self._inbox[-1][0])
        if self._fault is not None:
            raise self._fault

    def close(self) -> None:
        """Ends the connection and its threads. Idempotent."""
        self._outbox.put(None)
        if self._heartbeat is not None:
            self._heartbeat.stop()
        for sock in [self._sock, *self._streams]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in [self._sock, *self._streams]:
            sock.close()
        if self._endpoint is not None:
            self._endpoint.close()

    def _place(self, slot: Slot) -> list[Any]:
        """Where the standby's `Source` finds an entry."""
        segment = slot.segment
        if self._endpoint is not None:
            return [self._endpoint.expose(segment), slot.address]
        return [segment.descriptor, slot.offset, segment.nonce.hex()] if self.transport == "local" else []

    def _names(self) -> dict[str, Any]:
        i = self._identity
        return {"job": i.job, "rank": i.rank, "world_size": i.world_size, "run": i.run}

    def _post(self, words: dict[str, Any]) -> None:
        """Has a message sent, after all that were to be sent before."""
        self._outbox.put(lambda: (words, b""))

    def _send_all(self, sock: socket.socket) -> None:
        """Until the end of the outbox; what comes after a failure is not sent."""
        with sock:
            while (message := self._outbox.get()) is not None:
                if isinstance(message, threading.Event):
                    message.set()
                elif self._fault is None:
                    self._send(sock, message)

    def _send(self, sock: socket.socket, message: _Message) -> None:
        try:
            wire.send(sock, *message())
        except BaseException as error:  # the state may hold anything, also what cannot be pickled
            self._fault = error
            with contextlib.suppress(OSError):  # so that a gate that waits for the answer notices
                sock.shutdown(socket.SHUT_RDWR)

    def _serve(self, stream: socket.socket, find: Callable[[int], torch.Tensor]) -> None:
        try:
            serve(stream, find)
        except OSError:
            pass  # the connection ended; the control connection says why
        except BaseException as error:  # whatever it is: the thread that trains is to hear of it
            self._fault = error
            with contextlib.suppress(OSError):  # so that the standby, and a gate that waits for it, notice
                stream.shutdown(socket.SHUT_RDWR)

    def _answer(self, key: str, step: int | None = None) -> dict[str, Any]:
        """The next message that has ``key``, for this step."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            if self._inbox:
                words, self._data = self._inbox.pop(0)
            else:
                words, self._data = self._receive(deadline, key if step is None else f"{key} of step {step}")
                self._take_note(words)
            if key in words and (step is None or words[key] == step):
                return words

    def _receive(self, deadline: float, what: str) -> tuple[dict[str, Any], memoryview]:
        try:
            return wire.receive(self._sock, deadline=deadline)
        except TimeoutError as error:
            raise TimeoutError(f"no answer ({what}) within {self._timeout_s:g} s") from error
        except ConnectionError as error:
            raise self._fault or error from error  # of the two, what happened first
        finally:
            self._sock.settimeout(self._timeout_s)

    def _take_note(self, words: dict[str, Any]) -> None:
        if "committed" in words:
            self.committed = words["committed"]
        if "notice" in words:
            self.notices.append(words["notice"])
        if "ahead" in words:
            self.read_ahead = words["ahead"]
            self.bytes_pulled += words["bytes"]
        if "error" in words and self._fault is not None:
            raise self._fault  # what the standby says came of it
        wire.raised(words)


def _readable(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def fetch(address: str, job: str, *, rank: int = 0, step: int | None = None, timeout_s: float = 60.0) -> State:
    """Reads a state from a standby, without becoming its training process.

    Args:
        address: ``host:port`` or "local".
        job: Name of the job.
        rank: Whose state.
        step: None: the one that counts.
        timeout_s: For the connection and between any two packets.

    Raises:
        NoStateError: The standby does not hold it.
        StandbyError: It cannot be reached, or what it sent is not what was committed.
    """

    def ask(sock: socket.socket) -> State:
        wire.send(sock, {"op": "fetch", "job": job, "rank": rank, "step": step})
        words, data = wire.receive(sock)
        return receive_state(sock, wire.raised(words), data)

    return _as_reader(address, timeout_s, ask)


def status(address: str, *, timeout_s: float = 10.0) -> dict[str, Any]:
    """What a standby holds, as ``torchext standby status --json`` prints it."""

    def ask(sock: socket.socket) -> dict[str, Any]:
        wire.send(sock, {"op": "status"})
        return wire.raised(wire.receive(sock)[0])

    return _as_reader(address, timeout_s, ask)


def remove(address: str, job: str, *, timeout_s: float = 10.0) -> None:
    """Makes a standby forget a job."""

    def ask(sock: socket.socket) -> None:
        wire.send(sock, {"op": "remove", "job": job})
        wire.raised(wire.receive(sock)[0])

    _as_reader(address, timeout_s, ask)


_Answer = TypeVar("_Answer")


def _as_reader(address: str, timeout_s: float, ask: Callable[[socket.socket], _Answer]) -> _Answer:
    try:
        with wire.connect(address, timeout_s) as sock:
            wire.greet(sock, {"role": "reader"}, timeout_s)
            return ask(sock)
    except OSError as error:
        raise StandbyLostError(
            f"the standby at {address} cannot be reached: {error or type(error).__name__}"
        ) from error
