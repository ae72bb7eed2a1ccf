"""Threads that carry what is sent or published on one machine to another: messages there, weights here."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import logging
import os
import select
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Literal

from torchext.channels import sharing, wire
from torchext.channels.channel import _RECEIVER, _SENDER, Channel
from torchext.channels.link import Gone, Link
from torchext.channels.weights import _PUBLISHER, WeightBroadcast
from torchext.channels.wire import BEAT_S, SILENT_S, FrameError, Kind

if TYPE_CHECKING:
    from torchext._native import channels as native

_log = logging.getLogger(__name__)
_TIMEOUT = 2  # status codes of csrc/transport/segment.hpp
_PRESENT, _DEAD = 1, 3
_NOTICE_S = 0.05  # how often senders that come and go are looked at
_MANY = 1 << 62  # more senders than there will be: the channel here does not end because all that came have left


@dataclasses.dataclass(frozen=True)
class _Sent:
    """What the broker has not confirmed yet."""

    seq: int
    kind: Kind
    content: memoryview | bytes
    header_bytes: int = 0
    version: int = -1
    lease: Any = None  # keeps the content


class MessageCarrier:
    """Carries messages of a channel here to the broker, in a thread."""

    def __init__(
        self,
        link: Link,
        reply: dict[str, Any],
        name: str | None,
        on_peer_death: Literal["raise", "continue"],
    ) -> None:
        from torchext._native import channels as native

        try:
            self.channel = Channel(
                reply["slots"], policy=reply["policy"], num_senders=_MANY, name=name, on_peer_death=on_peer_death
            )
        except BaseException:
            if link.sock is not None:
                link.sock.close()
            raise
        self._queue = self.channel._own_queue()
        self._receiver = native.Endpoint(self._queue, f"learner at {link.address}", _RECEIVER, False)
        self._link = link
        self._compression = wire.Compression(available=bool(reply["lz4"]) and wire.has_lz4())
        self._senders = _Senders(self._queue)
        self._changed = threading.Condition()
        self._unconfirmed: collections.deque[_Sent] = collections.deque()  # guarded by _changed, as are the next two
        self._broken = False  # the connection
        self._ended = False  # by the other side
        self._num_seq = 0
        self._num_messages = 0  # taken from the channel
        self._at_end = False  # nothing more will come from the channel
        self._thread = threading.Thread(target=self._run, name=f"channel-to-{link.address}", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> int:
        """Sends what is left, for so long; returns how many messages are lost."""
        self._queue.close()
        self._thread.join(min(timeout_s, threading.TIMEOUT_MAX))
        self._link.close()
        self._thread.join()
        with self._changed:
            lost = sum(sent.kind == Kind.MESSAGE for sent in self._unconfirmed)
            self._unconfirmed.clear()
        lost += int(self._queue.stats()["depth"])
        self._receiver.leave()
        self.channel.close()
        return 0 if self._ended else lost

    def _run(self) -> None:
        why = ""
        try:
            while self._link.sock is not None and not self._connection(self._link.sock):
                reply = self._link.again({})
                if reply is None:
                    return
                with self._changed:
                    self._broken = False
                    self._confirm(reply["done"])
        except Gone as error:
            why = str(error)
        finally:
            if self._link.sock is not None:
                self._link.sock.close()
        if why:
            self._ended = True
            _log.warning("the channel to %s has ended: %s", self._link.address, why)
            self._receiver.died(self._link.pid, -1)
            self._queue.close()

    def _connection(self, sock: socket.socket) -> bool:
        """Sends over one connection until it ends; True: there is nothing left to send, or nobody to take it."""
        sock.settimeout(None)  # the learner may take nothing for long; _hear sees whether it lives
        hearing = threading.Thread(target=self._hear, args=(sock,), name="channel-confirmations", daemon=True)
        hearing.start()
        try:
            with self._changed:
                again = list(self._unconfirmed)
            for sent in again:
                self._send(sock, sent)
            return self._forward(sock)
        except OSError as error:
            if not self._ended:
                _log.info("the connection to %s is lost: %s", self._link.address, error)
            return self._ended
        finally:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            hearing.join()
            sock.close()

    def _forward(self, sock: socket.socket) -> bool:
        told = time.monotonic()
        while True:
            with self._changed:
                if self._ended or (self._at_end and not self._unconfirmed):
                    return True
                if self._broken:  # _hear says so
                    raise ConnectionResetError("the other side hung up, or is silent")
                full = self._at_end or len(self._unconfirmed) > self._queue.slots
                if full:
                    self._changed.wait(BEAT_S)
            if not full:
                for kind, words in self._senders.news(self._num_messages):
                    self._number(sock, kind, _json(words))
                got = self._receiver.receive_bytes(_NOTICE_S)
                if not isinstance(got, int):
                    array, header_bytes, version, lease = got
                    self._num_messages += 1
                    self._number(sock, Kind.MESSAGE, array.data, header_bytes, version, lease)
                    told = time.monotonic()
                    del got, array, lease
                    continue
                if got == _TIMEOUT:
                    self._senders.drained()
                else:
                    self._at_end = True
                    for kind, words in self._senders.news(self._num_messages, last=True):
                        self._number(sock, kind, _json(words))
                    self._number(sock, Kind.BYE, b"")
            if time.monotonic() - told >= BEAT_S:
                wire.send(sock, Kind.BEAT)
                told = time.monotonic()

    def _number(
        self,
        sock: socket.socket,
        kind: Kind,
        content: memoryview | bytes,
        header_bytes: int = 0,
        version: int = -1,
        lease: Any = None,
    ) -> None:
        self._num_seq += 1
        sent = _Sent(self._num_seq, kind, content, header_bytes, version, lease)
        with self._changed:
            self._unconfirmed.append(sent)
        self._send(sock, sent)

    def _send(self, sock: socket.socket, sent: _Sent) -> None:
        content = sent.content
        if sent.kind == Kind.MESSAGE:
            content = self._compression.compress(memoryview(content))
        start = time.perf_counter()
        wire.send(
            sock,
            sent.kind,
            content,
            seq=sent.seq,
            version=sent.version,
            header_bytes=sent.header_bytes,
            raw_bytes=len(sent.content),
        )
        self._compression.note_sent(len(content), time.perf_counter() - start)

    def _hear(self, sock: socket.socket) -> None:
        """Hears what was confirmed, and whether the other side lives."""
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        try:
            while True:
                if not poll.poll(1000 * SILENT_S):
                    raise TimeoutError("silent")
                frame = wire.receive(sock)
                words = wire.receive_words(sock, frame)
                with self._changed:
                    if frame.kind == Kind.BEAT:
                        self._confirm(frame.seq)
                    elif frame.kind == Kind.CLOSED:
                        _log.info("the channel to %s has ended: %s", self._link.address, words.get("reason"))
                        self._ended = True
                        break
                    else:
                        raise FrameError(f"a {frame.kind.name} from the side that confirms")
        except OSError:
            pass
        finally:
            if self._ended:
                self._queue.close()
            with self._changed:
                self._broken = True
                self._changed.notify_all()
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # ends a send that waits

    def _confirm(self, seq: int) -> None:
        """With the lock: the broker has done all up to this number."""
        while self._unconfirmed and self._unconfirmed[0].seq <= seq:
            self._unconfirmed.popleft()
        self._changed.notify_all()


def _json(words: dict[str, Any]) -> bytes:
    return json.dumps(words).encode()


class _Senders:
    """Which senders come to a channel here and go, in the order that the learner may learn of it.

    That one has left is told once all messages are sent that were in the channel when it was noticed.
    """

    def __init__(self, queue: native.Queue) -> None:
        self._queue = queue
        self._known: dict[tuple[int, int], int] = {}  # place and generation -> number, of all in the table
        self._here: set[tuple[int, int]] = set()
        self._going: list[tuple[int, Kind, dict[str, Any]]] = []  # after so many messages
        self._num = 0
        self._looked = 0.0

    def drained(self) -> None:
        """The channel was empty after the last `news`."""
        self._going = [(0, kind, words) for _, kind, words in self._going]

    def news(self, num_messages: int, *, last: bool = False) -> list[tuple[Kind, dict[str, Any]]]:
        """What is to be told now.

        Args:
            num_messages: How many were taken from the channel so far.
            last: Nothing more will come from it.
        """
        found: list[tuple[Kind, dict[str, Any]]] = []
        if last or time.monotonic() - self._looked >= _NOTICE_S:
            self._looked = time.monotonic()
            found = self._look(num_messages)
        due = [(kind, words) for after, kind, words in self._going if last or num_messages >= after]
        if due:
            self._going = [row for row in self._going if not (last or num_messages >= row[0])]
        return found + due

    def _look(self, num_messages: int) -> list[tuple[Kind, dict[str, Any]]]:
        come: list[tuple[Kind, dict[str, Any]]] = []
        known, here, died = {}, set(), {}
        for name, pid, role, presence, place, generation, status in self._queue.peers():
            if role != _SENDER:
                continue
            key = (place, generation)
            if key not in self._known:
                self._num += 1
                self._known[key] = self._num
                self._here.add(key)
                come.append((Kind.JOINED, {"sender": self._num, "name": name, "pid": pid}))
            known[key] = self._known[key]
            if presence == _PRESENT:
                here.add(key)
            elif presence == _DEAD:
                died[key] = status
        gone = self._here - here
        if gone:
            after = num_messages + int(self._queue.stats()["depth"])
            for key in sorted(gone):
                words = {"sender": self._known[key]}
                if key in died:
                    self._going.append((after, Kind.DIED, {**words, "status": died[key]}))
                else:
                    self._going.append((after, Kind.LEFT, words))
        self._known, self._here = known, here
        return come


class WeightCarrier:
    """Brings the versions of a broker's weights here, in a thread."""

    def __init__(self, link: Link, reply: dict[str, Any]) -> None:
        from torchext._native import channels as native

        self._latest = native.Latest.create(reply["slab_bytes"], bytes.fromhex(reply["layout"]), sharing.new_nonce())
        self._link = link
        self._publisher = native.Reader(self._latest, f"learner at {link.address}", _PUBLISHER)
        self.weights = WeightBroadcast.__new__(WeightBroadcast)
        self.weights._attach(os.dup(self._latest.descriptor))
        self._thread = threading.Thread(target=self._run, name=f"weights-from-{link.address}", daemon=True)
        self._thread.start()

    def close(self, _timeout_s: float) -> int:
        """Ends it for all here."""
        self._link.close()
        self._thread.join()
        self._latest.close()
        self._publisher.leave()
        self.weights.close()
        return 0

    def _run(self) -> None:
        try:
            while self._link.sock is not None and not self._connection(self._link.sock):
                self._link.again({"seen": self._latest.version})
        except Gone as error:
            _log.warning("the weights from %s have ended: %s", self._link.address, error)
            self._publisher.died(self._link.pid, -1)
            self._latest.close()

    def _connection(self, sock: socket.socket) -> bool:
        """Receives over one connection until it ends; True: the weights were closed."""
        from torchext._native import channels as native

        try:
            sock.settimeout(SILENT_S)
            while True:
                frame = wire.receive(sock)
                if frame.kind == Kind.WEIGHTS:
                    self._receive(sock, frame)
                    continue
                words = wire.receive_words(sock, frame)
                if frame.kind == Kind.PUBLISHER_DIED:
                    self._publisher.died(words["pid"], words["status"])
                    self._publisher = native.Reader(self._latest, f"learner at {self._link.address}", _PUBLISHER)
                elif frame.kind == Kind.CLOSED:
                    self._latest.close()
                    return True
        except OSError as error:
            if not self._link.closing.is_set():
                _log.info("the connection to %s is lost: %s", self._link.address, error)
            return False
        finally:
            sock.close()

    def _receive(self, sock: socket.socket, frame: wire.Frame) -> None:
        slab = self._publisher.begin()
        try:
            memory = self._latest.view(slab).data
            if frame.raw_bytes != len(memory):
                raise FrameError(f"weights of {frame.raw_bytes} bytes, of {len(memory)} expected")
            if frame.compressed:
                compressed = memoryview(bytearray(frame.wire_bytes))
                wire.receive_content(sock, frame, compressed)
                memory[:] = wire.decompressed(compressed, frame.raw_bytes)
            else:
                wire.receive_content(sock, frame, memory)
        except BaseException:
            self._latest.abandon(slab)
            raise
        self._latest.commit(slab, frame.version)
