"""Publish and subscribe across sites: a message is delivered once all sites that have subscribers are done with it.

Which sites those are changes while it runs: with each subscriber that comes or goes, and with each site that is lost,
the predicate of the topic is changed, and nobody waits for a site that nobody listens at.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torchext.replication.apps.streams import Follower, deadline_of, left_s, open_database, pack, unpack
from torchext.replication.errors import ReplicationError, StabilityTimeoutError
from torchext.replication.message import Message
from torchext.replication.node import Node

_APP = b"pubsub"
_QUEUE = 256  # messages that a subscriber is ahead of
_LOOK_S = 0.2  # how often lost sites are looked for
_TABLES = """
CREATE TABLE IF NOT EXISTS places(
    topic TEXT, name TEXT, site TEXT, seq INTEGER, PRIMARY KEY (topic, name, site)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS members(topic TEXT, site TEXT, PRIMARY KEY (topic, site)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS applied(site TEXT PRIMARY KEY, seq INTEGER);
"""


@dataclass(frozen=True)
class Delivery:
    """A message as a subscriber gets it.

    Attributes:
        topic: Its topic.
        site: Where it was published.
        seq: Its number in that site's stream.
        payload: What was published.
    """

    topic: str
    site: str
    seq: int
    payload: bytes = field(repr=False)


class PubSub:
    """Topics at one site; safe to use from several threads.

    What is published goes to all sites; a subscriber reads it at its own. Subscribers have names, and where one was is
    kept in a SQLite file: under the same name it goes on from there, so each message is handled at least once.

    Example::

        with Node("site.toml", me="paris") as node, PubSub(node, "paris.db") as topics:
            seq = topics.publish("weights", b"...")
            topics.wait_delivered("weights", seq, timeout=30)

        with Node("site.toml", me="tokyo") as node, PubSub(node, "tokyo.db") as topics:
            for delivery in topics.subscribe("weights", "evaluation"):
                handle(delivery.payload)

    Args:
        node: This site. Close the topics before a site is added or removed, and open them anew.
        path: Of the file, for these topics alone.
        patience_s: A site that is not heard from for so long, in seconds, is not waited for until it is back; it gets
            what it missed then. None waits for ever.

    Raises:
        ReplicationError: The node's log no longer holds what the file lacks.
    """

    def __init__(self, node: Node, path: str | os.PathLike[str], *, patience_s: float | None = 10.0) -> None:
        self._node = node
        self._patience_s = patience_s
        self._database = open_database(path, _TABLES)
        self._joining = threading.Lock()  # held while a subscriber comes or goes, until that is announced
        self._subscriptions: list[Subscription] = []  # guarded by changed, as are the next three
        self._members: dict[str, set[str]] = {}  # by topic: sites that have subscribers
        self._predicates: dict[str, str] = {}
        self._lost: set[str] = set()
        self._stops: list[Callable[[], None]] = []  # end the monitors
        for topic, site in self._database.execute("SELECT topic, site FROM members"):
            if site in node.sites():
                self._members.setdefault(topic, set()).add(site)
        self._moved = threading.Condition()  # taken by the node's own thread, so guards no more than this:
        self._delivered: dict[str, int] = {}  # by topic: up to which of this site's messages all is delivered
        after = dict(self._database.execute("SELECT site, seq FROM applied"))
        self._follower = Follower(node, after, self._apply)
        self._watcher = threading.Thread(target=self._watch, name=f"topics-at-{node.me}", daemon=True)
        with self._follower.changed:
            for topic in self._members:
                self._adjust(topic)
        self._follower.start()
        self._watcher.start()

    def publish(self, topic: str, payload: bytes, *, timeout: float | None = None) -> int:
        """Publishes a message; returns its number at once, see `wait_delivered`.

        Args:
            topic: A name made of letters, digits and ``_``.
            payload: Any bytes.
            timeout: In seconds, for room in this site's log; see `Node.send`.

        Raises:
            StoreFullError: There is no room; nothing was published.
        """
        self._follower.check()
        with self._follower.changed:
            self._adjust(topic)
        return self._node.send(pack(_APP, {"topic": topic}, payload), timeout=timeout)

    def wait_delivered(self, topic: str, seq: int, timeout: float | None = None) -> None:
        """Waits until all sites that have subscribers of a topic by now are done with a message of this site.

        Raises:
            StabilityTimeoutError: They were not in time; names them.
        """
        deadline = deadline_of(timeout)
        with self._follower.changed:
            self._adjust(topic)  # it may have been published before these topics were opened
        with self._moved:
            while self._delivered.get(topic, 0) < seq:
                self._follower.check()
                left = left_s(deadline)
                if left == 0:
                    break
                self._moved.wait(0.5 if left is None else min(0.5, left))
            else:
                return
        try:
            self._node.waitfor(seq, _predicate_of(topic), 0)
        except StabilityTimeoutError as error:
            raise StabilityTimeoutError(f"topic {topic!r}: {error}", error.sites) from None

    def subscribers(self, topic: str) -> list[str]:
        """The sites that a message of a topic is waited for at, as this site knows it."""
        with self._follower.changed:
            return sorted(self._members.get(topic, set()) - self._lost)

    def subscribe(self, topic: str, name: str) -> Subscription:
        """Begins to get a topic's messages, from all sites.

        Args:
            topic: A name made of letters, digits and ``_``.
            name: Of the subscriber, which no other one at this site has now. One that had it before goes on where it
                was; a new one gets what is published from now on.

        Raises:
            ReplicationError: There is one of this name.
        """
        self._follower.check()
        with self._joining:
            subscription, is_first = self._join(topic, name)
            if is_first:
                self._announce("join", topic)
        return subscription

    def _join(self, topic: str, name: str) -> tuple[Subscription, bool]:
        with self._follower.changed:
            self._follower.check()
            if any((s.topic, s.name) == (topic, name) for s in self._subscriptions):
                raise ReplicationError(f"name: there is a subscriber {name!r} of topic {topic!r} at {self._node.me}")
            rows = "SELECT site, seq FROM places WHERE topic = ? AND name = ?"
            known = dict(self._database.execute(rows, (topic, name)))
            places = {site: known[site] for site in self._follower.applied if site in known}
            for site in self._follower.applied:
                if site not in places:
                    places[site] = self._node.last(site)
                    self._database.execute("INSERT INTO places VALUES (?, ?, ?, ?)", (topic, name, site, places[site]))
            subscription = Subscription(self, self._node, topic, name, places)
            self._subscriptions.append(subscription)
            self._adjust(topic)
            for site in places:
                self._acknowledge(topic, site)  # acks of one's own do not outlive the node
            return subscription, self._node.me not in self._members.get(topic, set())

    def check(self) -> None:
        """Raises what ended this, if something did."""
        self._follower.check()

    def close(self) -> None:
        """Ends the threads and the subscriptions, which go on under their names when they are opened again.

        Until then the other sites wait for them, but for no longer than ``patience_s`` if the node has gone, too.
        """
        with self._follower.changed:
            self._follower.stop()  # so that none joins any more
            subscriptions, self._subscriptions = self._subscriptions, []
            for stop in self._stops:
                stop()
        for subscription in subscriptions:
            subscription._end()
        self._follower.close()
        if self._watcher.is_alive():
            self._watcher.join()
        self._database.close()

    def __enter__(self) -> PubSub:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What the messages say.

    def _apply(self, site: str, messages: list[Message]) -> None:
        for message in messages:
            content = unpack(_APP, message)
            if content is None:
                continue
            head = content[0]
            for verb, change in (("join", "INSERT OR IGNORE INTO"), ("leave", "DELETE FROM")):
                if verb not in head:
                    continue
                topic = head[verb]
                members = self._members.setdefault(topic, set())
                if verb == "join":
                    members.add(site)
                    self._database.execute(f"{change} members VALUES (?, ?)", (topic, site))
                else:
                    members.discard(site)
                    self._database.execute(f"{change} members WHERE topic = ? AND site = ?", (topic, site))
                self._adjust(topic)
        self._database.execute("INSERT OR REPLACE INTO applied VALUES (?, ?)", (site, messages[-1].seq))

    def _adjust(self, topic: str) -> None:
        """Has the topic's predicate ask for the sites that have subscribers. The caller holds `changed`."""
        ack, name = _ack_of(topic), _predicate_of(topic)
        sites = sorted(self._members.get(topic, set()) - self._lost)
        words = ", ".join(f'"{site}".{ack}' for site in sites)
        text = f"MIN({words})" if words else f'MIN("{self._node.me}").persisted'
        if topic not in self._predicates:
            self._node.register_ack(ack)
            if name in self._node.predicates():  # of topics that were closed
                self._node.change_predicate(name, text)
            else:
                self._node.register_predicate(name, text)
            monitor = self._node.monitor_stability_frontier(name, lambda frontier: self._reached(topic, frontier))
            self._stops.append(monitor)
            self._reached(topic, self._node.get_stability_frontier(name))
        elif self._predicates[topic] != text:
            self._node.change_predicate(name, text)
        self._predicates[topic] = text

    def _reached(self, topic: str, frontier: int) -> None:
        with self._moved:
            self._delivered[topic] = max(frontier, self._delivered.get(topic, 0))
            self._moved.notify_all()

    def _announce(self, verb: str, topic: str) -> None:
        seq = self._node.send(pack(_APP, {verb: topic}))
        self._follower.wait_applied(self._node.me, seq, None)

    def _watch(self) -> None:
        try:
            heard = dict.fromkeys(self._follower.applied, time.monotonic())
            while self._patience_s is not None and not self._follower.wait_ended(_LOOK_S):
                self._look_for_lost(heard, self._patience_s)
        except BaseException as error:
            self._follower.fail(error)

    def _look_for_lost(self, heard: dict[str, float], patience_s: float) -> None:
        now = time.monotonic()
        connections = self._node.status()["connections"]
        for site in heard:
            if site == self._node.me or connections.get(site, {}).get("heard", False):
                heard[site] = now
        lost = {site for site, at in heard.items() if now - at >= patience_s}
        with self._follower.changed:
            if lost != self._lost:
                self._lost = lost
                for topic in self._members:
                    self._adjust(topic)

    # What the subscriptions say.

    def _done(self, subscription: Subscription, site: str, seq: int) -> None:
        """A subscriber is done with a site's messages up to this one."""
        with self._follower.changed:
            if subscription not in self._subscriptions:
                return  # it has gone meanwhile: it gets the message again under its name
            subscription.places[site] = seq
            values = (subscription.topic, subscription.name, site, seq)
            self._database.execute("INSERT OR REPLACE INTO places VALUES (?, ?, ?, ?)", values)
            self._acknowledge(subscription.topic, site)

    def _acknowledge(self, topic: str, site: str) -> None:
        places = [s.places[site] for s in self._subscriptions if s.topic == topic]
        if places and min(places) > 0:
            self._node.ack(site, min(places), _ack_of(topic))

    def _leave(self, subscription: Subscription, *, forget: bool) -> None:
        with self._joining:
            if self._remove(subscription, forget=forget):
                self._announce("leave", subscription.topic)

    def _remove(self, subscription: Subscription, *, forget: bool) -> bool:
        """Whether it was the last of its topic."""
        with self._follower.changed:
            if subscription not in self._subscriptions:
                return False
            self._subscriptions.remove(subscription)
            topic = subscription.topic
            if forget:
                query = "DELETE FROM places WHERE topic = ? AND name = ?"
                self._database.execute(query, (topic, subscription.name))
            for site in self._follower.applied:
                self._acknowledge(topic, site)  # the others of this site may be further
            return all(s.topic != topic for s in self._subscriptions)


class Subscription:
    """A subscriber of a topic; goes through its messages, each site's in their order.

    A message counts as handled when the next one is asked for, or on `done`.

    Attributes:
        topic: The topic.
        name: The subscriber's.
        places: By site, up to which message it is done; guarded by the topics.
    """

    def __init__(self, topics: PubSub, node: Node, topic: str, name: str, places: dict[str, int]) -> None:
        self.topic = topic
        self.name = name
        self.places = places
        self._topics = topics
        self._closed = False
        self._current: Delivery | None = None
        self._queue: queue.Queue[Delivery | tuple[str, int] | None] = queue.Queue(_QUEUE)
        self._follower = Follower(node, places, self._take)
        self._follower.start()

    def get(self, timeout: float | None = None) -> Delivery | None:
        """The next message, once the one before is done; None if none came within so many seconds, or it was closed."""
        self.done()
        deadline = deadline_of(timeout)
        while not self._closed:
            self._topics._follower.raise_fault()
            left = left_s(deadline)
            try:
                item = self._queue.get(timeout=0.2 if left is None else min(0.2, left))
            except queue.Empty:
                self._follower.raise_fault()
                if left == 0:
                    return None
                continue
            if isinstance(item, Delivery):
                self._current = item
                return item
            if item is not None:
                self._topics._done(self, *item)
        return None

    def done(self) -> None:
        """Says that the current message is handled."""
        current, self._current = self._current, None
        if current is not None:
            self._topics._done(self, current.site, current.seq)

    def close(self, *, forget: bool = False) -> None:
        """Goes: if it was the last at its site, the site is waited for no longer.

        Args:
            forget: A later subscriber of this name begins anew.
        """
        if not self._closed:
            self._end()
            self._topics._leave(self, forget=forget)

    def _end(self) -> None:
        self._closed = True
        self._follower.stop()
        while True:  # lets a thread go that waits for room
            try:
                self._queue.get_nowait()
            except queue.Empty:
                break
        self._follower.close()

    def __iter__(self) -> Iterator[Delivery]:
        while (delivery := self.get()) is not None:
            yield delivery

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, site: str, messages: list[Message]) -> None:
        for message in messages:
            content = unpack(_APP, message)
            if content is not None and content[0].get("topic") == self.topic:
                self._put(Delivery(self.topic, site, message.seq, content[1]))
        self._put((site, messages[-1].seq))  # nothing of it is left but what was put before

    def _put(self, item: Delivery | tuple[str, int]) -> None:
        while not self._closed:
            try:
                self._queue.put(item, timeout=0.2)
                return
            except queue.Full:
                continue


def _ack_of(topic: str) -> str:
    return f"done_{topic}"


def _predicate_of(topic: str) -> str:
    return f"topic_{topic}"
