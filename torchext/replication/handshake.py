"""How two sites make sure of each other, before anything else is read or written.

Each proves that it has the shared key, as the token of `torchext.transport.greet`. With TLS, the certificates prove it,
and the names in them are those of the sites.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping
from typing import Any

from torchext import transport
from torchext.replication.config import Config, Tls
from torchext.replication.errors import ReplicationError
from torchext.transport import GreetingError

PROTOCOL = "torchext replication 1"
TIMEOUT_S = 5.0  # for a handshake
_LOW_DELAY, _BULK = 0x10, 0x08  # types of service of RFC 1349


class HandshakeError(ReplicationError):
    """The other side is not who it should be, or refused."""


def connect(config: Config, me: str, site: str, hello: Mapping[str, str]) -> tuple[socket.socket, dict[str, Any]]:
    """Connects to a site; returns the connection and the site's answer to ``hello``.

    Raises:
        OSError: It cannot be reached, or was silent for too long.
        HandshakeError: It could not prove who it is, or refused us.
    """
    address = config.sites[site].address
    sock = transport.connect(address, TIMEOUT_S, config.dead_after_s)
    try:
        if config.tls is not None:
            sock = _context(ssl.PROTOCOL_TLS_CLIENT, config.tls).wrap_socket(sock)
            _check_name(sock, site)
        try:
            reply = transport.greet(sock, config.key.hex(), PROTOCOL, {**hello, "site": me, "to": site}, TIMEOUT_S)
        except GreetingError as error:
            raise HandshakeError(f"{site} at {address}, greeted with the key as token: {error}") from None
        _mark(sock, hello["purpose"])
        return sock, reply
    except BaseException:
        sock.close()
        raise


def accept(config: Config, me: str, sock: socket.socket) -> tuple[socket.socket, dict[str, Any]]:
    """Makes sure of who connected; returns the connection to go on with and their hello.

    The caller goes on with `torchext.transport.reply` or ``refuse``.

    Raises:
        OSError: They went, were silent for too long, or do not have the key.
        HandshakeError: They are not who they say.
    """
    sock.settimeout(TIMEOUT_S)
    transport.tune(sock, config.dead_after_s)
    if config.tls is not None:
        sock = _context(ssl.PROTOCOL_TLS_SERVER, config.tls).wrap_socket(sock, server_side=True)
    try:
        hello = transport.accept(sock, config.key.hex(), PROTOCOL, TIMEOUT_S)
        if not all(isinstance(value, str) for value in hello.values()):
            raise HandshakeError("not a site: a greeting of other things than texts")
        site = str(hello.get("site"))
        if config.tls is not None:
            _check_name(sock, site)
        if hello.get("to") != me:
            transport.refuse(sock, f"this is {me}, not {hello.get('to')}")
            raise HandshakeError(f"{site} looked for {hello.get('to')!r} here")
        if site not in config.sites:
            transport.refuse(sock, f"{me} knows no site {site!r}; it knows {', '.join(config.sites)}")
            raise HandshakeError(f"there is no site {site!r}")
        _mark(sock, str(hello.get("purpose")))
        return sock, hello
    except BaseException:
        sock.close()
        raise


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


def _mark(sock: socket.socket, purpose: str) -> None:
    # Counters go before data where packets queue by their mark, as in Linux's own pfifo_fast, or not at all.
    sock.settimeout(None)
    mark = _BULK if purpose == "data" else _LOW_DELAY
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, mark)
    else:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, mark)
