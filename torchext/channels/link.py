"""The connection to a broker elsewhere: made, lost and found again."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from multiprocessing import util
from typing import Any

from torchext import transport
from torchext.channels import wire
from torchext.channels.errors import ChannelError, ChannelTimeout
from torchext.channels.wire import PATIENCE_S, SILENT_S

_REFUSED_S = 0.5  # a host that refuses connections for so long has no broker any more


class Gone(Exception):
    """The broker is there no more; the message says why."""


class Link:
    """Connects to a broker, again and again.

    Attributes:
        sock: The latest connection; None where there is none.
        closing: Set once this side closes.
        pid: Of the broker's process.
    """

    def __init__(self, address: str, token: str, words: dict[str, Any]) -> None:
        self.address = address
        self.sock: socket.socket | None = None
        self.closing = threading.Event()
        self.pid = 0
        self._token = token
        self._words = {**words, "session": secrets.token_hex(16), "lz4": wire.has_lz4()}
        self._nonce: int | None = None
        util.register_after_fork(self, Link._forget)

    def _forget(self) -> None:
        """In a forked process: the connection is the parent's, and must end with it."""
        if self.sock is not None:
            self.sock.close()

    def close(self) -> None:
        """Hangs up for good; from any thread."""
        self.closing.set()
        sock = self.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def first(self, timeout_s: float) -> dict[str, Any]:
        """Connects for the first time, and gives the broker's answer."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.sock, reply = self._greet({})
                return reply
            except transport.GreetingError as error:
                raise ChannelError(f"the broker at {self.address}: {error}") from error
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise ChannelTimeout(
                        f"no broker answers at {self.address} within {timeout_s:g} s: {error}"
                    ) from None
            self.closing.wait(0.05)

    def again(self, words: dict[str, Any]) -> dict[str, Any] | None:
        """Connects once more after a connection has ended; None: this side is closing.

        Raises:
            Gone: There is no way back.
        """
        self.sock = None
        lost = time.monotonic()
        refused: float | None = None
        pause_s = 0.02
        while not self.closing.is_set():
            try:
                self.sock, reply = self._greet({**words, "resumes": True})
                if self.closing.is_set():  # close() may not have seen this socket
                    self.close()
                return reply
            except transport.GreetingError as error:
                raise Gone(str(error)) from error
            except ConnectionRefusedError:
                refused = time.monotonic() if refused is None else refused
                if time.monotonic() - refused >= _REFUSED_S:
                    raise Gone("its process has ended") from None
            except OSError as error:
                refused = None
                if time.monotonic() - lost >= PATIENCE_S:
                    raise Gone(f"it could not be reached for {PATIENCE_S:g} s: {error}") from None
            self.closing.wait(pause_s)
            pause_s = min(2 * pause_s, 0.25)
        return None

    def _greet(self, words: dict[str, Any]) -> tuple[socket.socket, dict[str, Any]]:
        sock = transport.connect(self.address, SILENT_S, SILENT_S, patient=True)
        try:
            reply = transport.greet(sock, self._token, wire.PURPOSE, {**self._words, **words}, SILENT_S)
            if self._nonce is not None and reply["nonce"] != self._nonce:
                raise transport.GreetingError("it was started anew")
            self._nonce, self.pid = reply["nonce"], reply["pid"]
        except BaseException:
            sock.close()
            raise
        return sock, reply
