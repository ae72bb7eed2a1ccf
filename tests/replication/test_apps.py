"""The applications at two sites: what is put, saved or published at one is found at the other, whatever happens."""

from __future__ import annotations

import contextlib
import io
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.replication.sites import ROOT
from tests.replication.test_faults import wait_until
from tests.replication.test_node import Pair
from torchext.replication import Node, ReplicationError, StabilityTimeoutError
from torchext.replication.apps import Delivery, FolderSync, KeyValueStore, PubSub, chunks

PREDICATES = {"safe": "MIN($ALLSITES).persisted", "here": "MIN($MYSITE).persisted"}


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path, predicates=PREDICATES)
    yield made
    made.close()


# The key/value store.


def test_what_is_put_at_one_site_is_found_at_the_other(pair: Pair, tmp_path: Path) -> None:
    with KeyValueStore(pair.paris, tmp_path / "p.db") as paris, KeyValueStore(pair.tokyo, tmp_path / "t.db") as tokyo:
        paris.put("a", b"1", predicate="safe", timeout=30)
        paris.put("b", b"\0" * 100, predicate="safe", timeout=30)
        found = tokyo.get("a", predicate="safe")
        assert found is not None
        assert (found.value, found.site, found.key) == (b"1", "paris", "a")
        tokyo.put("a", b"2", predicate="safe", timeout=30)
        tokyo.put("c", b"3", predicate="safe", timeout=30)
        found = paris.get("a", predicate="safe")
        assert found is not None
        assert found.value == b"2"  # tokyo had seen paris's
        assert [version.value for version in paris.versions("a")] == [b"2", b"1"]
        assert paris.get("c", predicate="safe") is not None
        assert paris.keys() == ["a", "b", "c"]
        paris.put("b", None, predicate="safe", timeout=30)
        gone = tokyo.get("b", predicate="safe")
        assert gone is not None
        assert gone.value is None
        assert tokyo.keys() == ["a", "c"]
        assert tokyo.get("unknown") is None
        pair.paris.send(b"of another program")  # on the same node: passed over
        paris.put("c", b"4", predicate="safe", timeout=30)
        with pytest.raises(ReplicationError, match="there is no predicate 'other'"):
            paris.put("a", b"5", predicate="other")


def test_concurrent_puts_end_alike_at_both_sites(pair: Pair, tmp_path: Path) -> None:
    with KeyValueStore(pair.paris, tmp_path / "p.db") as paris, KeyValueStore(pair.tokyo, tmp_path / "t.db") as tokyo:

        def put_all(store: KeyValueStore, name: str) -> None:
            for number in range(40):
                store.put(f"key{number % 3}", f"{name} {number}".encode())
            store.put(name, b"done", predicate="safe", timeout=30)

        other = threading.Thread(target=put_all, args=(tokyo, "tokyo"))
        other.start()
        put_all(paris, "paris")
        other.join()
        for key in ("key0", "key1", "key2", "paris", "tokyo"):
            assert paris.get(key, predicate="safe") == tokyo.get(key, predicate="safe") != None  # noqa: E711
            assert list(paris.versions(key)) == list(tokyo.versions(key))


def test_stable_read_gives_the_newest_that_is_stable(pair: Pair, tmp_path: Path) -> None:
    for node in (pair.paris, pair.tokyo):
        node.register_ack("checked")
        node.register_predicate("checked", "MIN(tokyo).checked")
    with KeyValueStore(pair.paris, tmp_path / "p.db", keep=3) as paris:
        old = paris.put("a", b"old", predicate="safe", timeout=30)
        pair.tokyo.ack("paris", old.seq, "checked")
        pair.paris.waitfor(old.seq, "checked", 30)
        paris.put("a", b"new", predicate="here", timeout=30)
        with pytest.raises(StabilityTimeoutError, match="message 3 of paris did not become stable under 'checked'"):
            paris.put("a", b"newer", predicate="checked", timeout=0.2)
        stable = paris.get("a", predicate="checked")
        newest = paris.get("a")
        assert stable is not None
        assert newest is not None
        assert (stable.value, newest.value) == (b"old", b"newer")
        paris.put("a", b"newest", predicate="here", timeout=30)
        with pytest.raises(ReplicationError, match="none of the newest 3 versions is stable under 'checked'"):
            paris.get("a", predicate="checked")


def test_store_outlives_its_messages(tmp_path: Path) -> None:
    pair = Pair(tmp_path, predicates=PREDICATES, acks=["kv_applied"], truncate="MIN($ALLSITES).kv_applied")
    try:
        with KeyValueStore(pair.paris, tmp_path / "p.db") as store, KeyValueStore(pair.tokyo, tmp_path / "t.db"):
            for number in range(12):  # three times a log file
                store.put(f"key{number}", bytes(600_000), timeout=30)
            assert wait_until(lambda: pair.paris.first("paris") > 1)
        with KeyValueStore(pair.paris, tmp_path / "p.db") as store:
            assert len(store.keys()) == 12
            store.put("more", b"1", predicate="safe", timeout=30)
        with pytest.raises(ReplicationError, match="this was closed at site paris"):
            store.put("late", b"1")
        with pytest.raises(ReplicationError, match=r"was dropped|is not there"):  # a file that lacks what is gone
            KeyValueStore(pair.paris, tmp_path / "new.db")
    finally:
        pair.close()


class Program:
    """An application of tokyo in a process of its own."""

    def __init__(self, pair: Pair, folder: Path, app: str, *words: str) -> None:
        lines = [f"key = {pair.config['key']!r}", "segment_bytes = 2097152"]
        for name, site in pair.config["sites"].items():
            lines += [f"[sites.{name}]", *(f"{key} = {value!r}" for key, value in site.items())]
        lines += ["[predicates]", *(f"{key} = {value!r}" for key, value in PREDICATES.items())]
        (folder / "site.toml").write_text("\n".join(lines))
        code = "import tests.replication.no_torch, sys\nfrom torchext.replication.apps.cli import main\n"
        command = [sys.executable, "-c", code + "sys.exit(main(sys.argv[1:]))", app, *words]
        command += ["--config", str(folder / "site.toml"), "--me", "tokyo"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.read()

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def test_killed_program_has_all_that_it_said_to_have(pair: Pair, tmp_path: Path) -> None:
    pair.tokyo.close()
    with KeyValueStore(pair.paris, tmp_path / "p.db") as store:
        with Program(pair, tmp_path, "kv") as program:
            for number in range(20):
                assert program.ask(f"put key{number} value{number}") == f"key{number}: version {number + 1} of tokyo"
            assert program.ask("put a b c d").startswith("error: expected one predicate at most")
            assert program.ask("nonsense").startswith("error: expected: put KEY VALUE")
        with Program(pair, tmp_path, "kv") as program:
            assert program.ask("get key19") == "key19 = value19"
            assert program.ask("put key20 value20 safe") == "key20: version 21 of tokyo"
            assert program.ask("delete key0") == "key0: deleted"
            assert program.ask("get key0") == "key0: nothing"
            assert program.ask("keys").split() == sorted(f"key{n}" for n in range(1, 21))
            assert program.end() == 0
        found = store.get("key20", predicate="safe")
        assert found is not None
        assert (found.value, found.clock) == (b"value20", 21)


def test_programs_for_folders_and_topics(pair: Pair, tmp_path: Path) -> None:
    pair.tokyo.close()
    here, there = tmp_path / "here", tmp_path / "there"
    with FolderSync(pair.paris, here, interval_s=0.05), Program(pair, tmp_path, "folder", str(there)) as program:
        assert program.read() == f"{there} is kept as at paris"
        (there / "a").write_bytes(b"1")
        assert wait_until(lambda: (here / "a").exists() and (here / "a").read_bytes() == b"1")
        assert program.end() == 0
    with PubSub(pair.paris, tmp_path / "p.db") as topics:
        with Program(pair, tmp_path, "pubsub", "--subscribe", "news") as program:
            assert wait_until(lambda: topics.subscribers("news") == ["tokyo"])
            topics.wait_delivered("news", topics.publish("news", b"from afar"), 30)
            assert program.read() == "news from paris: from afar"
            assert program.ask("alone").startswith("error: expected: TOPIC TEXT")
            assert program.ask("other to nobody") == "other: delivered at nobody"
            assert program.end() == 0
        assert wait_until(lambda: topics.subscribers("news") == [])  # it went, and said so


# The folder.


class Folders:
    """A folder at each of two sites."""

    def __init__(self, pair: Pair, folder: Path) -> None:
        self.pair = pair
        self.paths = {"paris": folder / "files-paris", "tokyo": folder / "files-tokyo"}
        self.syncs: dict[str, FolderSync] = {}
        self.open("paris")
        self.open("tokyo")

    def open(self, site: str) -> None:
        node = {"paris": self.pair.paris, "tokyo": self.pair.tokyo}[site]
        self.syncs[site] = FolderSync(node, self.paths[site], interval_s=0.05)

    def close(self) -> None:
        for sync in self.syncs.values():
            sync.close()

    def write(self, site: str, path: str, data: bytes) -> None:
        target = self.paths[site] / path
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = self.paths[site].with_suffix(".new")  # a half-written file may be read, and part of it sent
        beside.write_bytes(data)
        os.replace(beside, target)

    def contents(self, site: str) -> dict[str, bytes]:
        found = {}
        for root, folders, names in os.walk(self.paths[site]):  # passes over what goes meanwhile
            folders[:] = [name for name in folders if name != ".torchext-folder"]
            for path in (Path(root, name) for name in names):
                with contextlib.suppress(FileNotFoundError):
                    found[path.relative_to(self.paths[site]).as_posix()] = path.read_bytes()
        return found

    def become(self, files: dict[str, bytes]) -> bool:
        """Waits until both folders hold just these files."""
        for sync in self.syncs.values():
            sync.check()
        return wait_until(lambda: all(self.contents(site) == files for site in self.paths))

    def num_chunks_sent(self) -> int:
        nodes = {"paris": self.pair.paris, "tokyo": self.pair.tokyo}
        messages = [m for name, node in nodes.items() for m in node.receive(name, timeout=0)]
        return sum(b'{"chunk"' in m.payload[:100] for m in messages)


@pytest.fixture
def folders(pair: Pair, tmp_path: Path) -> Iterator[Folders]:
    made = Folders(pair, tmp_path)
    yield made
    made.close()


def test_files_come_change_and_go_at_both_sites(folders: Folders) -> None:
    data = random.Random(0).randbytes(700_000)
    folders.write("paris", "a.txt", b"one")
    folders.write("paris", "deep/er/b.bin", data)
    folders.write("tokyo", "empty", b"")
    os.symlink("a.txt", folders.paths["paris"] / "link")  # not carried, and read as a file only by this test
    os.unlink(folders.paths["paris"] / "link")
    assert folders.become({"a.txt": b"one", "deep/er/b.bin": data, "empty": b""})
    folders.write("tokyo", "a.txt", b"two")
    (folders.paths["tokyo"] / "deep/er/b.bin").chmod(0o755)
    (folders.paths["paris"] / "empty").unlink()
    assert folders.become({"a.txt": b"two", "deep/er/b.bin": data})
    assert wait_until(lambda: os.access(folders.paths["paris"] / "deep/er/b.bin", os.X_OK))
    (folders.paths["tokyo"] / "deep/er/b.bin").unlink()
    assert folders.become({"a.txt": b"two"})
    assert wait_until(lambda: not (folders.paths["paris"] / "deep").exists())
    assert folders.syncs["paris"].num_waiting == folders.syncs["tokyo"].num_waiting == 0


def test_content_that_was_sent_once_is_not_sent_again(folders: Folders) -> None:
    data = random.Random(1).randbytes(3_000_000)
    folders.write("paris", "first", data)
    assert folders.become({"first": data})
    num_chunks = folders.num_chunks_sent()
    assert num_chunks > 10
    folders.write("tokyo", "second", data)  # sent by paris before
    assert folders.become({"first": data, "second": data})
    assert folders.num_chunks_sent() == num_chunks
    folders.write("paris", "first", b"inserted" + data)  # moves all of it
    assert folders.become({"first": b"inserted" + data, "second": data})
    assert folders.num_chunks_sent() == num_chunks + 1


def test_changes_that_clash_leave_both(folders: Folders) -> None:
    folders.write("paris", "notes.txt", b"first")
    folders.write("paris", "same.txt", b"0")
    assert folders.become({"notes.txt": b"first", "same.txt": b"0"})
    folders.close()
    for site in ("paris", "tokyo"):  # neither sees the other's
        folders.write(site, "notes.txt", f"of {site}".encode())
        folders.write(site, "same.txt", b"alike")
        folders.write(site, f"new {site}.txt", b"")
    folders.open("paris")
    folders.syncs["paris"].scan()
    folders.open("tokyo")
    assert wait_until(lambda: len(folders.contents("paris")) == len(folders.contents("tokyo")) == 5)
    assert wait_until(lambda: folders.contents("paris") == folders.contents("tokyo"))
    found = folders.contents("paris")
    (copy,) = (name for name in found if name.startswith("notes (conflict "))
    assert {found["notes.txt"], found[copy]} == {b"of paris", b"of tokyo"}
    assert found["same.txt"] == b"alike"  # no clash: they agree


def test_change_that_clashes_with_a_deletion_is_kept(folders: Folders) -> None:
    folders.write("paris", "a", b"1")
    assert folders.become({"a": b"1"})
    folders.close()
    folders.write("paris", "a", b"changed")
    (folders.paths["tokyo"] / "a").unlink()
    folders.open("paris")
    folders.syncs["paris"].scan()
    folders.open("tokyo")

    def kept(site: str) -> bool:
        return [name for name, data in folders.contents(site).items() if data == b"changed"] != []

    assert wait_until(lambda: kept("paris") and kept("tokyo"))


def test_file_in_the_way_of_a_folder_waits(folders: Folders) -> None:
    folders.syncs["tokyo"].close()
    folders.write("tokyo", "x", b"a file")
    folders.write("paris", "x/y", b"in a folder")
    folders.syncs["paris"].scan()
    folders.open("tokyo")
    assert wait_until(lambda: folders.syncs["tokyo"].num_waiting == 1)
    assert wait_until(lambda: folders.syncs["paris"].num_waiting == 1)
    (folders.paths["tokyo"] / "x").rename(folders.paths["tokyo"] / "z")
    assert folders.become({"x/y": b"in a folder", "z": b"a file"})


@given(seed=st.integers(0, 1000), size=st.integers(0, 1_200_000), zeros=st.booleans())
@settings(max_examples=15)
def test_chunks_are_the_file_cut_where_its_content_says(seed: int, size: int, zeros: bool) -> None:
    data = bytes(size) if zeros else random.Random(seed).randbytes(size)
    pieces = list(chunks.split(io.BytesIO(data)))
    assert b"".join(pieces) == data
    assert all(chunks.MIN_BYTES <= len(piece) <= chunks.MAX_BYTES for piece in pieces[:-1])
    gear = [int(value) for value in chunks._GEAR]
    for cut in chunks._cuts(data[:3000]) + chunks._cuts(data[-70_000:])[:2]:
        assert cut > 0
    tail, hashed = data[-70_000:], 0
    cuts = []
    for at, byte in enumerate(tail):  # a byte at a time, as gear hashing is defined
        hashed = ((hashed << 1) + gear[byte]) & 0xFFFFFFFF
        if hashed & 0xFFFF == 0:
            cuts.append(at + 1)
    assert chunks._cuts(tail) == cuts


# Publish and subscribe.


def test_message_is_delivered_once_its_subscribers_are_done(pair: Pair, tmp_path: Path) -> None:
    with PubSub(pair.paris, tmp_path / "p.db") as paris, PubSub(pair.tokyo, tmp_path / "t.db") as tokyo:
        seq = paris.publish("news", b"to nobody")
        paris.wait_delivered("news", seq, 30)
        assert pair.tokyo.wait_received("paris", seq, 30)
        with tokyo.subscribe("news", "reader") as reader, paris.subscribe("other", "local") as local:
            assert wait_until(lambda: paris.subscribers("news") == ["tokyo"])
            seq = paris.publish("news", b"1")
            paris.publish("other", b"2")
            got = reader.get(30)
            assert got == Delivery("news", "paris", seq, b"1")
            with pytest.raises(StabilityTimeoutError, match=r"topic 'news': message .* tokyo.done_news"):
                paris.wait_delivered("news", seq, 0.1)
            reader.done()
            paris.wait_delivered("news", seq, 30)
            assert reader.get(0.3) is None  # nothing of the other topic
            other = local.get(30)
            assert other is not None
            assert other.payload == b"2"
            with pytest.raises(ReplicationError, match="there is a subscriber 'reader' of topic 'news' at tokyo"):
                tokyo.subscribe("news", "reader")
            waiting = paris.publish("news", b"3")
        # It has gone without having handled that, and nobody waits for it.
        paris.wait_delivered("news", waiting, 30)
        assert paris.subscribers("news") == []
        with tokyo.subscribe("news", "reader") as reader:  # ... and goes on where it was
            got = reader.get(30)
            assert got is not None
            assert (got.seq, got.payload) == (waiting, b"3")
        with tokyo.subscribe("news", "reader") as reader:  # again: it did not say that it was done
            got = reader.get(30)
            assert got is not None
            assert got.seq == waiting
            reader.close(forget=True)


def test_subscribers_of_both_sites_get_all_in_order(pair: Pair, tmp_path: Path) -> None:
    with PubSub(pair.paris, tmp_path / "p.db") as paris, PubSub(pair.tokyo, tmp_path / "t.db") as tokyo:
        readers = [site.subscribe("news", name) for site in (paris, tokyo) for name in ("one", "two")]
        seen: list[list[Delivery]] = [[] for _ in readers]

        def read(number: int) -> None:
            for delivery in readers[number]:
                seen[number].append(delivery)

        threads = [threading.Thread(target=read, args=(number,)) for number in range(len(readers))]
        for thread in threads:
            thread.start()
        assert wait_until(lambda: paris.subscribers("news") == tokyo.subscribers("news") == ["paris", "tokyo"])
        for number in range(30):
            last = paris.publish("news", b"p%d" % number), tokyo.publish("news", b"t%d" % number)
        paris.wait_delivered("news", last[0], 30)
        tokyo.wait_delivered("news", last[1], 30)
        for reader in readers:
            reader.close()
        for thread in threads:
            thread.join()
        for deliveries in seen:
            for site, letter in (("paris", b"p"), ("tokyo", b"t")):
                payloads = [d.payload for d in deliveries if d.site == site]
                assert payloads == [b"%s%d" % (letter, number) for number in range(30)]


def test_lost_site_is_waited_for_no_longer_and_catches_up(pair: Pair, tmp_path: Path) -> None:
    with PubSub(pair.paris, tmp_path / "p.db", patience_s=0.5) as paris:
        with PubSub(pair.tokyo, tmp_path / "t.db") as tokyo:
            reader = tokyo.subscribe("news", "reader")
            assert wait_until(lambda: paris.subscribers("news") == ["tokyo"])
            seq = paris.publish("news", b"1")
            assert reader.get(30) is not None
            reader.done()
            paris.wait_delivered("news", seq, 30)
        pair.tokyo.close()
        seq = paris.publish("news", b"2")
        paris.wait_delivered("news", seq, 30)  # once it is given up
        assert paris.subscribers("news") == []
        pair.tokyo = Node(pair.config, me="tokyo")
        with PubSub(pair.tokyo, tmp_path / "t.db") as tokyo:
            assert wait_until(lambda: paris.subscribers("news") == ["tokyo"])
            with tokyo.subscribe("news", "reader") as reader:
                got = reader.get(30)
                assert got is not None
                assert (got.seq, got.payload) == (seq, b"2")
                more = paris.publish("news", b"3")
                got = reader.get(30)
                assert got is not None
                assert got.payload == b"3"
                reader.done()
                paris.wait_delivered("news", more, 30)


def test_site_that_was_removed_is_done_without(pair: Pair, tmp_path: Path) -> None:
    with KeyValueStore(pair.paris, tmp_path / "kv.db") as store, PubSub(pair.paris, tmp_path / "topics.db") as topics:
        with KeyValueStore(pair.tokyo, tmp_path / "t.db") as theirs:
            theirs.put("a", b"of tokyo", predicate="safe", timeout=30)
        with PubSub(pair.tokyo, tmp_path / "t.db2") as others:
            others.subscribe("news", "reader")
            assert wait_until(lambda: topics.subscribers("news") == ["tokyo"])
            topics.subscribe("news", "reader").close()
        assert store.get("a", predicate="safe") is not None
    pair.paris.change_predicate("topic_news", 'MIN("paris").persisted')
    pair.paris.remove_site("tokyo")
    with KeyValueStore(pair.paris, tmp_path / "kv.db") as store, PubSub(pair.paris, tmp_path / "topics.db") as topics:
        found = store.get("a", predicate="safe")
        assert found is not None
        assert found.value == b"of tokyo"
        with topics.subscribe("news", "reader") as reader:
            assert topics.subscribers("news") == ["paris"]
            seq = topics.publish("news", b"1")
            assert reader.get(30) == Delivery("news", "paris", seq, b"1")
            reader.done()
            topics.wait_delivered("news", seq, 30)


@pytest.mark.parametrize("app", [KeyValueStore, PubSub])
def test_end_of_the_node_is_told(pair: Pair, tmp_path: Path, app: Any) -> None:
    made = app(pair.paris, tmp_path / "p.db")
    pair.paris.close()
    with pytest.raises(ReplicationError, match="site paris is closed"):
        made.put("a", b"1") if app is KeyValueStore else made.publish("a", b"1")
    made.close()
    (tmp_path / "text.db").write_text("no database" * 1000)
    with pytest.raises(sqlite3.DatabaseError):
        app(pair.tokyo, tmp_path / "text.db")
