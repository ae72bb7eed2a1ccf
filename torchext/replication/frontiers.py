"""Which messages of one stream are stable, under each predicate: counters in, frontiers and answers out.

No threads and no sockets: `node.py` feeds it under its lock and passes on what it says.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from torchext._optional import require_native
from torchext.replication.errors import ReplicationError
from torchext.replication.predicates import Counter, Predicate, Sites, compile_predicate

Callback = Callable[[int], None]


@dataclass(eq=False)
class _Version:
    """A predicate as it was written at one time; kept for as long as somebody waits under it."""

    predicate: Predicate
    id: int  # in the native core
    waiters: list[tuple[int, int, Future[int]]] = field(default_factory=list)  # a heap by sequence number


@dataclass(eq=False)
class _Named:
    current: _Version
    said: int = 0  # the frontier: never goes back, whatever becomes of counters and predicates
    old: list[_Version] = field(default_factory=list)


class Frontiers:
    """Counters of one origin's messages at each site, and the predicates over them. Not thread-safe.

    Args:
        sites: The sites, with the origin whose stream this is.
    """

    def __init__(self, sites: Sites) -> None:
        require_native()
        from torchext._native import replication as native

        self._sites = sites
        self._counters = native.Counters()
        self._index: dict[Counter, int] = {}
        self._named: dict[str, _Named] = {}
        self._users: dict[int, tuple[_Named, _Version]] = {}  # by id in the native core
        self._tickets = itertools.count()

    def register(self, name: str, text: str) -> None:
        """Adds a predicate under a name of its own.

        Raises:
            ReplicationError: The name is taken.
            PredicateError: See `compile_predicate`.
        """
        if name in self._named:
            raise ReplicationError(f"predicate {name!r} is there already; use change_predicate to change it")
        version = self._compile(text)
        named = _Named(version)
        named.said = self._counters.value(version.id)
        self._named[name] = named
        self._users[version.id] = named, version

    def change(self, name: str, text: str) -> bool:
        """Puts another predicate in its place; whoever waits stays with the one that they came with.

        Returns:
            Whether the frontier moved by this.
        """
        named = self._get(name)
        version = self._compile(text)
        former = named.current
        named.current = version
        self._users[version.id] = named, version
        if former.waiters:
            named.old.append(former)
        else:
            self._drop(former)
        before = named.said
        named.said = max(before, self._counters.value(version.id))
        return named.said > before

    def check(self, text: str) -> None:
        """Raises PredicateError if a predicate does not fit this stream."""
        compile_predicate(text, self._sites)

    def check_sites(self, sites: Sites) -> None:
        """Raises PredicateError if a predicate does not fit other sites."""
        for named in self._named.values():
            compile_predicate(named.current.predicate.text, sites)

    def set_sites(self, sites: Sites) -> list[str]:
        """Resolves all predicates anew against other sites; nothing changes if one of them is refused.

        Returns:
            Names of the predicates whose frontier moved by this.
        """
        self.check_sites(sites)
        self._sites = sites
        return [name for name, named in self._named.items() if self.change(name, named.current.predicate.text)]

    def raise_to(self, counter: Counter, value: int) -> list[str]:
        """Takes an ack; answers the waiters that it satisfies. A value that is not news is ignored.

        Returns:
            Names of the predicates whose frontier moved.
        """
        moved = self._counters.raise_to(self._slot(counter), value)
        if moved is None:
            return []
        names: list[str] = []
        for id in moved:
            named, version = self._users[id]
            reached = self._counters.value(id)
            while version.waiters and version.waiters[0][0] <= reached:
                future = heapq.heappop(version.waiters)[2]
                if future.set_running_or_notify_cancel():
                    future.set_result(reached)
            if version is not named.current:
                if not version.waiters:
                    named.old.remove(version)
                    self._drop(version)
            elif reached > named.said:
                named.said = reached
                names.extend(name for name, other in self._named.items() if other is named)
        return names

    def lower_to(self, counter: Counter, value: int) -> None:
        """Takes note that a site has lost what it had acknowledged. Frontiers stay: they have been said."""
        self._counters.lower(self._slot(counter), value)

    def counter(self, counter: Counter) -> int:
        """The highest sequence number that this site has acknowledged in this way; 0 if none."""
        index = self._index.get(counter)
        return 0 if index is None else self._counters.counter(index)

    def acks_of(self, site: str) -> list[str]:
        """The ack types for which there is a counter of a site."""
        return [counter.ack for counter in self._index if counter.site == site]

    def frontier(self, name: str) -> int:
        """All messages up to this sequence number are stable under the predicate; 0 if none."""
        return self._get(name).said

    def wait(self, seq: int, name: str) -> Future[int]:
        """A future that is done once the message is stable under the predicate as it is now; it gives the frontier."""
        named = self._get(name)
        future: Future[int] = Future()
        if seq <= named.said:
            future.set_running_or_notify_cancel()
            future.set_result(named.said)
        else:
            heapq.heappush(named.current.waiters, (seq, next(self._tickets), future))
        return future

    def abandon(self, future: Future[int]) -> None:
        """Forgets a wait that nobody is interested in any more."""
        future.cancel()
        for named, version in list(self._users.values()):
            kept = [waiter for waiter in version.waiters if waiter[2] is not future]
            if len(kept) != len(version.waiters):
                heapq.heapify(kept)
                version.waiters = kept
                if not kept and version is not named.current:
                    named.old.remove(version)
                    self._drop(version)

    def fail_waiters(self, error: Exception) -> None:
        """Ends all waits with an error."""
        for _, version in self._users.values():
            for _, _, future in version.waiters:
                if future.set_running_or_notify_cancel():
                    future.set_exception(error)
            version.waiters.clear()

    def predicates(self) -> dict[str, str]:
        """The text of each predicate."""
        return {name: named.current.predicate.text for name, named in self._named.items()}

    def predicate(self, name: str) -> Predicate:
        """A predicate as it is now."""
        return self._get(name).current.predicate

    def behind(self, seq: int, name: str) -> dict[Counter, int]:
        """The counters of the predicate that have not reached a message, and where they are."""
        counters = {counter: self.counter(counter) for counter in self.predicate(name).counters()}
        return {counter: value for counter, value in counters.items() if value < seq}

    def _get(self, name: str) -> _Named:
        named = self._named.get(name)
        if named is None:
            known = ", ".join(sorted(self._named)) or "none"
            raise ReplicationError(f"there is no predicate {name!r}; register it first (there are: {known})")
        return named

    def _compile(self, text: str) -> _Version:
        predicate = compile_predicate(text, self._sites)
        index: Mapping[Counter, int] = {counter: self._slot(counter) for counter in predicate.counters()}
        return _Version(predicate, self._counters.add(predicate.code(index)))

    def _drop(self, version: _Version) -> None:
        self._counters.remove(version.id)
        del self._users[version.id]

    def _slot(self, counter: Counter) -> int:
        index = self._index.get(counter)
        if index is None:
            index = self._index[counter] = self._counters.add_counter()
        return index
