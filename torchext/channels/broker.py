"""The learner's side of channels across machines: what brokers of other machines bring is put into channels here."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing import util
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torchext import transport
from torchext.channels import sharing, wire
from torchext.channels.channel import _CARRIER, _POLICIES, _SENDER, Channel
from torchext.channels.weights import _READER, WeightBroadcast
from torchext.channels.wire import BEAT_S, PATIENCE_S, SILENT_S, Frame, FrameError, Kind

if TYPE_CHECKING:
    from torchext._native import channels as native

_log = logging.getLogger(__name__)
_OK, _DROPPED, _TIMEOUT, _CLOSED, _FULL, _INTERRUPTED, _PEER_DIED, _FORKED = range(8)
# What accept() may say while there are too few descriptors, too little memory, or of a caller that has gone.
_PASSING = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED, errno.EAGAIN, errno.EPERM}
    | {errno.EPROTO, errno.ENOPROTOOPT, errno.EOPNOTSUPP, errno.ENETDOWN, errno.EHOSTDOWN, errno.ENONET}
    | {errno.EHOSTUNREACH, errno.ENETUNREACH}
)
_MAX_CONNECTIONS = 1024


class Broker:
    """Lets explorers on other machines send into channels of this one, and follow weights of this one.

    It listens in threads of this process; on the other machines, `join` gives channels and weights that processes there
    use as if all were one machine. Under the policy "block" each message arrives once and in its sender's order,
    however often the connection is lost and found again. Senders of other machines are listed in `Channel.stats`, and
    their death raises `PeerDied` as that of senders here does.

        channel, weights = Channel(), WeightBroadcast(model)
        with Broker("0.0.0.0:7000", {"rollouts": channel, "policy": weights}):
            for batch in ChannelLoader(channel, batch_size=8, weights=weights):
                ...

    Args:
        address: Where to listen, as ``host:port``; port 0 takes a free one.
        parts: The channels and weights to serve, by the names they are joined under.
        token: The secret that both sides share, and by which they prove themselves; by default the environment variable
            TORCHEXT_CHANNELS_TOKEN, else ``~/.config/torchext/channels-token``, which is made if need be. What is sent
            is not encrypted, and may hold pickles: whoever has the token can run code here.
        grace_s: How long a connection may be away before the senders behind it are told to be dead. They are there
            again once it is back.

    Raises:
        ImportError: The native core is missing.
        ValueError: That is no address; or the token is empty.
        OSError: It is taken, or not of this machine.
    """

    def __init__(
        self,
        address: str,
        parts: Mapping[str, Channel | WeightBroadcast],
        *,
        token: str | None = None,
        grace_s: float = 1.0,
    ) -> None:
        sharing.require_core()
        if not parts:
            raise ValueError("parts must name at least one channel or WeightBroadcast to serve, got none")
        for name, part in parts.items():
            if not isinstance(part, (Channel, WeightBroadcast)):
                raise TypeError(f"parts[{name!r}] must be a Channel or WeightBroadcast, got {type(part).__name__}")
        self._parts = dict(parts)
        self._token = wire.token_or_own(token)
        self._grace_s = grace_s
        self._nonce = sharing.new_nonce()  # so that who comes back knows whether this is who they left
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._sessions: dict[str, _Session] = {}  # guarded by _lock, as are the next two
        self._connections: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._listener = transport.listen(address)
        host, port = self._listener.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        util.register_after_fork(self, Broker._forget)
        self._accepting = threading.Thread(target=self._accept, name=f"broker-{port}", daemon=True)
        self._accepting.start()
        self._closer = util.Finalize(self, _close, args=(self._shut, os.getpid()), exitpriority=30)

    def close(self) -> None:
        """Stops serving; the other machines are told that nobody receives any more. The channels stay. Idempotent."""
        self._closer()

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def _shut(self) -> Callable[[], None]:
        """What ends it; holds no reference to the broker itself, which may be collected before."""
        closing, listener, accepting = self._closing, self._listener, self._accepting
        lock, threads, sessions, connections = self._lock, self._threads, self._sessions, self._connections

        def shut() -> None:
            closing.set()
            accepting.join()
            listener.close()
            with lock:
                left = list(threads)
            deadline = time.monotonic() + 4 * BEAT_S  # for a last word
            for thread in left:
                thread.join(max(0.0, deadline - time.monotonic()))
            with lock:
                for sock in connections:
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)
            for thread in left:
                thread.join()
            for session in sessions.values():
                session.end()

        return shut

    def _forget(self) -> None:
        """In a forked process: the connections are the parent's, and must end with it."""
        self._listener.close()
        for sock in list(self._connections):
            sock.close()

    # --- Connections --------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        self._listener.settimeout(BEAT_S / 2)
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                sock = None
            except OSError as error:
                if error.errno not in _PASSING:
                    _log.exception("the broker at %s takes no more connections", self.address)
                    return
                sock = None
                self._closing.wait(0.05)
            self._look_after()
            if sock is None:
                continue
            with self._lock:
                if len(self._connections) >= _MAX_CONNECTIONS:
                    sock.close()
                    continue
                self._connections.add(sock)
                thread = threading.Thread(target=self._serve, args=(sock,), name="broker-connection", daemon=True)
                self._threads.add(thread)
            try:
                thread.start()
            except RuntimeError as error:  # there are too many; the other side comes again
                _log.warning("the broker at %s could not take a connection: %s", self.address, error)
                with self._lock:
                    self._connections.discard(sock)
                    self._threads.discard(thread)
                sock.close()

    def _look_after(self) -> None:
        """Tells of senders whose connection is away, and gives up those that do not come back."""
        with self._lock:
            away = [(key, session, session.away_s()) for key, session in self._sessions.items()]
            for key, _, seconds in away:
                if seconds > PATIENCE_S:
                    del self._sessions[key]
        for _, session, seconds in away:
            if seconds > PATIENCE_S:
                session.end()
            elif seconds > self._grace_s:
                session.report_lost()

    def _serve(self, sock: socket.socket) -> None:
        peer = "somebody"
        try:
            peer = "{}:{}".format(*sock.getpeername()[:2])
            transport.tune(sock, SILENT_S)
            words = transport.accept(sock, self._token, wire.PURPOSE, SILENT_S)
            name, session = str(words.get("part")), str(words.get("session"))
            part = self._parts.get(name)
            if part is None:
                transport.refuse(sock, f"there is no {name!r} here; there are: {', '.join(self._parts)}")
            elif words.get("kind") != _kind_of(part):
                transport.refuse(sock, f"{name!r} is a {_kind_of(part)}, not a {words.get('kind')}")
            elif isinstance(part, Channel):
                self._serve_channel(sock, part, name, session, peer, words)
            else:
                self._serve_weights(sock, part, words)
        except (FrameError, RuntimeError) as error:  # also of the native core: no such message, too many peers
            _log.warning("the connection from %s is given up: %s", peer, error)
        except (OSError, ValueError) as error:  # who went, who is no broker, or has another token
            _log.info("the connection from %s ended: %s", peer, error)
        finally:
            sock.close()
            with self._lock:
                self._connections.discard(sock)
                self._threads.discard(threading.current_thread())

    def _serve_channel(
        self, sock: socket.socket, channel: Channel, name: str, key: str, peer: str, words: dict[str, Any]
    ) -> None:
        queue = channel._own_queue()
        with self._lock:
            session = self._sessions.get(key)
            if session is None:
                if words.get("resumes"):
                    transport.refuse(sock, "this connection was away for too long, and was given up")
                    return
                try:
                    session = self._sessions[key] = _Session(queue, peer, self._closing)
                except RuntimeError as error:  # as many as can be are there already
                    transport.refuse(sock, str(error))
                    return
        turn = session.take_over(sock)
        try:
            info = {"slots": queue.slots, "policy": _POLICIES[queue.policy]}
            transport.reply(
                sock, {**info, "done": session.done, "pid": os.getpid(), "nonce": self._nonce, "lz4": wire.has_lz4()}
            )
            if session.carry(sock, turn):
                with self._lock:
                    self._sessions.pop(key, None)
                session.end()
        finally:
            session.leave(turn)

    def _serve_weights(self, sock: socket.socket, weights: WeightBroadcast, words: dict[str, Any]) -> None:
        from torchext._native import channels as native

        latest = weights._own()
        reader = native.Reader(latest, "broker", _READER)
        try:
            reply = {"slab_bytes": len(latest.view(0)), "layout": latest.meta.hex(), "version": latest.version}
            transport.reply(sock, {**reply, "pid": os.getpid(), "nonce": self._nonce})
            seen = int(words.get("seen", 0))
            compression = wire.Compression(available=bool(words.get("lz4")) and wire.has_lz4())
            while not self._closing.is_set():
                status = reader.wait(seen, BEAT_S)
                if status == _OK:
                    seen = _send_weights(sock, latest, reader, compression)
                elif status == _PEER_DIED:
                    for _, pid, _, exit_status in reader.deaths():
                        wire.send_words(sock, Kind.PUBLISHER_DIED, {"pid": pid, "status": exit_status})
                elif status == _TIMEOUT:
                    wire.send(sock, Kind.BEAT)
                else:
                    break
            wire.send_words(sock, Kind.CLOSED, {"reason": "the weights were closed by the process that made them"})
        finally:
            reader.leave()


def _kind_of(part: Channel | WeightBroadcast) -> str:
    return "channel" if isinstance(part, Channel) else "WeightBroadcast"


def _send_weights(
    sock: socket.socket, latest: native.Latest, reader: native.Reader, compression: wire.Compression
) -> int:
    """Sends the latest version; publishing goes on meanwhile."""
    version, slab = reader.pin()
    try:
        raw = latest.view(slab).data
        content = compression.compress(raw)
        start = time.perf_counter()
        wire.send(sock, Kind.WEIGHTS, content, version=version, raw_bytes=len(raw))
        compression.note_sent(len(content), time.perf_counter() - start)
    finally:
        reader.unpin()
    return version


def _close(shut: Callable[[], None], pid: int) -> None:
    if os.getpid() == pid:  # not a fork's copy
        shut()


class _Superseded(ConnectionError):
    """The other machine has connected again; this connection is the old one."""


class _Session:
    """What the broker of one other machine brings to one channel, over one connection after the other."""

    def __init__(self, queue: native.Queue, host: str, closing: threading.Event) -> None:
        from torchext._native import channels as native

        self.done = 0  # the last number that was done; written by whoever holds _work
        self._queue = queue
        self._host = host
        self._closing = closing
        self._carrier = native.Endpoint(queue, f"broker of {host}", _CARRIER, False)
        self._lock = threading.Lock()  # guards the next four
        self._senders: dict[int, _RemoteSender] = {}
        self._turn = 0  # how many connections there were; the latest counts
        self._sock: socket.socket | None = None
        self._away_since: float | None = None
        self._work = threading.Lock()  # held by the one connection that changes the channel

    def take_over(self, sock: socket.socket) -> int:
        """Makes this connection the one that counts, once what the one before had in hand is done or dropped."""
        with self._lock:
            self._turn += 1
            turn, before = self._turn, self._sock
            self._sock, self._away_since = sock, None
            if before is not None:
                with contextlib.suppress(OSError):
                    before.shutdown(socket.SHUT_RDWR)
        with self._work:  # and so its last message is in `done` or will be sent again
            pass
        with self._lock:
            for sender in self._senders.values():
                sender.join(self._queue)
        return turn

    def leave(self, turn: int) -> None:
        """The connection has ended."""
        with self._lock:
            if self._turn == turn:
                self._sock, self._away_since = None, time.monotonic()

    def away_s(self) -> float:
        """For how long there has been no connection."""
        with self._lock:
            return 0.0 if self._away_since is None else time.monotonic() - self._away_since

    def report_lost(self) -> None:
        """The senders are out of reach."""
        with self._lock:
            for sender in self._senders.values() if self._away_since is not None else ():
                sender.died(-1)

    def end(self) -> None:
        """The session is over: senders that have not left are lost."""
        with self._lock:
            for sender in self._senders.values():
                sender.died(-1)
            self._senders.clear()
        self._carrier.leave()

    def carry(self, sock: socket.socket, turn: int) -> bool:
        """Puts what comes into the channel; True: nothing more will come, False: the channel or broker has ended."""
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        sock.settimeout(SILENT_S)
        told, heard, every = -1, time.monotonic(), max(1, self._queue.slots // 4)
        while True:
            if self._closing.is_set() or self._queue.deserted:
                reason = "the learner's broker was closed" if self._closing.is_set() else "nobody receives any more"
                wire.send_words(sock, Kind.CLOSED, {"reason": reason})
                return False
            ready = poll.poll(0 if told != self.done else 1000 * BEAT_S)
            if not ready or self.done - told >= every:
                told = self.done
                wire.send(sock, Kind.BEAT, seq=told)
            if not ready:
                if time.monotonic() - heard > SILENT_S:
                    raise TimeoutError(f"nothing was heard for {SILENT_S:g} s")
                continue
            frame = wire.receive(sock)
            if not self._take(sock, frame, turn):
                continue
            heard = time.monotonic()
            if frame.kind == Kind.BYE:
                wire.send(sock, Kind.BEAT, seq=self.done)
                return True

    def _take(self, sock: socket.socket, frame: Frame, turn: int) -> bool:
        """Does what a frame says; False if the channel took it no more."""
        if frame.kind == Kind.BEAT:
            return True
        with self._work:
            if self._turn != turn:  # what it holds is sent again over the new one
                raise _Superseded("the other machine has connected again")
            if frame.seq != self.done + 1:
                raise FrameError(f"number {frame.seq} came after {self.done}")
            if frame.kind == Kind.MESSAGE:
                if not self._put(sock, frame, turn):
                    return False
            else:
                self._note(frame.kind, wire.receive_words(sock, frame))
            self.done = frame.seq
        return True

    def _note(self, kind: Kind, words: dict[str, Any]) -> None:
        """Something has become of a sender."""
        with self._lock:
            if kind == Kind.JOINED:
                name = f"{words['name']}@{self._host.rpartition(':')[0]}"
                sender = self._senders[words["sender"]] = _RemoteSender(name, words["pid"])
                sender.join(self._queue)
            elif kind in (Kind.LEFT, Kind.DIED):
                gone = self._senders.pop(words["sender"], None)
                if gone is not None and kind == Kind.LEFT:
                    gone.left()
                elif gone is not None:
                    gone.died(words["status"])
            elif kind != Kind.BYE:
                raise FrameError(f"a {kind.name} from the side that sends messages")

    def _put(self, sock: socket.socket, frame: Frame, turn: int) -> bool:
        """Receives a message, straight into the shared memory where it can be, and waits until the channel takes it."""
        from torchext._native import channels as native

        if frame.raw_bytes > self._queue.largest_bytes:
            raise FrameError(f"a message of {frame.raw_bytes} bytes, of {self._queue.largest_bytes} at most")
        if frame.compressed or self._queue.batch_rows > 1:
            memory = memoryview(bytearray(frame.wire_bytes))
            wire.receive_content(sock, frame, memory)
            content = wire.decompressed(memory, frame.raw_bytes) if frame.compressed else memory
            return self._wait(
                sock,
                turn,
                lambda s: self._carrier.send_bytes(content, frame.header_bytes, frame.version, s),
            )
        slab: Any = None
        reservation: Any = None

        def reserve(timeout_s: float) -> int:
            nonlocal slab, reservation
            status, slab, reservation = self._carrier.reserve_bytes(
                frame.raw_bytes, frame.header_bytes, frame.version, timeout_s
            )
            return status

        if not self._wait(sock, turn, reserve):
            return False
        try:
            wire.receive_content(sock, frame, slab.data)
            slab = None
            return self._wait(sock, turn, lambda s: self._carrier.commit(reservation, s, True))
        except BaseException:
            native.abandon(reservation)
            raise

    def _wait(self, sock: socket.socket, turn: int, attempt: Callable[[float], int]) -> bool:
        """Tries until there is room, and says meanwhile that this side lives; False if nobody receives any more."""
        while True:
            status = attempt(BEAT_S)
            if status in (_OK, _DROPPED):
                return True
            if status != _TIMEOUT or self._closing.is_set():
                return False
            if self._turn != turn:
                raise _Superseded("the other machine has connected again")
            wire.send(sock, Kind.BEAT, seq=self.done)


class _RemoteSender:
    """A sender on another machine, listed in the channel here."""

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self.pid = pid
        self._endpoint: native.Endpoint | None = None

    def join(self, queue: native.Queue) -> None:
        from torchext._native import channels as native

        if self._endpoint is None:
            self._endpoint = native.Endpoint(queue, self.name, _SENDER, False)

    def left(self) -> None:
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.leave()

    def died(self, status: int) -> None:
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.died(self.pid, status)
