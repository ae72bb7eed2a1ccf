"""A site: sends its own messages to all others, keeps theirs, and says what is stable."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any

from torchext.replication import message
from torchext.replication.config import Config, load_config, make_site
from torchext.replication.core import RECEIVED, Core
from torchext.replication.cursor import Cursor
from torchext.replication.errors import DivergedError, ReplicationError, StabilityTimeoutError, StoreFullError
from torchext.replication.mesh import Mesh
from torchext.replication.message import Message
from torchext.replication.predicates import ACKS, Counter, dual


class Node:
    """One site of a replicated system; safe to use from several threads.

    It connects to the other sites by itself, again and again, and receives what they send whether or not somebody
    reads it. ``$MYSITE`` in a predicate is the site whose messages are judged, so one predicate means the same
    wherever it is evaluated.

    Example::

        with Node("site.toml", me="paris") as node:
            node.register_predicate("safe", "KTH_MIN(2, $ALLSITES - $MYSITE).persisted")
            seq = node.send(b"state")
            node.waitfor(seq, "safe", timeout=30)

    Args:
        config: Path of a file, or a dictionary; see `load_config`.
        me: Name of this site.

    Raises:
        ConfigError: The description of the sites is wrong, or ``me`` is not in it.
        PredicateError: One of its predicates is.
        StoreError: This site's log is damaged, or in use by another process.
        OSError: It cannot listen at its address.
        ImportError: The native core is missing.

    Source: "Stabilizer: Geo-Replication with User-defined Consistency" (ICDCS 2022). There, a frontier can go back when
    a predicate is changed to a stronger one; here, what was once said to be stable stays so.
    """

    def __init__(self, config: str | Path | Mapping[str, Any] | Config, *, me: str) -> None:
        self._core = Core(config if isinstance(config, Config) else load_config(config), me)
        self.me = me
        self._sites_lock = threading.Lock()  # held while a site is added or removed
        try:
            self._mesh = Mesh(self._core, self.status)
        except BaseException:
            self._core.close()
            raise
        self._mesh.start("keep", self._core.keep)
        self._mesh.start("monitors", self._core.tell_monitors)
        self._mesh.open()

    @property
    def _config(self) -> Config:
        return self._core.config

    # Sending.

    def send(self, data: Any, *, timeout: float | None = None) -> int:
        """Hands a message to all sites; returns once it is in this site's own log, not yet on the disk.

        Args:
            data: Bytes or any buffer, which may be changed after the call; the path of a file; or a tree of tensors,
                which takes ``torch.save``.
            timeout: How long to wait, in seconds, for others that send and, where the configuration bounds this
                site's log, for room. None waits for as long as it takes.

        Returns:
            The number of the message: 1, 2, 3, ...

        Raises:
            StoreFullError: The disk is full, or there was no room in time; the message names the sites that hold back
                the truncation. Nothing was sent.
            DivergedError: Another site holds more of this site's messages than it does itself: its store is not the one
                it had. They are being sent back; try again.
            ReplicationError: Something else was being written all the time, or the node stopped.
        """
        self._core.check()
        if isinstance(data, (str, os.PathLike)):
            with open(data, "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise ReplicationError(f"data: {os.fspath(data)!r} is no regular file")
                return self._append(file.fileno(), status.st_size, message.FILE, timeout)
        kind, view = message.encode(data)
        return self._append(view, len(view), kind, timeout)

    def _append(self, source: bytes | memoryview | int, size: int, kind: int, timeout: float | None) -> int:
        log = self._core.logs[self.me]
        deadline = None if timeout is None else time.monotonic() + timeout
        limit = self._config.max_log_bytes

        def has_room() -> bool:
            # The last file is never dropped, so to wait while there is no other would be for good.
            return not limit or log.size_with(size) <= limit or log.size_bytes <= self._config.segment_bytes

        while True:
            # Held by another thread that sends, or while another site gives back what this one has lost.
            if not log.writing.acquire(timeout=-1 if deadline is None else max(0.0, deadline - time.monotonic())):
                raise ReplicationError(
                    f"something else is being written to the log of {self.me}, and has been for {timeout:g} s"
                )
            try:
                self._core.check()
                self._check_not_behind(log.tail.seq)
                if has_room():
                    log.abort_partial()
                    seq = log.append(source, size, kind)
                    self._core.raise_own(self.me, RECEIVED, seq)
                    self._core.work.set()
                    return seq
            finally:
                log.writing.release()
            with log.changed:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not log.changed.wait_for(lambda: has_room() or self._core.closing.is_set(), left):
                    raise StoreFullError(
                        f"the log of {self.me} takes {log.size_bytes} of max_log_bytes = {limit}, and {size} more did "
                        f"not find room within {timeout:g} s; {self._holding_back()}"
                    )

    def _check_not_behind(self, seq: int) -> None:
        with self._core.lock:
            frontiers = self._core.frontiers[self.me]
            ahead = {s: n for s in self._core.outboxes if (n := frontiers.counter(Counter(s, RECEIVED))) > seq}
        if ahead:
            site, held = max(ahead.items(), key=lambda item: item[1])
            raise DivergedError(
                f"{site} holds messages of {self.me} up to {held}, but {self.me} itself only up to {seq}: its store is "
                f"not the one it had. If they have one history, {site} sends them back; wait and try again"
            )

    def _holding_back(self) -> str:
        if not self._config.truncate:
            return "nothing is dropped from it, as no truncate is configured; call truncate()"
        with self._core.lock:
            frontiers = self._core.frontiers[self.me]
            behind = frontiers.behind(self._core.logs[self.me].tail.seq, "(truncate)")
        words = ", ".join(f"{c.site} ({c.ack} up to {n})" for c, n in behind.items())
        return f"it is truncated behind {self._config.truncate}, held back by {words}"

    # Stability.

    def register_predicate(self, name: str, predicate: str) -> None:
        """Gives a predicate a name.

        Raises:
            PredicateError: It is refused; points at the column.
            ReplicationError: The name is taken.
        """
        self._core.check()
        self._core.register(name, predicate)

    def change_predicate(self, name: str, predicate: str) -> None:
        """Has the name stand for another predicate from now on.

        Whoever waits keeps waiting under the one that they came with. The frontier does not go back: under a stronger
        predicate it stays where it is until the new one has come up to it.

        Raises:
            PredicateError: It is refused; the old one stays.
        """
        self._core.check()
        self._core.change(name, predicate)

    def predicates(self) -> dict[str, str]:
        """All predicates, by name."""
        with self._core.lock:
            found = self._core.frontiers[self.me].predicates()
        return {name: text for name, text in found.items() if not name.startswith("(")}

    def get_stability_frontier(self, predicate: str, *, origin: str | None = None) -> int:
        """All messages up to this number are stable under the predicate; 0 if none.

        Args:
            predicate: Its name.
            origin: Whose messages; None means this site's own.
        """
        self._core.check()
        origin = self.me if origin is None else origin
        with self._core.lock:
            return self._core.frontiers_of(origin, predicate).frontier(predicate)

    def monitor_stability_frontier(
        self, predicate: str, callback: Callable[[int], None], *, origin: str | None = None
    ) -> Callable[[], None]:
        """Has ``callback(frontier)`` called when the frontier has moved; several moves may be told as one.

        It is called in the node's own thread, which other callbacks wait for. What it raises stops the node and is
        raised by the next call.

        Returns:
            A function that ends this.
        """
        self._core.check()
        return self._core.monitor(self.me if origin is None else origin, predicate, callback)

    def waitfor(self, seq: int, predicate: str, timeout: float | None = None, *, origin: str | None = None) -> int:
        """Waits until a message is stable under the predicate as it is at the call.

        Args:
            seq: What `send` returned.
            predicate: Name of a predicate.
            timeout: In seconds; None waits for as long as it takes.
            origin: Whose message; None means this site's own.

        Returns:
            The frontier, at least ``seq``.

        Raises:
            StabilityTimeoutError: It was not in time; names the sites that are missing and how far behind they are.
            ReplicationError: There is no such predicate, or ``origin`` was removed in the meantime.
            ClosedError: The node was closed in the meantime.
        """
        origin = self.me if origin is None else origin
        future = self._wait(seq, predicate, origin)
        try:
            return future.result(timeout)
        except FutureTimeoutError as error:
            return self._give_up(seq, predicate, timeout, origin, future, error)

    async def waitfor_async(
        self, seq: int, predicate: str, timeout: float | None = None, *, origin: str | None = None
    ) -> int:
        """`waitfor`, to be awaited."""
        origin = self.me if origin is None else origin
        future = self._wait(seq, predicate, origin)
        try:
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(future)), timeout)
        except asyncio.TimeoutError as error:
            return self._give_up(seq, predicate, timeout, origin, future, error)
        except asyncio.CancelledError:
            with self._core.lock:
                if origin in self._core.frontiers:
                    self._core.frontiers[origin].abandon(future)
            raise

    def _wait(self, seq: int, predicate: str, origin: str) -> Future[int]:
        if isinstance(seq, bool) or not isinstance(seq, int) or seq < 1:
            raise ReplicationError(f"seq: expected the number of a message, from 1, got {seq!r}")
        with self._core.lock:
            self._core.check()  # under the lock: who comes after the end would not be told of it
            return self._core.frontiers_of(origin, predicate).wait(seq, predicate)

    def _give_up(
        self,
        seq: int,
        predicate: str,
        timeout: float | None,
        origin: str,
        future: Future[int],
        error: FutureTimeoutError | asyncio.TimeoutError,
    ) -> int:
        with self._core.lock:
            if future.done():  # just now, or by an error that is a timeout itself
                return future.result()
            frontiers = self._core.frontiers[origin]
            frontiers.abandon(future)
            behind = frontiers.behind(seq, predicate)
            text, reached = frontiers.predicate(predicate).text, frontiers.frontier(predicate)
            absent = {site for site, heard in self._core.heard.items() if not heard}
        words = [
            f"{c.site}.{c.ack} is at {n}, {seq - n} behind{' (not connected)' if c.site in absent else ''}"
            for c, n in behind.items()
        ]
        raise StabilityTimeoutError(
            f"message {seq} of {origin} did not become stable under {predicate!r} = {text} within {timeout:g} s; "
            f"stable up to {reached}. {'; '.join(words)}",
            list(dict.fromkeys(c.site for c in behind)),
        ) from error

    def register_ack(self, ack: str) -> None:
        """Makes an ack type of one's own known to this site's predicates."""
        if not ack.isidentifier() or ack == "truncated":
            raise ReplicationError(f"ack: expected a name made of letters, digits and '_', got {ack!r}")
        self._core.check()
        self._core.add_ack(ack)

    def ack(self, origin: str, seq: int, ack: str) -> None:
        """Tells all sites that this one has done something with an origin's messages up to this one.

        Args:
            origin: Whose messages.
            seq: The last of them. A lower one than before is no news.
            ack: What: an ack type of one's own; received, persisted and verified are told by the node itself.
        """
        self._core.check()
        if ack in ACKS:
            raise ReplicationError(f"ack: {ack!r} is told by the node itself")
        if origin not in self._core.logs:
            raise ReplicationError(f"origin: there is no site {origin!r}; there are: {', '.join(self._core.logs)}")
        if not 0 < seq <= self._core.logs[origin].tail.seq:
            raise ReplicationError(f"seq: message {seq} of {origin} is not here (the last is {self.last(origin)})")
        self._core.add_ack(ack)
        self._core.raise_own(origin, ack, seq)

    # Receiving.

    def last(self, origin: str) -> int:
        """Number of the last message of a site that is here; 0 if none."""
        return self._core.logs[origin].tail.seq

    def first(self, origin: str) -> int:
        """Number of the first message of a site that is still in the log."""
        place = self._core.logs[origin].first
        return place.seq + 1 + (place.offset > 0)

    def wait_received(self, origin: str, seq: int, timeout: float) -> bool:
        """Waits until a message of a site has arrived here; whether it has."""
        log = self._core.logs[origin]
        with log.changed:
            log.changed.wait_for(lambda: log.tail.seq >= seq or self._core.closing.is_set(), timeout)
            return log.tail.seq >= seq

    def receive(
        self, origin: str, *, after: int = 0, timeout: float | None = None, predicate: str | None = None
    ) -> Iterator[Message]:
        """Goes through the messages of a site in their order, those that are here and those that come.

        While it is in use, what it has not reached yet is not dropped from the log.

        Args:
            origin: Whose; this site's own can be read too.
            after: Number of the message to begin after.
            timeout: Ends once nothing came for so many seconds; 0 gives what is here. None waits until the node is
                closed, which ends it too.
            predicate: Give each message only once it is stable under this one.

        Raises:
            StoreError: What follows ``after`` was dropped already.
        """
        log = self._core.logs.get(origin)
        if log is None:
            raise ReplicationError(f"origin: there is no site {origin!r}; there are: {', '.join(self._core.logs)}")
        place = [after]
        with self._core.reading(origin, place):
            while log.tail.seq < after:  # not here yet
                if not log.wait_beyond(log.tail, 0.5 if timeout is None else timeout) and timeout is not None:
                    return
                if self._core.closing.is_set():
                    return
            with Cursor(log, (after, 0), lends=True) as cursor:
                while True:
                    found = cursor.message()
                    if found is None:
                        if not self._wait_beyond(cursor, timeout):
                            return
                        continue
                    seq, kind, given_up, parts = found
                    if not given_up:
                        if predicate is not None:
                            self.waitfor(seq, predicate, origin=origin)
                        yield Message(origin, seq, kind, parts)
                    place[0] = seq
                    del found, parts  # as long as they are there, so are open files

    def keeping(self, origin: str, after: int) -> contextlib.AbstractContextManager[None]:
        """While this lasts, what follows a message of a site is not dropped from the log here."""
        return self._core.reading(origin, [after])

    def _wait_beyond(self, cursor: Cursor, timeout: float | None) -> bool:
        log, seq = cursor.log, cursor.place.seq
        deadline = None if timeout is None else time.monotonic() + timeout
        with log.changed:
            while log.tail.seq <= seq:
                left = None if deadline is None else deadline - time.monotonic()
                if self._core.closing.is_set() or (left is not None and left <= 0):
                    return False
                log.changed.wait(left)
        return not self._core.closing.is_set()

    def truncate(self, seq: int) -> None:
        """Lets all sites forget this site's messages up to this one; whole log files go, as they become free of others.

        A site that is added later gets what is left.
        """
        self._core.check()
        self._core.forget(self.me, min(seq, self.last(self.me)))

    # Sites that come and go.

    def add_site(self, name: str, *, address: str, zone: str = "") -> None:
        """Makes another site known, which then gets what is left of this site's messages, and all to come.

        Predicates with sets take it in at once, for whoever waits from now on. Each site has to be told.

        Raises:
            ReplicationError: There is one of this name already.
            ConfigError: The name or the address is wrong.
        """
        self._core.check()
        site = make_site(name, {"address": address, "zone": zone, "store": "there"})
        with self._sites_lock:
            self._core.add_site(name, site)
            self._mesh.link(name)

    def remove_site(self, name: str) -> None:
        """Forgets another site: it is no longer in any set, sent to or heard. Its log stays in this site's store.

        Raises:
            ReplicationError: There is no such other site.
            PredicateError: A predicate names it, or does not hold without it; nothing was changed.
        """
        self._core.check()
        with self._sites_lock:
            self._core.remove_site(name)
            self._mesh.unlink(name)

    # The node itself.

    def sites(self) -> list[str]:
        """All sites, this one among them."""
        return list(self._config.sites)

    def status(self) -> dict[str, Any]:
        """Counters, frontiers and connections, as plain values for JSON."""
        core = self._core
        with core.lock:
            acks = [*ACKS, *sorted({ack for _, ack in core.own()} - {*ACKS, "truncated"})]
            counters = {
                origin: {
                    site: {ack: frontiers.counter(Counter(site, ack)) for ack in acks} for site in self._config.sites
                }
                for origin, frontiers in core.frontiers.items()
            }
            own = core.frontiers[self.me]
            predicates = {
                name: {"predicate": text, "frontier": own.frontier(name)} for name, text in self.predicates().items()
            }
            heard = dict(core.heard)
        connections: dict[str, dict[str, Any]] = {
            link.site: {"control": "", "data": "", "sent_bytes": 0, "heard": heard.get(link.site, False)}
            for link in self._mesh.links
        }
        for link in self._mesh.links:
            connections[link.site][link.purpose] = link.state
            connections[link.site]["sent_bytes"] += link.sent_bytes
        return {
            "me": self.me,
            "sites": {name: {"zone": s.zone, "address": s.address} for name, s in self._config.sites.items()},
            "counters": counters,
            "predicates": predicates,
            "connections": connections,
            "trouble": dict(core.trouble),
            "log_bytes": {origin: log.size_bytes for origin, log in core.logs.items()},
        }

    def read_frontier(
        self, predicate: str, timeout: float, *, origin: str | None = None, quorum_only: bool = False
    ) -> int:
        """A number beyond which no message was stable under the predicate before the call, wherever that was said.

        `get_stability_frontier` gives what this site knows to be stable, which may be less than what others were told.
        Here, it asks the sites for their counters, waits until those have answered that satisfy the `dual` of the
        predicate, and takes the others to have done everything. A quorum for the dual has a site in common with any
        that made the predicate hold, so what was stable is found.

        Args:
            predicate: Its name.
            timeout: In seconds.
            origin: Whose messages; None means this site's own.
            quorum_only: Do not wait for other sites that are connected, too: sooner, but the number may be higher.

        Raises:
            StabilityTimeoutError: Too few answered in time; names the others.
        """
        self._core.check()
        origin = self.me if origin is None else origin
        core = self._core
        with core.lock:
            frontiers = core.frontiers_of(origin, predicate)
            written = frontiers.predicate(predicate)
        wanted = core.compile(dual(written.text), origin)
        answered = core.wait_answered(core.ask(), wanted.satisfied_by, timeout, all_connected=not quorum_only)
        self._core.check()
        if not wanted.satisfied_by(answered):
            absent = [site for site in self._config.sites if site not in answered]
            raise StabilityTimeoutError(
                f"what was stable under {predicate!r} = {written.text} can be told once {wanted.text} is heard from; "
                f"{self.me} has not heard from {', '.join(absent)} within {timeout:g} s",
                absent,
            )
        with core.lock:
            everything = max(frontiers.counter(Counter(site, RECEIVED)) for site in self._config.sites)
            bound = written.value(lambda c: frontiers.counter(c) if c.site in answered else everything)
            return max(bound, frontiers.frontier(predicate))

    def check(self) -> None:
        """Raises what stopped this node, if something did.

        Raises:
            ReplicationError: It stopped, as when its disk fails; the cause is attached.
            ClosedError: It was closed.
        """
        self._core.check()

    def close(self) -> None:
        """Hangs up, ends all threads and waits, closes the log; what was sent goes on once the site is back."""
        self._core.stop()
        self._mesh.close()
        self._core.close()

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
