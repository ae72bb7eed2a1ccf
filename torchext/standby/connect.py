"""Finding a standby, starting one on this host, and choosing how it is to read."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from torchext.standby import rdma, wire
from torchext.standby.arena import Segment
from torchext.standby.errors import CorruptStateError, StandbyError, StandbyLostError
from torchext.standby.link import Identity, Link

logger = logging.getLogger(__name__)

_LOCAL_LINGER_S = 600.0
_START_TIMEOUT_S = 120.0  # it imports torch, on a busy machine
_RETRY_S = 2.0


def open_link(address: str, identity: Identity, *, transport: str, timeout_s: float) -> Link:
    """Connects to a standby; starts one where the address is "local" and there is none.

    Raises:
        OSError: Nobody answers.
        StandbyError: The standby refuses, or ``transport`` is not possible.
    """
    sock = _connect_or_start(address, timeout_s)
    probe = Segment(1, huge_pages=False) if transport in ("auto", "local") else None
    try:
        welcome = wire.greet(
            sock,
            {
                "role": "primary",
                "job": identity.job,
                "rank": identity.rank,
                "world_size": identity.world_size,
                "run": identity.run,
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "boot_id": wire.boot_id(),
                "rdma": address != wire.LOCAL and transport in ("auto", "rdma"),
                "probe": None if probe is None else {"descriptor": probe.descriptor, "nonce": probe.nonce.hex()},
            },
            timeout_s,
        )
        chosen = _choose(transport, address, welcome, sock)
        return Link(
            sock,
            address,
            identity,
            timeout_s,
            transport=chosen,
            heartbeat_s=welcome["heartbeat_s"],
            standby_pid=welcome["pid"],
        )
    except BaseException:
        sock.close()
        raise
    finally:
        if probe is not None:
            probe.close()


def _choose(transport: str, address: str, welcome: dict[str, Any], sock: socket.socket) -> str:
    """How the standby is to read: of what is possible, in this order, out of this host's memory, by RDMA, over TCP."""
    if welcome["local"]:
        return "local"
    if transport == "local":
        raise StandbyError(
            f"transport='local': the standby at {address} cannot read the memory of this process; it has to run on "
            "this host, in the same pid namespace, as the same user; or use transport='tcp'"
        )
    if address == wire.LOCAL:
        raise StandbyError(
            "the local standby cannot read the memory of this process (another pid namespace?)"
            if transport == "auto"
            else f"transport={transport!r} needs a standby with an address, host:port, got {address!r}"
        )
    if transport == "tcp" or (transport == "auto" and not rdma.may_pin_all()):
        return "tcp"
    lacks = "the standby's host: " + welcome["lacks_rdma"] if welcome["lacks_rdma"] else None
    lacks = lacks or rdma.lacks(sock.getsockname()[0])
    if lacks is None:
        return "rdma"
    if transport == "rdma":
        raise StandbyError(f"transport='rdma' is not possible with the standby at {address}: {lacks}")
    return "tcp"


def _connect_or_start(address: str, timeout_s: float) -> socket.socket:
    try:
        return wire.connect(address, timeout_s)
    except ConnectionRefusedError:
        if address != wire.LOCAL:
            raise
    # It has to outlive this process, so it puts itself into the background, in a session of its own.
    words = ["--listen", wire.LOCAL, "--background", "--linger", str(_LOCAL_LINGER_S)]
    command = [sys.executable, "-m", "torchext", "standby", *words]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=max(timeout_s, _START_TIMEOUT_S),
        )
    except subprocess.TimeoutExpired as error:
        raise StandbyLostError(f"starting a standby on this host took more than {error.timeout:g} s") from error
    try:
        return wire.connect(address, timeout_s)  # even where it failed: another process may have been faster
    except ConnectionRefusedError as error:
        raise StandbyLostError(f"starting a standby on this host failed: {done.stderr.strip()}") from error


class Reconnect:
    """Tries to open a link in a thread of its own, again and again, until it has one or is cancelled.

    An error that says nothing of the standby ends it: `result` raises it.
    """

    def __init__(self, open_one: Callable[[], Link]) -> None:
        self._open = open_one
        self._lock = threading.Lock()
        self._link: Link | None = None  # guarded by _lock
        self._fault: BaseException | None = None  # guarded by _lock
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchext-standby-reconnect", daemon=True)
        self._thread.start()

    def result(self) -> Link | None:
        """The link, once there is one; it is the caller's then.

        Raises:
            StandbyLostError: It has ended without one; the cause is what ended it.
        """
        with self._lock:
            link, self._link = self._link, None
            fault = self._fault
        if link is not None or fault is not None:
            self._thread.join()
        if fault is not None:
            raise StandbyLostError(f"looking for it has failed: {type(fault).__name__}: {fault}") from fault
        return link

    def cancel(self) -> None:
        """Stops trying. Waits for the attempt under way, which has a timeout."""
        self._cancelled.set()
        self._thread.join()
        if self._link is not None:
            self._link.close()

    def _run(self) -> None:
        while not self._cancelled.wait(_RETRY_S):
            try:
                link = self._open()
            except (OSError, StandbyError, CorruptStateError) as error:
                logger.debug("no standby yet: %s", error)
                continue
            except BaseException as error:
                with self._lock:
                    self._fault = error
                return
            with self._lock:
                self._link = link
            return
