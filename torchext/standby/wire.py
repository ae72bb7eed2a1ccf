"""Messages between a training process and its standby: a JSON object with bytes, over a stream socket."""

from __future__ import annotations

import json
import os
import socket
import struct
import zlib
from pathlib import Path
from typing import Any

from torchext import transport
from torchext.standby.errors import CorruptStateError, StandbyError
from torchext.transport import receive_exactly

_HEADER = struct.Struct("<4sIQI")  # magic, bytes of JSON, bytes of data, CRC-32 of both
_MAGIC = b"TXS3"  # changes with the protocol
_MAX_BYTES = 1 << 32
_PURPOSE = f"torchext standby, {_MAGIC.decode()}"
_DEAD_AFTER_S = 20.0  # a host that does not answer
_TOKEN_VARIABLE = "TORCHEXT_STANDBY_TOKEN"


def send(sock: socket.socket, words: dict[str, Any], data: bytes | memoryview = b"") -> None:
    """Sends one message; waits as long as the socket's timeout allows."""
    text = json.dumps(words, separators=(",", ":")).encode()
    header = _HEADER.pack(_MAGIC, len(text), len(data), zlib.crc32(data, zlib.crc32(text)))
    sock.sendall(header + text)
    if len(data):
        sock.sendall(data)


def receive(
    sock: socket.socket, max_bytes: int = _MAX_BYTES, *, deadline: float | None = None
) -> tuple[dict[str, Any], memoryview]:
    """Receives one message of at most so many bytes.

    Args:
        sock: The connection.
        max_bytes: A longer message is refused before it is read.
        deadline: By when, of `time.monotonic`, all of it has to be there; None: the socket's timeout holds for each
            packet.

    Raises:
        ConnectionError: The peer has closed the connection.
        TimeoutError: The deadline or the socket's timeout passed.
        CorruptStateError: Something else than a message of this protocol came.
    """
    magic, text_bytes, data_bytes, crc = _HEADER.unpack(receive_exactly(sock, _HEADER.size, deadline))
    if magic != _MAGIC or text_bytes + data_bytes > max_bytes:
        raise CorruptStateError(f"expected a message of the standby's protocol {_MAGIC!r}, got {bytes(magic)!r}")
    text = receive_exactly(sock, text_bytes, deadline)
    data = receive_exactly(sock, data_bytes, deadline)
    if zlib.crc32(data, zlib.crc32(text)) != crc:
        raise CorruptStateError("a message arrived with another checksum than it was sent with")
    try:
        words = json.loads(bytes(text))
    except (ValueError, RecursionError) as error:
        raise CorruptStateError(f"a message is not JSON: {error}") from error
    if not isinstance(words, dict):
        raise CorruptStateError(f"a message has to be a JSON object, got a {type(words).__name__}")
    return words, data


def _secret(sock: socket.socket) -> str:
    """What both ends of a connection have to know; within a host, the kernel says whose process the other one is."""
    if sock.family != socket.AF_UNIX:
        return transport.load_token(_TOKEN_VARIABLE, "standby-token")
    _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if user != os.geteuid():
        raise StandbyError(f"the process at the other end is user {user}'s, this one is user {os.geteuid()}'s")
    return LOCAL


def greet(sock: socket.socket, hello: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """The client's side of the start of a connection.

    Args:
        sock: The connection.
        hello: What it is for.
        timeout_s: For each part of it; afterwards that of the socket.

    Returns:
        The standby's welcome.

    Raises:
        StandbyError: The standby has another token, or refuses; the message says why.
    """
    try:
        transport.greet(sock, _secret(sock), _PURPOSE, hello, timeout_s)
    except transport.GreetingError as error:
        raise StandbyError(
            f"the standby and this program do not know each other: {error}; give both sides the same "
            f"{_TOKEN_VARIABLE} and version of torchext"
        ) from error
    welcome, _ = receive(sock)
    return raised(welcome)


def accept(sock: socket.socket, timeout_s: float) -> dict[str, Any]:
    """The standby's side: returns the hello of a client that knows the token.

    Args:
        sock: The connection.
        timeout_s: For all of it; afterwards that of the socket.

    Raises:
        StandbyError: It does not.
        TimeoutError: It did not say so in time.
    """
    try:
        hello = transport.accept(sock, _secret(sock), _PURPOSE, timeout_s)
    except transport.GreetingError as error:
        raise StandbyError(str(error)) from error
    transport.reply(sock, {})
    return hello


def raised(words: dict[str, Any]) -> dict[str, Any]:
    """Raises the error that a message carries, if it carries one; else returns the message."""
    if "error" not in words:
        return words
    from torchext.standby import errors

    kind = getattr(errors, words.get("kind", ""), StandbyError)
    raise kind(words["error"])


def failure(error: Exception) -> dict[str, Any]:
    """A message that makes `raised` raise this error, or a StandbyError that names it, on the other side."""
    name = type(error).__name__
    return {"error": str(error) if isinstance(error, StandbyError) else f"{name}: {error}", "kind": name}


def boot_id() -> str:
    """Tells this host, as booted, from all others."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


LOCAL = "local"


def check_address(address: str) -> None:
    """Raises ValueError for what is neither ``host:port`` nor "local", the standby of this user on this host."""
    if address != LOCAL:
        try:
            transport.parse_address(address)
        except ValueError as error:
            raise ValueError(f"expected the standby's address as host:port or {LOCAL!r}, got {address!r}") from error


def _local_name() -> str:
    return f"\0torchext-standby-{os.getuid()}"


def listen(address: str) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Raises:
        ValueError: It is no address of a standby.
        OSError: There is somebody already.
    """
    check_address(address)
    if address != LOCAL:
        return transport.listen(address)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(_local_name())
        sock.listen()
    except BaseException:
        sock.close()
        raise
    return sock


def connect(address: str, timeout_s: float) -> socket.socket:
    """Connects to a standby.

    Raises:
        ValueError: It is no address of a standby.
        OSError: Nobody answers at that address.
    """
    check_address(address)
    if address != LOCAL:
        return transport.connect(address, timeout_s, _DEAD_AFTER_S)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(_local_name())
    except BaseException:
        sock.close()
        raise
    return sock


def tune(sock: socket.socket) -> None:
    """Makes a connection that was accepted quick, and notice that the host at the other end is gone."""
    if sock.family != socket.AF_UNIX:
        transport.tune(sock, _DEAD_AFTER_S)
