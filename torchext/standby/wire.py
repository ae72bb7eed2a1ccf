"""Messages between a training process and its standby: a JSON object with bytes, over a stream socket."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import time
import zlib
from pathlib import Path
from typing import Any

from torchext.standby.errors import CorruptStateError, StandbyError
from torchext.transport import receive_exactly

_HEADER = struct.Struct("<4sIQI")  # magic, bytes of JSON, bytes of data, CRC-32 of both
_MAGIC = b"TXS2"  # changes with the protocol
_MAX_BYTES = 1 << 32
_MAX_GREETING_BYTES = 1 << 16  # from somebody who has not shown that he knows the token
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


def token() -> str:
    """The secret that both sides share: from TORCHEXT_STANDBY_TOKEN, else from a file of this user, made if need be.

    The file is ``standby-token`` in ``$XDG_CONFIG_HOME/torchext`` or ``~/.config/torchext``.
    """
    given = os.environ.get(_TOKEN_VARIABLE)
    if given:
        return given
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "torchext"
    path = folder / "standby-token"
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f".standby-token-{os.getpid()}-{secrets.token_hex(4)}"
    if not path.exists():
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
        try:
            os.link(new, path)  # the first one wins
        except FileExistsError:
            pass
        finally:
            new.unlink()
    return path.read_text().strip()


def _secret(sock: socket.socket) -> str:
    """What both ends of a connection have to know; within a host, the kernel says whose process the other one is."""
    if sock.family != socket.AF_UNIX:
        return token()
    _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if user != os.geteuid():
        raise StandbyError(f"the process at the other end is user {user}'s, this one is user {os.geteuid()}'s")
    return LOCAL


def prove(secret: str, nonce: str, role: str) -> str:
    """What only a holder of the secret can answer to ``nonce``."""
    return hmac.new(secret.encode(), f"{role}:{nonce}".encode(), hashlib.sha256).hexdigest()


def proved(secret: str, nonce: str, role: str, answer: object) -> bool:
    """Whether ``answer``, whatever a stranger has sent, is that of a holder of the secret."""
    if not isinstance(answer, str) or not answer.isascii():  # compare_digest takes no other
        return False
    return hmac.compare_digest(prove(secret, nonce, role), answer)


def greet(sock: socket.socket, hello: dict[str, Any]) -> dict[str, Any]:
    """The client's side of the start of a connection.

    Returns:
        The standby's welcome.

    Raises:
        StandbyError: The standby has another token, or refuses; the message says why.
    """
    nonce = secrets.token_hex(16)
    send(sock, {"nonce": nonce})
    challenge, _ = receive(sock, _MAX_GREETING_BYTES)
    secret = _secret(sock)
    if not proved(secret, nonce, "standby", challenge["proof"]):
        raise StandbyError(f"the standby has another token; give both sides the same {_TOKEN_VARIABLE}")
    send(sock, {**hello, "proof": prove(secret, challenge["nonce"], "client")})
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
    deadline = time.monotonic() + timeout_s
    greeting, _ = receive(sock, _MAX_GREETING_BYTES, deadline=deadline)
    nonce = secrets.token_hex(16)
    secret = _secret(sock)
    send(sock, {"nonce": nonce, "proof": prove(secret, greeting["nonce"], "standby")})
    hello, _ = receive(sock, _MAX_GREETING_BYTES, deadline=deadline)
    if not proved(secret, nonce, "client", hello["proof"]):
        raise StandbyError(f"the client has another token; give both sides the same {_TOKEN_VARIABLE}")
    sock.settimeout(timeout_s)
    return hello


def raised(words: dict[str, Any]) -> dict[str, Any]:
    """Raises the error that a message carries, if it carries one; else returns the message."""
    if "error" not in words:
        return words
    from torchext.standby import errors

    kind = getattr(errors, words.get("kind", ""), StandbyError)
    raise kind(words["error"])


def failure(error: Exception) -> dict[str, Any]:
    """A message that makes `raised` raise this error on the other side."""
    return {"error": str(error) or type(error).__name__, "kind": type(error).__name__}


def boot_id() -> str:
    """Tells this host, as booted, from all others."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


LOCAL = "local"


def parse_address(address: str) -> tuple[int, Any]:
    """Family and address of a socket.

    Args:
        address: ``host:port``, or "local" for the standby of this user on this host.

    Raises:
        ValueError: It is neither.
    """
    if address == LOCAL:
        return socket.AF_UNIX, f"\0torchext-standby-{os.getuid()}"
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"expected the standby's address as host:port or {LOCAL!r}, got {address!r}")
    host = host.strip("[]")
    return (socket.AF_INET6 if ":" in host else socket.AF_INET), (host, int(port))


def tune(sock: socket.socket) -> None:
    """Makes a TCP connection quick, and notice within about 20 s that the host at the other end is gone."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, 10),  # s
        (socket.TCP_KEEPINTVL, 3),  # s
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, 20_000),  # ms
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def connect(address: str, timeout_s: float) -> socket.socket:
    """Connects to a standby.

    Raises:
        OSError: Nobody answers at that address.
    """
    family, target = parse_address(address)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(target)
        tune(sock)
    except BaseException:
        sock.close()
        raise
    return sock
