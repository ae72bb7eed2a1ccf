"""How two ends of a connection make sure of each other before anything else is read: each proves that it has the token.

Each answers the other's challenge by HMAC-SHA256 over both nonces, the words of greeting and the purpose, with the two
sides told apart, so that no answer serves for anything else. What comes before is JSON, bounded in size and time.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

from torchext.transport.tcp import receive_exactly

_LENGTH = struct.Struct("<I")
_MAX_BYTES = 1 << 14  # of a message from somebody who has proved nothing yet
_MAX_REPLY_BYTES = 1 << 26


class GreetingError(ConnectionError):
    """The other end is not who it should be, or refused us; trying again will not help."""


def greet(
    sock: socket.socket, token: str, purpose: str, greeting: Mapping[str, Any], timeout_s: float
) -> dict[str, Any]:
    """The side that connected. Returns the other side's reply, once both have proved that they have the token.

    Args:
        sock: A connection.
        token: The secret that both share.
        purpose: What the connection is for, and the version of its protocol; both have to name the same.
        greeting: What else to say, as JSON.
        timeout_s: For all of it; afterwards that of the socket.

    Raises:
        GreetingError: They have another token or purpose, or refuse; the message says why.
        OSError: They went, or were silent for too long.
    """
    deadline = time.monotonic() + timeout_s
    hello = {"purpose": purpose, "nonce": secrets.token_hex(16), "words": dict(greeting)}
    _send(sock, hello)
    challenge = _answer(_receive(sock, deadline))
    transcript = _transcript(hello, challenge.get("nonce"))
    if not _same(challenge.get("proof"), _proof(token, "server", transcript)):
        raise GreetingError("the other end has another token than this one")
    _send(sock, {"proof": _proof(token, "client", transcript)})
    words = _answer(_receive(sock, deadline, _MAX_REPLY_BYTES)).get("words")
    if not isinstance(words, dict):
        raise GreetingError("what came is no greeting: a reply without words")
    sock.settimeout(timeout_s)
    return words


def accept(sock: socket.socket, token: str, purpose: str, timeout_s: float) -> dict[str, Any]:
    """The side that was connected to. Returns the words of who connected, once both have proved themselves.

    The caller goes on with `reply` or `refuse`. Arguments and errors are those of `greet`.
    """
    deadline = time.monotonic() + timeout_s
    sock.settimeout(timeout_s)
    hello = _receive(sock, deadline)
    if hello.get("purpose") != purpose:
        refuse(sock, f"this is for {purpose}, not for {hello.get('purpose')!r}")
        raise GreetingError(f"somebody came for {hello.get('purpose')!r}")
    nonce = secrets.token_hex(16)
    transcript = _transcript(hello, nonce)
    _send(sock, {"nonce": nonce, "proof": _proof(token, "server", transcript)})
    answer = _receive(sock, deadline)
    if not _same(answer.get("proof"), _proof(token, "client", transcript)):
        refuse(sock, "the tokens differ")
        raise GreetingError("somebody came with another token")
    sock.settimeout(timeout_s)
    words = hello.get("words")
    if not isinstance(words, dict):
        raise GreetingError("a greeting without words")
    return words


def reply(sock: socket.socket, words: Mapping[str, Any]) -> None:
    """Ends the greeting; `greet` returns these words."""
    _send(sock, {"words": dict(words)})


def refuse(sock: socket.socket, reason: str) -> None:
    """Ends the greeting; `greet` raises a `GreetingError` that gives the reason."""
    _send(sock, {"error": reason})


def _send(sock: socket.socket, content: Mapping[str, Any]) -> None:
    data = json.dumps(content).encode()
    sock.sendall(_LENGTH.pack(len(data)) + data)


def _receive(sock: socket.socket, deadline: float, max_bytes: int = _MAX_BYTES) -> dict[str, Any]:
    (length,) = _LENGTH.unpack(receive_exactly(sock, _LENGTH.size, deadline))
    if length > max_bytes:
        raise GreetingError(f"what came is no greeting: {length} bytes long")
    try:
        content = json.loads(bytes(receive_exactly(sock, length, deadline)))
    except (ValueError, RecursionError):
        raise GreetingError("what came is no greeting: not JSON") from None
    if not isinstance(content, dict):
        raise GreetingError("what came is no greeting: no object")
    return content


def _answer(content: dict[str, Any]) -> dict[str, Any]:
    if "error" in content:
        raise GreetingError(f"refused: {str(content['error'])[:1000]}")
    return content


def _transcript(hello: Mapping[str, Any], nonce: object) -> str:
    if not isinstance(nonce, str):
        raise GreetingError("what came is no greeting: no nonce")
    try:
        return json.dumps([hello, nonce], sort_keys=True)
    except RecursionError:  # which reading it did not meet
        raise GreetingError("what came is no greeting: nested too deep") from None


def _proof(token: str, side: str, transcript: str) -> str:
    return hmac.new(token.encode(), f"torchext {side} {transcript}".encode(), hashlib.sha256).hexdigest()


def _same(given: object, right: str) -> bool:
    return isinstance(given, str) and given.isascii() and hmac.compare_digest(given, right)
