"""Connections between sites: each site sends its stream to, and its counters to, every other over two of its own.

A link is a thread that connects, finds out where the other side is, sends from there and begins again when the
connection goes. What is accepted is served by a thread each.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from torchext import transport
from torchext.replication import handshake
from torchext.replication.core import RECEIVED, Core, Marks
from torchext.replication.cursor import Cursor
from torchext.replication.errors import ReplicationError, StoreError, StoreFullError
from torchext.replication.log import FrameError, Place, StreamLog
from torchext.replication.predicates import Counter

_FRAME = struct.Struct("<IB")  # length of what follows, type
_ITEM = struct.Struct("<HHQ")  # number of the origin, number of the ack type, sequence number
_NAMES, _ALL, _NEWS, _MARKS = 1, 2, 3, 4
_MARK = struct.Struct("<QQ")  # question, answer
_MAX_CONTROL_BYTES = 1 << 20
_PLACE = struct.Struct("<qqI")  # where the sender of a stream begins: number, offset, checksum
_SEND_BYTES = 4 << 20  # per system call

_logger = logging.getLogger(__name__)


class Link:
    """The outgoing connection of one kind to one site; `run` is the loop of its thread."""

    def __init__(self, core: Core, site: str, hello: dict[str, str], serve: Callable[[Link, dict[str, Any]], None]):
        self.core = core
        self.site = site
        self.purpose = hello["purpose"]
        self.sock: socket.socket | None = None  # guarded by _lock, as far as others close it
        self.state = "connecting"
        self.sent_bytes = 0
        self.wake = threading.Event()  # cuts the pause before the next attempt short
        self.gone = False  # set before the site may be added again, with links of its own
        self._hello = hello
        self._serve = serve
        self._lock = threading.Lock()

    def has_ended(self) -> bool:
        """Whether the node closes or the site was removed."""
        return self.core.closing.is_set() or self.gone

    def run(self) -> None:
        """Connects and serves until the node closes or the site is removed."""
        pause_s = 0.02
        while not self.has_ended():
            begun = time.monotonic()
            try:
                self.once()
            except (OSError, ReplicationError) as error:
                if self.state == "connected" and time.monotonic() - begun > 1:
                    pause_s = 0.02
                self.state = str(error)
                _logger.debug("%s to %s: %s", self.purpose, self.site, error)
            if self.has_ended():
                return
            if self.wake.wait(pause_s):
                self.wake.clear()
            pause_s = min(2 * pause_s, 2.0)

    def once(self) -> None:
        """Connects and serves until the connection ends.

        Raises:
            OSError: It failed.
            ReplicationError: The other side refused, or is not who or where it should be.
        """
        config = self.core.config
        if self.has_ended() or self.site not in config.sites:
            return
        try:
            sock, reply = handshake.connect(config, self.core.me, self.site, self._hello)
            with self._lock:
                self.sock = sock
            self.state = "connected"
            self._serve(self, reply)
        finally:
            with self._lock:
                if self.sock is not None:
                    self.sock.close()
                self.sock = None

    def kick(self) -> None:
        """Has the connection made anew."""
        with self._lock:
            if self.sock is not None:
                _hang_up(self.sock)
        self.wake.set()


def send_stream(origin: str) -> Callable[[Link, dict[str, Any]], None]:
    """What a data link does: sends the log of this stream from where the other side is, and what is added to it."""

    def serve(link: Link, reply: dict[str, Any]) -> None:
        core, sock = link.core, link.sock
        assert sock is not None
        log = core.logs[origin]
        with _cursor(core, log, origin, link.site, _place(reply.get("place"))) as cursor:
            sock.sendall(_PLACE.pack(*cursor.place))
            while not link.has_ended():
                region = cursor.region()
                if region is None:
                    log.wait_beyond(cursor.place, 1.0)
                    if link.sock is None:
                        return
                    _raise_if_gone(sock)
                    continue
                at, end = region
                while at < end:
                    count = _send(sock, cursor, at, min(_SEND_BYTES, end - at))
                    at += count
                    link.sent_bytes += count
                cursor.skip(at)

    return serve


@contextlib.contextmanager
def _cursor(core: Core, log: StreamLog, origin: str, site: str, place: Place) -> Iterator[Cursor]:
    tail, first = log.tail, log.first
    if place[:2] > tail[:2]:
        raise StoreError(f"{site} has more of {origin}'s messages (up to {place.seq}) than there are here ({tail.seq})")
    begin: tuple[int, int] = place[:2]
    if place == (0, 0, 0) and first[:2] != (0, 0):
        begin = (first.seq + (first.offset > 0), 0)
    with Cursor(log, begin) as cursor:
        if begin == place[:2] and cursor.place.checksum != place.checksum:
            core.trouble[f"{origin} at {site}"] = (
                f"{site} holds other messages than {core.me} under the same numbers, up to {place.seq}; remove the "
                "store of the one that is wrong"
            )
            raise StoreError(core.trouble[f"{origin} at {site}"])
        core.trouble.pop(f"{origin} at {site}", None)
        yield cursor


def _send(sock: socket.socket, cursor: Cursor, at: int, size: int) -> int:
    if cursor.fd < 0 or isinstance(sock, ssl.SSLSocket):
        assert cursor.map is not None
        with memoryview(cursor.map) as view:
            return sock.send(view[at : at + size])
    # What another mapping holds, or none, costs a page fault each; the kernel reads it from its cache, or the disk.
    count = os.sendfile(sock.fileno(), cursor.fd, at, size)
    if not count:
        raise StoreError("the log's file is shorter than it was")
    return count


def send_counters(link: Link, reply: dict[str, Any]) -> None:
    """What a control link does: sends all counters of this site, then what changes, and a sign of life in between."""
    core, sock = link.core, link.sock
    assert sock is not None
    names: dict[str, int] = {}

    def frame(kind: int, counters: dict[tuple[str, str], int]) -> bytes:
        before = len(names)
        items = b"".join(
            _ITEM.pack(names.setdefault(origin, len(names)), names.setdefault("." + ack, len(names)), seq)
            for (origin, ack), seq in counters.items()
        )
        data = b""
        if len(names) > before:
            listing = json.dumps(list(names)).encode()
            data = _FRAME.pack(len(listing), _NAMES) + listing
        return data + _FRAME.pack(len(items), kind) + items

    outbox = core.outboxes.get(link.site)
    if outbox is None or link.gone:  # in this order: what is there now may be for the links that come after this one
        return
    told = Marks(0, 0)
    outbox.take(0, told)
    sock.sendall(frame(_ALL, core.own()))
    while not link.has_ended():
        news, marks = outbox.take(core.config.dead_after_s / 4, told)
        _raise_if_gone(sock)
        data = frame(_NEWS, news)
        if marks != told:
            told = marks
            data += _FRAME.pack(_MARK.size, _MARKS) + _MARK.pack(*marks)
        sock.sendall(data)


class Incoming:
    """Who is connected to this site, one connection of each kind; a newer one takes the place of the older."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: dict[tuple[str, str, str], tuple[threading.Lock, list[socket.socket]]] = {}

    @contextlib.contextmanager
    def only(self, key: tuple[str, str, str], sock: socket.socket) -> Iterator[None]:
        """Hangs up the older connection of this kind, and begins once its thread has let go."""
        with self._lock:
            busy, socks = self._slots.setdefault(key, (threading.Lock(), []))
            for other in socks:
                _hang_up(other)
            socks.append(sock)
        try:
            if not busy.acquire(timeout=handshake.TIMEOUT_S):
                raise ReplicationError("an older connection of this kind does not end")
            try:
                yield
            finally:
                busy.release()
        finally:
            with self._lock:
                socks.remove(sock)

    def hang_up(self, site: str | None = None) -> None:
        """Ends those of a site, or all of them."""
        with self._lock:
            for (_, other, _), (_, socks) in self._slots.items():
                for sock in socks if site in (None, other) else ():
                    _hang_up(sock)


def receive_stream(core: Core, sock: socket.socket, site: str, origin: str) -> None:
    """Takes messages into the log of a stream until the connection ends.

    Raises:
        OSError: It ended by a failure.
        FrameError: What came is not what has to follow.
    """
    log = core.logs.get(origin)
    if log is None or origin not in (site, core.me):
        transport.refuse(sock, f"{site} does not send the messages of {origin!r} to {core.me}")
        return
    if not log.writing.acquire(timeout=handshake.TIMEOUT_S):
        transport.refuse(sock, f"{core.me} is writing the messages of {origin}")
        return
    try:
        log.begin_receiving()
        transport.reply(sock, {"place": log.tail})
        given = transport.receive_exactly(sock, _PLACE.size, time.monotonic() + handshake.TIMEOUT_S)
        begin = _place(list(_PLACE.unpack(given)))
        sock.settimeout(None)
        if begin != log.tail:
            log.begin_at(begin)
        before = log.tail.seq
        while not core.closing.is_set():
            if not _readable(sock, 1.0):  # before the log makes room: a stream that is silent takes none
                continue
            try:
                count = log.receive(sock.recv_into)
                core.trouble.pop(f"store of {origin}", None)
            except StoreFullError as error:
                # The sender waits, as it does for a slow link, until there is room again.
                core.trouble[f"store of {origin}"] = str(error)
                core.closing.wait(0.2)
                _raise_if_gone(sock)
                continue
            if not count:
                return
            if log.tail.seq > before:
                before = log.tail.seq
                core.raise_own(origin, RECEIVED, before)
                core.work.set()
    finally:
        log.writing.release()


def receive_counters(
    core: Core, sock: socket.socket, site: str, links: Callable[[str], list[Link]], give_back: Callable[[str], None]
) -> None:
    """Takes another site's counters until the connection ends.

    Args:
        core: The node's.
        sock: The connection.
        site: Who sends them.
        links: Gives the links to a site.
        give_back: Called when the site turns out to lack messages of its own that are here.

    Raises:
        OSError: It ended, or was silent for too long.
        FrameError: What came is no frame of counters.
    """
    transport.reply(sock, {})
    sock.settimeout(core.config.dead_after_s)
    names: list[str] = []
    for link in links(site):
        link.wake.set()  # it is there: no reason to wait before the next attempt
    try:
        while not core.closing.is_set():
            length, kind = _FRAME.unpack(transport.receive_exactly(sock, _FRAME.size))
            if length > _MAX_CONTROL_BYTES:
                raise FrameError(f"a control frame of {length} bytes")
            data = bytes(transport.receive_exactly(sock, length))
            if kind == _NAMES:
                names = _names(data)
            elif kind in (_ALL, _NEWS):
                core.hear(site, _counters(data, names), all_of_them=kind == _ALL)
                if kind == _ALL and _lacks_its_own(core, site):
                    give_back(site)
            elif kind == _MARKS and length == _MARK.size:
                question, answer = _MARK.unpack(data)
                outbox = core.outboxes.get(site)
                if outbox is not None:
                    outbox.answer(question)
                core.set_answered(site, answer)
            else:
                raise FrameError(f"a control frame of type {kind}")
    except TimeoutError:
        for link in links(site):
            link.kick()
        raise
    finally:
        core.set_heard(site, False)


def _lacks_its_own(core: Core, site: str) -> bool:
    with core.lock:
        if site not in core.logs:
            return False
        # Its counter may just have been overtaken by the message itself: then there is nothing to send.
        return core.logs[site].tail.seq > core.frontiers[site].counter(Counter(site, RECEIVED))


def send_back(link: Link, reply: dict[str, Any]) -> None:
    """Sends a site its own messages, as far as they are here."""
    core, sock, log = link.core, link.sock, link.core.logs.get(link.site)
    assert sock is not None
    if log is None:
        return
    place = _place(reply.get("place"))
    if log.tail.seq > place.seq:
        _logger.warning("%s lost its messages %d to %d; sending them back", link.site, place.seq + 1, log.tail.seq)
    with _cursor(core, log, link.site, link.site, place) as cursor:
        sock.sendall(_PLACE.pack(*cursor.place))
        while not link.has_ended() and (region := cursor.region()) is not None:
            at, end = region
            while at < end:
                at += _send(sock, cursor, at, min(_SEND_BYTES, end - at))
            cursor.skip(at)


def _place(given: object) -> Place:
    bounds = (1 << 63, 1 << 63, 1 << 32)
    if not isinstance(given, list) or len(given) != 3 or not all(type(n) is int for n in given):
        raise FrameError("expected a place in the stream: its number, offset and checksum")
    if not all(0 <= n < bound for n, bound in zip(given, bounds, strict=True)):
        raise FrameError(f"expected a place in the stream, got {given!r:.100}")
    return Place(*given)


def _names(data: bytes) -> list[str]:
    try:
        names = json.loads(data)
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FrameError("a control frame of names that holds something else")
    return names


def _counters(data: bytes, names: list[str]) -> dict[tuple[str, str], int]:
    if len(data) % _ITEM.size:
        raise FrameError("a control frame that ends within a counter")
    counters = {}
    for origin, ack, seq in _ITEM.iter_unpack(data):
        if max(origin, ack) >= len(names) or not names[ack].startswith("."):
            raise FrameError("a counter without a name")
        counters[names[origin], names[ack][1:]] = seq
    return counters


def _readable(sock: socket.socket, timeout_s: float) -> bool:
    if isinstance(sock, ssl.SSLSocket) and sock.pending():
        return True
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(1000 * timeout_s))


def _raise_if_gone(sock: socket.socket) -> None:
    """The other side sends nothing here, so something to read means that it hung up."""
    try:
        if isinstance(sock, ssl.SSLSocket):
            return  # shows when something is sent
        if sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b"":
            raise ConnectionResetError("the other side hung up")
    except BlockingIOError:
        pass


def _hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it may be gone already
        sock.shutdown(socket.SHUT_RDWR)
