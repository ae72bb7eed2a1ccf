"""How the members of an ordered group find each other: through shared memory on one host, else through sockets."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed.distributed_c10d import PrefixStore

from torchext._optional import require_native
from torchext.collectives.errors import CollectiveError, CollectiveTimeoutError
from torchext.collectives.world import _host

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from torchext._native import collectives as native

_FAILED = "failed"
_RING_BYTES = 16 << 10  # a record is a hundred bytes
_HELLO = struct.Struct("!8s16sii")  # magic, nonce, from whom, to whom
_MAGIC = b"txorder1"
_NONCE_BYTES, _PROOF_BYTES = 16, 32


def connect(store: Store, me: int, ranks: Sequence[int], timeout: timedelta, doorbell: int) -> native.OrderGroup:
    """Links this rank with the other members, each of which must call it with the same store.

    Blocks until all are there.

    If all share a host, the links are rings in shared memory without a name. Otherwise each two members have a TCP
    connection, at the address of the interface that the environment variable GLOO_SOCKET_IFNAME names, or by default
    the one by which the rank reaches the store. Whoever connects must prove that it knows a secret that goes through
    the store, and is proven the same. Messages tell who calls what, no data, and are neither encrypted nor signed.

    Args:
        store: For this group alone, with a prefix.
        me: Place in ``ranks``.
        ranks: The global ranks of the members.
        timeout: How long to wait for the others.
        doorbell: The pipe by which peers on this host wake this process.

    Raises:
        ImportError: The native core is missing.
        CollectiveTimeoutError: A rank did not come in time; the message says which.
        CollectiveError: A rank cannot take part.
    """
    if sys.platform != "linux":
        raise CollectiveError(
            f'the "dfccl" backend needs Linux (shared memory, futexes, pidfds); this is {sys.platform}'
        )
    require_native()
    meeting = Meeting(store, me, ranks, timeout)
    try:
        members = meeting.exchange("member", {"host": _host(), "pid": os.getpid(), "doorbell": doorbell})
        if all(member["host"] == members[0]["host"] for member in members):
            return _over_memory(meeting, members)
        return _over_sockets(meeting, _own_address(store))
    except CollectiveTimeoutError:
        raise  # those who come still wait for the same ranks, and will say so themselves
    except Exception as error:
        with contextlib.suppress(RuntimeError):  # the store may be what failed
            store.set(_FAILED, f"rank {ranks[me]}: {error}")  # or the others would wait until their timeout
        raise


def fresh(store: Store, name: str, place: int) -> Store:
    """A part of the store that no earlier group has left anything in, though it was made over the same store.

    Each member counts its groups there, so the members must make them equally often.
    """
    return PrefixStore(f"{name}/{store.add(f'{name}/{place}', 1)}", store)


class Meeting:
    """What the members tell each other through the store."""

    def __init__(self, store: Store, me: int, ranks: Sequence[int], timeout: timedelta) -> None:
        self.me = me
        self.ranks = list(ranks)
        self._store = store
        self._timeout = timeout
        self._end = time.monotonic() + timeout.total_seconds()

    def left_s(self) -> float:
        return max(0.001, self._end - time.monotonic())

    def exchange(self, name: str, value: Any) -> list[Any]:
        """Tells the value to all and returns those of all, by place."""
        keys = [f"{name}/{place}" for place in range(len(self.ranks))]
        self._store.set(keys[self.me], json.dumps(value))
        pause_s = 0.0002
        while not self._store.check(keys):  # not `wait`, which cannot be told of a failure, and logs each timeout
            if self._store.check([_FAILED]):
                reason = self._store.get(_FAILED).decode()
                raise CollectiveError(f'the "dfccl" process group cannot be made: {reason}')
            if time.monotonic() >= self._end:
                missing = [rank for rank, key in zip(self.ranks, keys, strict=True) if not self._store.check([key])]
                raise self.late(missing)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.02)
        return [json.loads(self._store.get(key)) for key in keys]

    def late(self, missing: Sequence[int]) -> CollectiveTimeoutError:
        return CollectiveTimeoutError(
            f'of the ranks {self.ranks} of the "dfccl" process group, {list(missing)} did not come within '
            f"{self._timeout.total_seconds():g} s; check that they run, can be reached and make the group as well",
            missing,
        )


def _over_memory(meeting: Meeting, members: Sequence[Any]) -> native.OrderGroup:
    from torchext._native import collectives as native

    arena = None
    place = None
    if meeting.me == 0:
        nonce = secrets.randbits(64)
        arena = native.Arena.create(len(meeting.ranks), _RING_BYTES, pool_bytes=0, chunk_bytes=0, nonce=nonce)
        place = {"pid": os.getpid(), "descriptor": arena.descriptor, "nonce": nonce}
    place = meeting.exchange("arena", place)[0]
    if arena is None:
        arena = native.Arena.attach(place["pid"], place["descriptor"], place["nonce"])
    doorbells = [-1] * len(members)
    try:
        for p, member in enumerate(members):
            if p != meeting.me:
                pipe = f"/proc/{member['pid']}/fd/{member['doorbell']}"
                doorbells[p] = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        meeting.exchange("mapped", True)
        pids = [0 if p == meeting.me else member["pid"] for p, member in enumerate(members)]
        group = native.OrderGroup.over_memory(meeting.ranks, meeting.me, arena, pids, doorbells, place["nonce"])
    except BaseException:
        for doorbell in doorbells:
            if doorbell >= 0:
                os.close(doorbell)
        raise
    arena.close_descriptor()  # all have mapped it: the memory goes with the last of them
    return group


# --- Sockets ----------------------------------------------------------------------------------------------------------


def _over_sockets(meeting: Meeting, own_address: str) -> native.OrderGroup:
    from torchext._native import collectives as native

    family = socket.AF_INET6 if ":" in own_address else socket.AF_INET
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((own_address, 0), family=family, backlog=128))
        address, port = listener.getsockname()[:2]
        told = {"address": address, "port": port, "secret": secrets.token_hex(32)}
        members = meeting.exchange("address", told)
        secret = bytes.fromhex(members[0]["secret"])
        connections: list[socket.socket | None] = [None] * len(members)
        for p in range(meeting.me):
            connections[p] = stack.enter_context(_reach(meeting, p, members[p], secret))
        while missing := [p for p in range(meeting.me + 1, len(members)) if connections[p] is None]:
            listener.settimeout(meeting.left_s())
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                raise meeting.late([meeting.ranks[p] for p in missing]) from None
            stack.enter_context(connection)
            p = _admit(connection, meeting.me, secret, min(5.0, meeting.left_s()))
            if p in missing:
                connections[p] = connection
            else:
                connection.close()  # a stranger, or a member's attempt that it has given up
        meeting.exchange("linked", True)
        sockets = [-1 if link is None else _configured(link).detach() for link in connections]
        uid = int.from_bytes(secret[:8], "little")
        return native.OrderGroup.over_sockets(meeting.ranks, meeting.me, sockets, uid)


def _configured(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A host that is cut off or without power says nothing: it counts as dead after some fifteen seconds.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 15_000)
    return connection


def _reach(meeting: Meeting, p: int, member: Any, secret: bytes) -> socket.socket:
    """Connects to a member and proves to be of the group; again until the time is up."""
    while True:
        connection = None
        try:
            connection = socket.create_connection((member["address"], member["port"]), meeting.left_s())
            nonce = secrets.token_bytes(_NONCE_BYTES)
            connection.sendall(_HELLO.pack(_MAGIC, nonce, meeting.me, p))
            answer = _read(connection, _NONCE_BYTES + _PROOF_BYTES)
            theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
            if not hmac.compare_digest(proof, _proof(secret, b"listener", nonce, theirs, meeting.me, p)):
                raise ConnectionError(f"whoever listens at {member['address']}:{member['port']} is not of the group")
            connection.sendall(_proof(secret, b"caller", nonce, theirs, meeting.me, p))
            return connection
        except OSError as error:
            if connection is not None:
                connection.close()
            if meeting.left_s() <= 0.001:
                raise CollectiveTimeoutError(
                    f"rank {meeting.ranks[p]} cannot be reached at {member['address']}:{member['port']}: {error}; set "
                    "GLOO_SOCKET_IFNAME to the interface by which the hosts reach each other",
                    [meeting.ranks[p]],
                ) from error
            time.sleep(min(0.05, meeting.left_s()))


def _admit(connection: socket.socket, me: int, secret: bytes, timeout_s: float) -> int:
    """The place of a member that has connected and proven to be of the group, or -1."""
    connection.settimeout(timeout_s)
    try:
        magic, nonce, caller, called = _HELLO.unpack(_read(connection, _HELLO.size))
        if magic != _MAGIC or called != me:
            return -1
        own = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(own + _proof(secret, b"listener", nonce, own, caller, me))
        proof = _read(connection, _PROOF_BYTES)
    except OSError:
        return -1
    return int(caller) if hmac.compare_digest(proof, _proof(secret, b"caller", nonce, own, caller, me)) else -1


def _proof(secret: bytes, role: bytes, callers: bytes, listeners: bytes, caller: int, listener: int) -> bytes:
    text = b"%s %s %s %d %d" % (role, callers, listeners, caller, listener)
    return hmac.new(secret, text, hashlib.sha256).digest()


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        more = connection.recv(num_bytes - len(data))
        if not more:
            raise ConnectionError("the other side has closed the connection")
        data += more
    return data


def _own_address(store: Any) -> str:
    """The address at which the other members reach this rank."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = struct.pack("256s", interface.encode()[:15])
            try:
                answer = fcntl.ioctl(probe, 0x8915, request)  # SIOCGIFADDR
            except OSError as error:
                raise CollectiveError(f"GLOO_SOCKET_IFNAME: {interface!r} has no IPv4 address: {error}") from error
            return socket.inet_ntoa(answer[20:24])
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", None) or socket.gethostname()
    family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # sends nothing
        return str(probe.getsockname()[0])
