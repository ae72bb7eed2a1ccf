"""A key/value store that lies at every site; each call says by a predicate what it waits for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from torchext.replication.apps.streams import Follower, deadline_of, left_s, open_database, pack, unpack
from torchext.replication.errors import ReplicationError
from torchext.replication.message import Message
from torchext.replication.node import Node

APPLIED = "kv_applied"  # the ack type
_APP = b"kv"
_TABLES = """
CREATE TABLE IF NOT EXISTS versions(
    key TEXT, clock INTEGER, site TEXT, seq INTEGER, value BLOB, PRIMARY KEY (key, clock, site)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS applied(site TEXT PRIMARY KEY, seq INTEGER);
"""


@dataclass(frozen=True)
class Version:
    """What was put under a key at one time.

    Attributes:
        key: The key.
        clock: Versions of a key are ordered by clock, then site: a Lamport clock, so what a writer had seen is older.
        site: Where it was put.
        seq: Its message in that site's stream.
        value: None if the key was deleted.
    """

    key: str
    clock: int
    site: str
    seq: int
    value: bytes | None = field(repr=False)


class KeyValueStore:
    """The store at one site; safe to use from several threads.

    Every site has all of it, in a SQLite file of its own that survives a crash. Of concurrent puts the one with the
    higher clock wins, at all sites the same. The node may drop messages behind ``MIN($ALLSITES).kv_applied``.

    Example::

        with Node("site.toml", me="paris") as node, KeyValueStore(node, "paris.db") as store:
            store.put("model", b"...", predicate="safe")
            store.get("model", predicate="safe")

    Args:
        node: This site. Close the store before a site is added or removed, and open it anew.
        path: Of the file, for this store alone.
        keep: How many versions of a key are kept.

    Raises:
        ReplicationError: The node's log no longer holds what the file lacks.
        sqlite3.Error: The file is no such file.
    """

    def __init__(self, node: Node, path: str | os.PathLike[str], *, keep: int = 16) -> None:
        if keep < 1:
            raise ReplicationError(f"keep: expected at least 1, got {keep!r}")
        self._node = node
        self._keep = keep
        self._database = open_database(path, _TABLES)
        after = dict(self._database.execute("SELECT site, seq FROM applied"))
        self._clock: int = self._database.execute("SELECT COALESCE(MAX(clock), 0) FROM versions").fetchone()[0]
        self._follower = Follower(node, after, self._apply, ack=APPLIED)
        self._follower.start()
        try:
            # Before anything is put: a clock that was used before the end of a former run is not used again.
            self._follower.catch_up()
        except BaseException:
            self.close()
            raise

    def put(
        self, key: str, value: bytes | None, *, predicate: str | None = None, timeout: float | None = None
    ) -> Version:
        """Puts a value under a key; with a predicate, returns once that is stable.

        Args:
            key: Any text.
            value: None deletes the key.
            predicate: Name of one of the node's; None waits only until this site has it.
            timeout: In seconds, for all of it; None waits for as long as it takes.

        Raises:
            StabilityTimeoutError: It was not stable in time; it is put all the same, and may become so.
            StoreFullError: There is no room; nothing was put.
        """
        deadline = deadline_of(timeout)
        self._follower.check()
        with self._follower.changed:
            self._clock += 1
            clock = self._clock
        head = {"key": key, "clock": clock, "deleted": value is None}
        seq = self._node.send(pack(_APP, head, value or b""), timeout=timeout)
        self._follower.wait_applied(self._node.me, seq, left_s(deadline))
        if predicate is not None:
            self._node.waitfor(seq, predicate, left_s(deadline))
        return Version(key, clock, self._node.me, seq, value)

    def get(self, key: str, *, predicate: str | None = None, timeout: float = 30.0) -> Version | None:
        """The newest version of a key, here or, with a predicate, among those that are stable.

        With a predicate it finds every put that returned before under the same one, at any site: it asks as many sites
        as the predicate's dual wants (see `Node.read_frontier`), and waits until this site has what they tell of. As
        with any read quorum, it may find more than was stable, never less. What came of sites that were removed counts
        as stable.

        Returns:
            The version; its value is None if the key was deleted. None if there is none.

        Raises:
            StabilityTimeoutError: Too few sites answered in time, or what they tell of did not come.
            ReplicationError: None of the versions that are kept is stable.
        """
        self._follower.check()
        if predicate is None:
            return next(self.versions(key), None)
        deadline = deadline_of(timeout)
        frontiers = {}
        for site in self._follower.applied:
            frontiers[site] = self._node.read_frontier(
                predicate, left_s(deadline) or 0.0, origin=site, quorum_only=True
            )
            self._follower.wait_applied(site, frontiers[site], left_s(deadline))
        count = 0
        for version in self.versions(key):
            count += 1
            if version.seq <= frontiers.get(version.site, version.seq):
                return version
        if count == self._keep:
            raise ReplicationError(
                f"key {key!r}: none of the newest {count} versions is stable under {predicate!r}, and older ones are "
                f"not kept; put less often, or give a larger keep than {self._keep}"
            )
        return None

    def versions(self, key: str) -> Iterator[Version]:
        """The versions of a key that are here, newest first."""
        with self._follower.changed:
            rows = self._database.execute(
                "SELECT clock, site, seq, value FROM versions WHERE key = ? ORDER BY clock DESC, site DESC", (key,)
            ).fetchall()
        return (Version(key, *row) for row in rows)

    def keys(self) -> list[str]:
        """All keys that are not deleted, in order."""
        with self._follower.changed:
            newest = self._database.execute("SELECT DISTINCT key FROM versions ORDER BY key").fetchall()
        found = (next(self.versions(key), None) for (key,) in newest)
        return [version.key for version in found if version is not None and version.value is not None]

    def _apply(self, site: str, messages: list[Message]) -> None:
        execute = self._database.execute
        execute("BEGIN")
        try:
            for message in messages:
                content = unpack(_APP, message)
                if content is None:
                    continue
                head, value = content
                key, clock = head["key"], head["clock"]
                self._clock = max(self._clock, clock)
                row = (key, clock, site, message.seq, None if head["deleted"] else value)
                execute("INSERT OR REPLACE INTO versions VALUES (?, ?, ?, ?, ?)", row)
                execute(
                    "DELETE FROM versions WHERE key = ?1 AND (clock, site) <= (SELECT clock, site FROM versions "
                    "WHERE key = ?1 ORDER BY clock DESC, site DESC LIMIT 1 OFFSET ?2)",
                    (key, self._keep),
                )
            execute("INSERT OR REPLACE INTO applied VALUES (?, ?)", (site, messages[-1].seq))
            execute("COMMIT")
        except BaseException:
            execute("ROLLBACK")
            raise

    def close(self) -> None:
        """Ends the threads; the node goes on."""
        self._follower.close()
        self._database.close()

    def __enter__(self) -> KeyValueStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
