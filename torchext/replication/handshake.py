"""How two sites make sure of each other, before anything else is read or written.

Each side proves that it has the shared key by answering the other's challenge: HMAC-SHA256 over both nonces, both names
and the purpose, the server's and the client's marked apart. With TLS, the certificates prove it, and the names in them
are those of the sites.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import ssl
import struct
import time
from collections.abc import Mapping
from typing import Any

from torchext.replication.config import Config, Tls, parse_address
from torchext.replication.errors import ReplicationError

_LENGTH = struct.Struct("<I")
_MAX_BYTES = 16384  # of a message of the handshake
_MAX_REPLY_BYTES = 16 << 20  # of what a site tells one that it knows
_LOW_DELAY, _BULK = 0x10, 0x08  # types of service of RFC 1349
TIMEOUT_S = 5.0  # for a handshake


class HandshakeError(ReplicationError):
    """The other side is not who it should be, or refused."""


def connect(config: Config, me: str, site: str, hello: Mapping[str, Any]) -> tuple[socket.socket, dict[str, Any]]:
    """Connects to a site; returns the connection and the site's answer to ``hello``.

    Raises:
        OSError: It cannot be reached, or was silent for too long.
        HandshakeError: It could not prove who it is, or refused us.
    """
    sock = socket.create_connection(parse_address(config.sites[site].address), timeout=TIMEOUT_S)
    try:
        deadline = time.monotonic() + TIMEOUT_S
        if config.tls is not None:
            context = _context(ssl.PROTOCOL_TLS_CLIENT, config.tls)
            sock = context.wrap_socket(sock)
            _check_name(sock, site)
        nonce = secrets.token_hex(16)
        words = {**hello, "site": me, "to": site, "nonce": nonce}
        send_json(sock, words)
        answer = receive_json(sock, deadline)
        _check(answer)
        transcript = _transcript(words, answer.get("nonce"))
        if config.key and not _same(answer.get("proof"), _proof(config.key, "server", transcript)):
            raise HandshakeError(f"what answers at {config.sites[site].address} for {site} does not have our key")
        send_json(sock, {"proof": _proof(config.key, "client", transcript)})
        reply = receive_json(sock, deadline, _MAX_REPLY_BYTES)
        _check(reply)
        _tune(sock, config, str(hello.get("purpose")))
        return sock, reply
    except BaseException:
        sock.close()
        raise


def accept(config: Config, me: str, sock: socket.socket) -> tuple[socket.socket, dict[str, Any]]:
    """Makes sure of who connected; returns the connection to go on with and their hello. The caller sends the reply.

    Raises:
        OSError: They went, or were silent for too long.
        HandshakeError: They could not prove who they are.
    """
    sock.settimeout(TIMEOUT_S)
    deadline = time.monotonic() + TIMEOUT_S
    if config.tls is not None:
        sock = _context(ssl.PROTOCOL_TLS_SERVER, config.tls).wrap_socket(sock, server_side=True)
    try:
        hello = receive_json(sock, deadline)
        if not all(isinstance(value, str) for value in hello.values()):
            raise HandshakeError("not a site: a greeting of other things than texts")
        site = str(hello.get("site", ""))
        if config.tls is not None:
            _check_name(sock, site)
        nonce = secrets.token_hex(16)
        transcript = _transcript(hello, nonce)
        send_json(sock, {"nonce": nonce, "proof": _proof(config.key, "server", transcript)})
        answer = receive_json(sock, deadline)
        if config.key and not _same(answer.get("proof"), _proof(config.key, "client", transcript)):
            refuse(sock, f"{me} does not know you: the keys differ")
            raise HandshakeError(f"somebody who calls themselves {site!r} does not have our key")
        if hello.get("to") != me:
            refuse(sock, f"this is {me}, not {hello.get('to')}")
            raise HandshakeError(f"{site} looked for {hello.get('to')!r} here")
        if site not in config.sites:
            refuse(sock, f"{me} knows no site {site!r}; it knows {', '.join(config.sites)}")
            raise HandshakeError(f"there is no site {site!r}")
        _tune(sock, config, str(hello.get("purpose")))
        return sock, hello
    except BaseException:
        sock.close()
        raise


def refuse(sock: socket.socket, reason: str) -> None:
    """Tells the other side why we hang up."""
    send_json(sock, {"error": reason})


def send_json(sock: socket.socket, content: Mapping[str, Any]) -> None:
    """Sends one message of the handshake."""
    data = json.dumps(content).encode()
    sock.sendall(_LENGTH.pack(len(data)) + data)


def receive_json(sock: socket.socket, deadline: float, max_bytes: int = _MAX_BYTES) -> dict[str, Any]:
    """Receives one message of the handshake, of bounded size and by the deadline.

    Raises:
        HandshakeError: It is no such message.
        OSError: The connection ended, or the deadline passed.
    """
    (length,) = _LENGTH.unpack(_receive(sock, _LENGTH.size, deadline))
    if length > max_bytes:
        raise HandshakeError(f"not a site: a greeting of {length} bytes")
    try:
        content = json.loads(_receive(sock, length, deadline))
    except (ValueError, RecursionError):
        raise HandshakeError("not a site: a greeting that is not JSON") from None
    if not isinstance(content, dict):
        raise HandshakeError("not a site: a greeting that is no object")
    return content


def _receive(sock: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        piece = sock.recv(size - len(data))
        if not piece:
            raise ConnectionResetError("the other side hung up during the greeting")
        data += piece
    return data


def _check(answer: Mapping[str, Any]) -> None:
    if "error" in answer:
        error = answer["error"]
        raise HandshakeError(error[:1000] if isinstance(error, str) else "refused, with a reason that is no text")


def _transcript(hello: Mapping[str, Any], nonce: object) -> str:
    if not isinstance(nonce, str):
        raise HandshakeError("not a site: a nonce that is no text")
    return json.dumps([hello, nonce], sort_keys=True)


def _proof(key: bytes, side: str, transcript: str) -> str:
    return hmac.new(key, f"torchext {side} {transcript}".encode(), hashlib.sha256).hexdigest() if key else ""


def _same(given: object, right: str) -> bool:
    return isinstance(given, str) and given.isascii() and hmac.compare_digest(given, right)


def _context(protocol: int, tls: Tls) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False  # names are those of sites, checked in _check_name
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(tls.ca)
    context.load_cert_chain(tls.cert, tls.key)
    return context


def _check_name(sock: socket.socket, site: str) -> None:
    assert isinstance(sock, ssl.SSLSocket)
    certificate: Mapping[str, Any] = sock.getpeercert() or {}
    names = {value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"}
    names |= {value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"}
    if site not in names:
        raise HandshakeError(f"the certificate is for {', '.join(sorted(names)) or 'nobody'}, not for {site}")


def _tune(sock: socket.socket, config: Config, purpose: str) -> None:
    sock.settimeout(None)
    # Counters go before data where packets queue by their mark, as in Linux's own pfifo_fast, or not at all.
    mark = _BULK if purpose == "data" else _LOW_DELAY
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, mark)
    else:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, mark)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # A peer whose machine is gone says nothing: found by probes where nothing is sent, else by what stays unanswered.
    dead_after_s = max(1, round(config.dead_after_s))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, dead_after_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, dead_after_s // 3))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * config.dead_after_s))
