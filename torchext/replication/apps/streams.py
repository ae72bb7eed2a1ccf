"""What the applications share: messages with a head, followed at all sites, each once and in its origin's order."""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from torchext.replication.core import HERE
from torchext.replication.errors import ReplicationError, StabilityTimeoutError
from torchext.replication.message import BYTES, Message
from torchext.replication.node import Node

_HEAD = struct.Struct("<4s8sI")  # magic, application, length of the head that follows
_MAGIC = b"TXAP"
_IDLE_S = 0.2  # after so much silence, what has come is handed over and the end is looked for
_MAX_BATCH_BYTES = 16 << 20


def pack(app: bytes, head: Mapping[str, Any], payload: bytes = b"") -> bytes:
    """A message of an application, whose name has up to eight bytes."""
    text = json.dumps(head).encode()
    return _HEAD.pack(_MAGIC, app, len(text)) + text + payload


def unpack(app: bytes, message: Message) -> tuple[dict[str, Any], bytes] | None:
    """Head and payload; None if it is none of this application's."""
    data = message.payload if message.kind == BYTES else b""
    if len(data) < _HEAD.size:
        return None
    magic, name, length = _HEAD.unpack_from(data)
    if magic != _MAGIC or name.rstrip(b"\0") != app:
        return None
    body = _HEAD.size + length
    return json.loads(data[_HEAD.size : body]), data[body:]


def open_database(path: str | os.PathLike[str], tables: str) -> sqlite3.Connection:
    """A SQLite file that survives a loss of power; whoever uses it from several threads holds a lock.

    Raises:
        sqlite3.Error: It is no such file.
    """
    database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    try:
        database.executescript(f"PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; {tables}")
    except BaseException:
        database.close()
        raise
    return database


class Follower:
    """Hands all messages of all sites on, in a thread per site, in batches, once they lie on this site's disk.

    Args:
        node: This site.
        after: By site, the number of the last message that was applied before; what follows is handed on.
        apply: Called with a site and its next messages, from one thread at a time. What it raises ends this.
        ack: The ack type that tells the other sites what is applied here; None tells nothing.

    Attributes:
        changed: Held while ``apply`` runs, notified after it.
        applied: By site, up to which message all is applied; guarded by ``changed``.
    """

    def __init__(
        self,
        node: Node,
        after: Mapping[str, int],
        apply: Callable[[str, list[Message]], None],
        *,
        ack: str | None = None,
    ) -> None:
        self._node = node
        self._apply = apply
        self._ack = ack
        self._closing = threading.Event()
        self._fault: BaseException | None = None
        self.changed = threading.Condition()
        self.applied = {site: after.get(site, 0) for site in node.sites()}
        self._threads = [
            threading.Thread(target=self._run, args=(site,), name=f"follow-{site}-at-{node.me}", daemon=True)
            for site in self.applied
        ]

    def start(self) -> None:
        """Begins."""
        if self._ack is not None:
            self._node.register_ack(self._ack)
            for site, seq in self.applied.items():  # acks of one's own do not outlive the node
                if 0 < seq <= self._node.last(site):
                    self._node.ack(site, seq, self._ack)
        for thread in self._threads:
            thread.start()

    def catch_up(self) -> None:
        """Waits until all that this site sent before is applied."""
        self.wait_applied(self._node.me, self._node.last(self._node.me), None)

    def wait_applied(self, site: str, seq: int, timeout: float | None) -> None:
        """Waits until a site's messages up to this one are applied.

        Raises:
            StabilityTimeoutError: They were not in time.
            ReplicationError: This ended; says why.
        """
        with self.changed:
            self.changed.wait_for(lambda: self.applied[site] >= seq or self._closing.is_set(), timeout)
            self.check()
            if self.applied[site] < seq:
                raise StabilityTimeoutError(
                    f"message {seq} of {site} was not applied at {self._node.me} within {timeout:g} s; those up to "
                    f"{self.applied[site]} are",
                    [self._node.me],
                )

    def wait_ended(self, timeout_s: float) -> bool:
        """Waits until this ends; whether it has."""
        return self._closing.wait(timeout_s)

    def check(self) -> None:
        """Raises what ended this, if something did: a failure, or its owner's end."""
        self.raise_fault()
        if self._closing.is_set():
            raise ReplicationError(f"this was closed at site {self._node.me}")

    def raise_fault(self) -> None:
        """Raises the failure that ended this, if one did."""
        if self._fault is not None:
            raise ReplicationError(f"this ended at site {self._node.me}: {self._fault}") from self._fault

    def fail(self, error: BaseException) -> None:
        """Ends this for a reason that the next call is told."""
        with self.changed:
            self._fault = self._fault or error
        self.stop()

    def close(self) -> None:
        """Ends the threads and waits for them."""
        self.stop()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join()

    def stop(self) -> None:
        """Has the threads end soon."""
        self._closing.set()
        with self.changed:
            self.changed.notify_all()

    def _run(self, site: str) -> None:
        try:
            while not self._closing.is_set():
                self._node.check()
                self._follow(site)
        except BaseException as error:
            self.fail(error)

    def _follow(self, site: str) -> None:
        batch: list[Message] = []
        size = 0
        # Only what is on this site's disk: an origin that loses its power must not lose what others were told to have.
        for message in self._node.receive(site, after=self.applied[site], timeout=_IDLE_S, predicate=HERE):
            if self._closing.is_set():
                return
            batch.append(message)
            size += message.size_bytes
            if message.seq >= self._node.last(site) or size > _MAX_BATCH_BYTES:
                self._hand_on(site, batch)
                batch, size = [], 0
        if batch:  # the last that is here was given up by its sender
            self._hand_on(site, batch)

    def _hand_on(self, site: str, batch: list[Message]) -> None:
        with self.changed:
            self._apply(site, batch)
            self.applied[site] = batch[-1].seq
            if self._ack is not None:
                self._node.ack(site, batch[-1].seq, self._ack)
            self.changed.notify_all()


def left_s(deadline: float | None) -> float | None:
    """Seconds until then."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def deadline_of(timeout: float | None) -> float | None:
    """When a timeout in seconds is over."""
    return None if timeout is None else time.monotonic() + timeout
