"""What the threads of a node share: logs, counters, frontiers, and who is told of their changes. No sockets."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from torchext.replication.archive import Archive, is_url
from torchext.replication.config import Config, Site
from torchext.replication.cursor import verify
from torchext.replication.errors import ClosedError, ConfigError, ReplicationError, StoreError
from torchext.replication.frontiers import Frontiers
from torchext.replication.log import Place, StreamLog
from torchext.replication.predicates import ACKS, Counter, Predicate, Sites, compile_predicate

RECEIVED, PERSISTED, VERIFIED = ACKS
TRUNCATED = "truncated"  # not an ack: up to where an origin lets the others forget
HERE = "(here)"  # name of the predicate that holds for what lies on this site's disk
_TRUNCATE = "(truncate)"  # name of the predicate behind which logs are truncated

_T = TypeVar("_T")
_logger = logging.getLogger(__name__)


class Marks(NamedTuple):
    """What makes sure that counters are of now: a question is answered after all counters from before it.

    Attributes:
        question: The last one of this site.
        answer: The last question of the other site.
    """

    question: int
    answer: int


class Outbox:
    """What one other site is yet to be told: counters, of which later values replace earlier ones, and marks."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._counters: dict[tuple[str, str], int] = {}
        self._marks = Marks(0, 0)
        self._closed = False

    def post(self, origin: str, ack: str, seq: int) -> None:
        """Adds a counter."""
        with self._changed:
            self._counters[origin, ack] = seq
            self._changed.notify()

    def ask(self, question: int) -> None:
        """Has the other site asked."""
        with self._changed:
            self._marks = self._marks._replace(question=question)
            self._changed.notify()

    def answer(self, question: int) -> None:
        """Has the other site's question answered."""
        with self._changed:
            self._marks = self._marks._replace(answer=question)
            self._changed.notify()

    def take(self, timeout_s: float, told: Marks) -> tuple[dict[tuple[str, str], int], Marks]:
        """Takes all counters, to be told before the marks; waits, up to the timeout, for some or for other marks."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._counters) or self._marks != told or self._closed, timeout_s)
            counters, self._counters = self._counters, {}
            return counters, self._marks

    def close(self) -> None:
        """Ends the waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Core:
    """The state of one site.

    `lock` guards the frontiers, the counters of this site and the lists of who is told.

    Args:
        config: The sites.
        me: This one.
    """

    def __init__(self, config: Config, me: str) -> None:
        if me not in config.sites:
            raise ConfigError(f"me: there is no site {me!r}; there are: {', '.join(config.sites)}")
        self.config = config
        self.me = me
        self.lock = threading.RLock()
        self.closing = threading.Event()
        self.work = threading.Event()  # for `keep`: something is to be brought to the disk or dropped from it
        self.outboxes: dict[str, Outbox] = {site: Outbox() for site in config.sites if site != me}
        self.heard: dict[str, bool] = dict.fromkeys(self.outboxes, False)  # who is connected and tells its counters
        self._answered: dict[str, int] = {}  # by site: the last question of this one that it answered
        self._question = secrets.randbits(30) << 32  # so that nobody answers one of a former life
        self.trouble: dict[str, str] = {}  # what keeps this site from going on, by what it concerns; for `status`
        self.fault: BaseException | None = None
        self._acks = [*ACKS, *config.acks]
        self._own = {(origin, ack): 0 for origin in config.sites for ack in ACKS}
        self._floors: dict[str, int] = {}
        self._readers: dict[str, list[list[int]]] = {origin: [] for origin in config.sites}
        self._moved = threading.Condition(self.lock)
        self._queue: dict[tuple[str, str], None] = {}  # frontiers that moved and whose monitors are to be told
        self._monitors: dict[tuple[str, str], list[Callable[[int], None]]] = {}
        self._retired: dict[str, StreamLog] = {}  # of sites that were removed
        store = config.sites[me].folder
        store.mkdir(parents=True, exist_ok=True)
        self._store_lock = _locked(store / "lock")
        self.logs: dict[str, StreamLog] = {}
        self._archives: dict[str, Archive] = {}  # by origin; empty if this site's store is a folder here
        try:
            for origin in config.sites:
                self.logs[origin] = self._open_log(origin)
            self.frontiers = {origin: Frontiers(self._sites(origin)) for origin in config.sites}
            self._texts = {HERE: f'MIN("{me}").persisted'}
            for name, text in config.predicates.items():
                self.register(name, text)
            if config.truncate:
                self.frontiers[me].register(_TRUNCATE, config.truncate)
        except BaseException:
            self._close_files()
            raise
        # The logs were read and checked just now, and are brought to the disk before anything is claimed of them.
        self._durable = {origin: self._sync(origin, log) for origin, log in self.logs.items()}
        for origin, place in self._durable.items():
            for ack in (PERSISTED, VERIFIED):
                self.raise_own(origin, ack, place.seq)
            self.raise_own(origin, RECEIVED, self.logs[origin].tail.seq)
        self.work.set()

    def _open_log(self, origin: str) -> StreamLog:
        site = self.config.sites[self.me]
        log = StreamLog(
            site.folder / "streams" / origin,
            segment_bytes=self.config.segment_bytes,
            max_message_bytes=self.config.max_message_bytes,
            spare_bytes=self.config.max_log_bytes,
        )
        if is_url(site.store):
            try:
                archive = self._archives[origin] = Archive(f"{site.store.rstrip('/')}/streams/{origin}")
                archive.restore(log)
            except BaseException:
                log.close()
                raise
        return log

    def _sync(self, origin: str, log: StreamLog) -> Place:
        """Brings a log to the disk; returns up to where it is persisted."""
        place = log.sync()
        archive = self._archives.get(origin)
        return place if archive is None else archive.end or log.first

    def _sites(self, origin: str) -> Sites:
        return Sites({name: site.zone for name, site in self.config.sites.items()}, origin, tuple(self._acks))

    # Predicates.

    def register(self, name: str, text: str) -> None:
        """Registers a predicate for this site's stream; for those of others once somebody asks for it there."""
        with self.lock:
            self.frontiers[self.me].register(name, text)
            self._texts[name] = text

    def change(self, name: str, text: str) -> None:
        """Changes it for every stream, or for none."""
        with self.lock:
            users = [o for o, frontiers in self.frontiers.items() if name in frontiers.predicates()]
            for origin in users:
                self.frontiers[origin].check(text)
            if not users:
                self.frontiers[self.me].predicate(name)  # says that there is none
            for origin in users:
                if self.frontiers[origin].change(name, text):
                    self._tell(origin, [name])
            self._texts[name] = text

    def frontiers_of(self, origin: str, name: str) -> Frontiers:
        """The frontiers of a stream, among them that of this predicate. The caller holds the lock."""
        frontiers = self.frontiers.get(origin)
        if frontiers is None:
            raise ReplicationError(f"origin: there is no site {origin!r}; there are: {', '.join(self.frontiers)}")
        if name not in frontiers.predicates() and name in self._texts:
            frontiers.register(name, self._texts[name])
        return frontiers

    def compile(self, text: str, origin: str) -> Predicate:
        """A predicate for a stream."""
        with self.lock:
            return compile_predicate(text, self._sites(origin))

    def add_ack(self, ack: str) -> None:
        """Makes an ack type known to predicates."""
        with self.lock:
            if ack not in self._acks:
                self._acks.append(ack)
                self._set_sites()

    # Sites that come and go. What other threads go through is replaced, not changed.

    def add_site(self, name: str, site: Site) -> None:
        """Makes a site known; predicates are resolved anew."""
        with self.lock:
            if name in self.config.sites:
                raise ReplicationError(f"name: there is a site {name!r} already")
            log = self._retired.pop(name, None)
            if log is None:
                log = self._open_log(name)
                self._durable = {**self._durable, name: self._sync(name, log)}
            self.config = replace(self.config, sites={**self.config.sites, name: site})
            self._readers[name] = []
            self.frontiers = {**self.frontiers, name: Frontiers(self._sites(name))}
            self.outboxes = {**self.outboxes, name: Outbox()}
            self.heard = {**self.heard, name: False}
            self.logs = {**self.logs, name: log}
            for ack in ACKS:  # what came later is yet to be verified: `keep` does it
                self._own[name, ack] = 0
                self.raise_own(name, ack, self._durable[name].seq)
            for origin, monitored in self._monitors:  # from before it was removed
                if origin == name:
                    self.frontiers_of(name, monitored)
            self.raise_own(name, RECEIVED, log.tail.seq)
            self._set_sites()
        self.work.set()

    def remove_site(self, name: str) -> None:
        """Forgets a site, but not its log; predicates are resolved anew, or nothing changes if one names it."""
        with self.lock:
            if name == self.me or name not in self.config.sites:
                others = ", ".join(self.outboxes)
                raise ReplicationError(f"name: expected one of the other sites ({others}), got {name!r}")
            left = {other: site for other, site in self.config.sites.items() if other != name}
            former, self.config = self.config, replace(self.config, sites=left)
            try:
                for origin in left:
                    self.frontiers[origin].check_sites(self._sites(origin))
            except ReplicationError:
                self.config = former
                raise
            self.outboxes[name].close()
            self.frontiers[name].fail_waiters(
                ReplicationError(f"site {name} was removed while its message was waited for")
            )
            self._retired[name] = self.logs[name]
            self.outboxes, self.heard = _without(self.outboxes, name), _without(self.heard, name)
            self.logs, self.frontiers = _without(self.logs, name), _without(self.frontiers, name)
            self._own = {(origin, ack): seq for (origin, ack), seq in self._own.items() if origin != name}
            self._queue = {key: None for key in self._queue if key[0] != name}
            self._set_sites()

    def _set_sites(self) -> None:
        for origin, frontiers in self.frontiers.items():
            self._tell(origin, frontiers.set_sites(self._sites(origin)))

    # Counters.

    def raise_own(self, origin: str, ack: str, seq: int) -> None:
        """This site has done something with all messages of a stream up to this one."""
        with self.lock:
            if seq <= self._own.get((origin, ack), 0) or origin not in self.frontiers:
                return
            self._own[origin, ack] = seq
            for outbox in self.outboxes.values():
                outbox.post(origin, ack, seq)
            if ack != TRUNCATED:
                self._tell(origin, self.frontiers[origin].raise_to(Counter(self.me, ack), seq))

    def own(self) -> dict[tuple[str, str], int]:
        """All counters of this site."""
        with self.lock:
            return dict(self._own)

    def hear(self, site: str, counters: dict[tuple[str, str], int], *, all_of_them: bool) -> None:
        """Takes another site's counters; ``all_of_them``: what is lower than before or missing, it has lost."""
        with self.lock:
            if all_of_them:
                lost = {(origin, ack): 0 for origin, known in self.frontiers.items() for ack in known.acks_of(site)}
                counters = {**lost, **counters}
            for (origin, ack), seq in counters.items():
                if origin not in self.frontiers:
                    continue
                if ack == TRUNCATED:
                    if site == origin:
                        self.forget(origin, seq)
                    continue
                counter = Counter(site, ack)
                frontiers = self.frontiers[origin]
                before = frontiers.counter(counter)
                if seq > before:
                    self._tell(origin, frontiers.raise_to(counter, seq))
                elif seq < before and all_of_them:
                    _logger.warning(
                        "%s had %s messages of %s up to %d, and now only up to %d", site, ack, origin, before, seq
                    )
                    frontiers.lower_to(counter, seq)
            if all_of_them:
                self.set_heard(site, True)

    def set_heard(self, site: str, known: bool) -> None:
        """Takes note of whether a site's counters are known, as of now."""
        with self.lock:
            if site in self.heard:
                self.heard[site] = known
                self._moved.notify_all()

    def ask(self) -> int:
        """Asks all sites for their counters as of now; see `wait_answered`."""
        with self.lock:
            self._question += 1
            for outbox in self.outboxes.values():
                outbox.ask(self._question)
            return self._question

    def set_answered(self, site: str, question: int) -> None:
        """Takes note that all counters that a site had when it was asked are known."""
        with self.lock:
            self._answered[site] = question
            self._moved.notify_all()

    def wait_answered(
        self, question: int, enough: Callable[[set[str]], bool], timeout_s: float, *, all_connected: bool
    ) -> set[str]:
        """Waits until enough sites have answered, or also all that are connected.

        Returns:
            Who has answered, this site among them.
        """
        life = question >> 32

        def answered() -> set[str]:
            others = {s for s, q in self._answered.items() if q >= question and q >> 32 == life and s in self.heard}
            return {self.me, *others}

        def is_enough() -> bool:
            found = answered()
            connected = {site for site, known in self.heard.items() if known}
            return enough(found) and (not all_connected or connected <= found)

        with self.lock:
            self._moved.wait_for(lambda: self.closing.is_set() or is_enough(), timeout_s)
            return answered()

    def _tell(self, origin: str, names: list[str]) -> None:
        for name in names:
            self._queue[origin, name] = None
        if names:
            self._moved.notify_all()

    # Monitors: one thread tells them all.

    def monitor(self, origin: str, name: str, callback: Callable[[int], None]) -> Callable[[], None]:
        """Has the callback told of each move of a frontier; returns what ends this."""
        with self.lock:
            self.frontiers_of(origin, name).predicate(name)
            callbacks = self._monitors.setdefault((origin, name), [])
            callbacks.append(callback)

        def stop() -> None:
            with self.lock, contextlib.suppress(ValueError):
                callbacks.remove(callback)

        return stop

    def tell_monitors(self) -> None:
        """The loop of the thread that calls the monitors."""
        while True:
            with self.lock:
                self._moved.wait_for(lambda: bool(self._queue) or self.closing.is_set())
                if self.closing.is_set():
                    return
                moved, self._queue = self._queue, {}
                calls = []
                for origin, name in moved:
                    if origin not in self.frontiers:
                        continue
                    frontier = self.frontiers[origin].frontier(name)
                    if name == _TRUNCATE:
                        self.forget(origin, frontier)
                    calls += [(callback, frontier) for callback in self._monitors.get((origin, name), [])]
            for callback, frontier in calls:
                callback(frontier)

    # The disk: one thread brings what came to it.

    def forget(self, origin: str, seq: int) -> None:
        """Lets messages up to this one be dropped from the log of a stream, here and, for our own, everywhere."""
        with self.lock:
            if seq <= self._floors.get(origin, 0):
                return
            self._floors[origin] = seq
            if origin == self.me:
                self.raise_own(origin, TRUNCATED, seq)
        self.work.set()

    @contextlib.contextmanager
    def reading(self, origin: str, place: list[int]) -> Iterator[None]:
        """While this lasts, nothing from ``place[0] + 1`` on is dropped from a log."""
        with self.lock:
            self._readers[origin] = [*self._readers[origin], place]
        try:
            yield
        finally:
            with self.lock:
                self._readers[origin] = [p for p in self._readers[origin] if p is not place]

    def keep(self) -> None:
        """The loop of the thread that syncs, verifies and truncates the logs."""
        while not self.closing.is_set():
            self.work.wait(1.0)
            self.work.clear()
            for origin, log in self.logs.items():
                self._keep(origin, log)

    def _keep(self, origin: str, log: StreamLog) -> None:
        durable, archive = self._durable[origin], self._archives.get(origin)
        if log.tail.seq > self._own.get((origin, PERSISTED), 0):
            place = log.sync()
            if archive is not None:
                try:
                    archive.put(log, place)
                except OSError as error:
                    self.trouble[f"store of {origin}"] = f"{self.config.sites[self.me].store}: {error}"
                    return  # and tried again soon
                self.trouble.pop(f"store of {origin}", None)
            self.raise_own(origin, PERSISTED, place.seq)
            if not verify(log, max(durable, log.first), place):
                raise StoreError(f"messages {durable.seq + 1} to {place.seq} of {origin} differ from what was written")
            self.raise_own(origin, VERIFIED, place.seq)
            self._durable[origin] = place
        with self.lock:
            floor = min([self._floors.get(origin, 0), *(place[0] for place in self._readers[origin])])
        if archive is not None:
            floor = min(floor, self._durable[origin].seq)
            try:
                archive.truncate(floor + 1)
            except OSError as error:
                self.trouble[f"store of {origin}"] = f"{self.config.sites[self.me].store}: {error}"
        if floor:
            log.truncate(floor + 1)

    # The end.

    def check(self) -> None:
        """Raises what ended this node, if something did."""
        if self.fault is not None:
            raise ReplicationError(f"site {self.me} stopped: {self.fault}") from self.fault
        if self.closing.is_set():
            raise ClosedError(f"site {self.me} is closed")

    def fail(self, error: BaseException) -> None:
        """Stops the node for a reason that the next call is told."""
        with self.lock:
            self.fault = self.fault or error
        self.stop()

    def stop(self) -> None:
        """Ends all waits."""
        self.closing.set()
        self.work.set()
        for outbox in self.outboxes.values():
            outbox.close()
        with self.lock:
            self._moved.notify_all()
            error = ClosedError(f"site {self.me} was closed while a message was waited for")
            for frontiers in self.frontiers.values():
                frontiers.fail_waiters(self.fault if isinstance(self.fault, Exception) else error)
        for log in (*self.logs.values(), *self._retired.values()):
            log.end_waits()

    def close(self) -> None:
        """Closes the files, once the threads have ended."""
        self._close_files()

    def _close_files(self) -> None:
        for log in (*self.logs.values(), *self._retired.values()):
            log.close()
        if self._store_lock >= 0:
            os.close(self._store_lock)
            self._store_lock = -1


def _without(table: dict[str, _T], name: str) -> dict[str, _T]:
    return {key: value for key, value in table.items() if key != name}


def _locked(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise StoreError(f"{path.parent} is in use by another process; each site needs a store of its own") from None
    return fd
