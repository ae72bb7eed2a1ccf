"""TCP sockets: where they lead, that they are quick, notice a lost host, and give whole pieces of bytes."""

from __future__ import annotations

import errno
import itertools
import socket
import time
from collections.abc import Sequence

_MAX_PIECES = 64  # of one sendmsg; the system takes 1024


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port``; an IPv6 host stands in brackets.

    Raises:
        ValueError: It is something else.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError(f"expected an address as host:port, such as learner:7000 or [::1]:7000, got {address!r}")
    if host.startswith("[") != host.endswith("]") or (":" in host and not host.startswith("[")):
        raise ValueError(f"expected an IPv6 host in brackets, such as [::1]:7000, got {address!r}")
    return host.strip("[]"), int(port)


def listen(address: str) -> socket.socket:
    """A listening socket at ``host:port``; port 0 takes a free one, which `socket.getsockname` tells.

    Raises:
        ValueError: It is no address.
        OSError: The host is unknown, or the port is taken; the message names the address.
    """
    host, port = parse_address(address)
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(family, kind)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
            sock.listen()
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        raise type(error)(error.errno, f"cannot listen at {address}: {error.strerror}") from error
    return sock


def connect(address: str, timeout_s: float, dead_after_s: float, *, patient: bool = False) -> socket.socket:
    """Connects to ``host:port`` and tunes the socket.

    Args:
        address: Where to.
        timeout_s: For connecting, and afterwards of the socket.
        dead_after_s: See `tune`.
        patient: See `tune`.

    Raises:
        ValueError: It is no address.
        OSError: Nobody answers there.
    """
    sock = socket.create_connection(parse_address(address), timeout=timeout_s)
    try:
        if sock.getsockname() == sock.getpeername():
            # Linux may choose the port that is called as that of the caller, where nobody listens.
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"nobody listens at {address}")
        tune(sock, dead_after_s, patient=patient)
    except BaseException:
        sock.close()
        raise
    return sock


def tune(sock: socket.socket, dead_after_s: float, *, patient: bool = False) -> None:
    """Makes a TCP connection send at once, and fail about so many seconds after the host at the other end is gone.

    Args:
        sock: A connection.
        dead_after_s: For how long the other end may be silent.
        patient: The other end may live and yet take nothing for longer than that, which the system cannot tell from
            its death: only a connection on which nothing is under way is probed then, and the caller sees to the rest.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds = max(1, round(dead_after_s))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, seconds // 3))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    if not patient:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * dead_after_s))


def receive_into(sock: socket.socket, memory: memoryview, deadline: float | None = None) -> None:
    """Fills ``memory``, of bytes.

    Args:
        sock: A connection.
        memory: What to fill.
        deadline: By when, of `time.monotonic`, all of it has to be there; None: the socket's timeout holds for each
            packet.

    Raises:
        ConnectionError: The peer has closed the connection.
        TimeoutError: The deadline or the socket's timeout passed.
    """
    at = 0
    while at < len(memory):
        if deadline is not None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("the deadline has passed")
            sock.settimeout(left_s)
        count = sock.recv_into(memory[at:])
        if count == 0:
            raise ConnectionResetError("the peer closed the connection")
        at += count


def receive_exactly(sock: socket.socket, size: int, deadline: float | None = None) -> memoryview:
    """Receives so many bytes; as `receive_into`."""
    memory = memoryview(bytearray(size))
    receive_into(sock, memory, deadline)
    return memory


def send_all(sock: socket.socket, pieces: Sequence[bytes | memoryview]) -> None:
    """Sends pieces of bytes one after the other, without putting them together first.

    Raises:
        OSError: The connection has ended, or took nothing for the socket's timeout.
    """
    left = [memoryview(piece) for piece in pieces if len(piece)]
    while left:
        sent = sock.sendmsg(left[:_MAX_PIECES])
        ends = list(itertools.accumulate(len(piece) for piece in left))
        gone = sum(end <= sent for end in ends)
        into = sent - (ends[gone - 1] if gone else 0)
        left = left[gone:]
        if left and into:
            left[0] = left[0][into:]
