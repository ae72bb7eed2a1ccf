"""Sites whose stores are file systems of fsspec: what they call persisted is there, and enough to start from."""

from __future__ import annotations

import random
import shutil
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.replication.sites import KEY, reserve_port
from tests.replication.test_faults import wait_until
from torchext.replication import ConfigError, Node, StabilityTimeoutError, StoreError, load_config

PREDICATES = {"paris": "MIN(paris).verified", "safe": "MIN($ALLSITES).persisted"}


class Stored:
    """Two sites: paris with a store at a URL, tokyo with a folder."""

    def __init__(self, folder: Path, url: str, **settings: Any) -> None:
        self.cache = folder / "cache"
        self.url = url
        self._ports = [reserve_port(), reserve_port()]
        addresses = [f"127.0.0.1:{sock.getsockname()[1]}" for sock in self._ports]
        sites = {
            "paris": {"address": addresses[0], "store": url, "cache": str(self.cache)},
            "tokyo": {"address": addresses[1], "store": str(folder / "tokyo")},
        }
        self.config = {"key": KEY, "sites": sites, "segment_bytes": 2 << 20, "predicates": PREDICATES, **settings}
        self.nodes: dict[str, Node] = {}

    def open(self, site: str) -> Node:
        node = self.nodes[site] = Node(self.config, me=site)
        return node

    def objects(self) -> list[str]:
        files, folder = fsspec.core.url_to_fs(self.url)
        found: list[str] = files.find(f"{folder}/streams/paris")
        return sorted(found)

    def close(self) -> None:
        for node in self.nodes.values():
            node.close()
        for sock in self._ports:
            sock.close()


@pytest.fixture(params=["file", "memory"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stored]:
    url = f"file://{tmp_path}/bucket" if request.param == "file" else f"memory://{uuid.uuid4().hex}"
    made = Stored(tmp_path, url)
    yield made
    made.close()
    if request.param == "memory":
        MemoryFileSystem().rm(url, recursive=True)


def test_site_whose_machine_is_gone_starts_from_its_store(stored: Stored) -> None:
    data = random.Random(0).randbytes(5 << 20)  # in three log files
    with stored.open("paris") as paris, stored.open("tokyo") as tokyo:
        paris.send(b"first")
        seq = paris.send(data)
        tokyo.send(b"of tokyo")
        paris.waitfor(seq, "safe", 30)
        paris.waitfor(seq, "paris", 30)
        paris.waitfor(1, "paris", 30, origin="tokyo")
    shutil.rmtree(stored.cache)
    with stored.open("paris") as paris:
        assert paris.get_stability_frontier("paris") == seq
        assert [m.payload for m in paris.receive("paris", timeout=0)] == [b"first", data]
        assert next(paris.receive("tokyo", timeout=0)).payload == b"of tokyo"
        paris.waitfor(paris.send(b"more"), "paris", 30)
    with stored.open("paris") as paris:  # with what is in the cache
        assert paris.get_stability_frontier("paris") == seq + 1


def test_cache_that_lost_its_end_is_filled_from_the_middle_of_a_part(stored: Stored) -> None:
    with stored.open("paris") as paris:
        for _ in range(4):  # together, as parts hold what came while the one before was written
            seq = paris.send(bytes(100_000))
        paris.waitfor(seq, "paris", 30)
    (log,) = (stored.cache / "streams" / "paris").glob("*.seg")
    with open(log, "r+b") as file:
        file.seek(250_000)  # within the third message
        file.write(bytes(200_000))
    with stored.open("paris") as paris:
        assert paris.last("paris") == seq
        assert [m.payload for m in paris.receive("paris", timeout=0)] == 4 * [bytes(100_000)]
        assert paris.send(b"more") == seq + 1


def test_damaged_or_foreign_part_is_refused(stored: Stored) -> None:
    with stored.open("paris") as paris:
        paris.waitfor(paris.send(b"first"), "paris", 30)
        paris.waitfor(paris.send(b"second"), "paris", 30)
    files, _ = fsspec.core.url_to_fs(stored.url)
    *_, last = stored.objects()
    data = bytearray(files.cat_file(last))
    data[-1] ^= 1
    files.pipe_file(last, bytes(data))
    shutil.rmtree(stored.cache)
    with pytest.raises(StoreError, match=r"a checksum|is damaged after message"):
        stored.open("paris")
    folder, _, name = last.rpartition("/")
    files.mv(last, f"{folder}/{'f' * 16}{name[16:]}")
    with pytest.raises(StoreError, match=r"does not go on from where .* ends; give each site a store of its own"):
        stored.open("paris")


def test_truncation_removes_objects_and_a_restart_begins_after_them(tmp_path: Path) -> None:
    stored = Stored(tmp_path, f"file://{tmp_path}/bucket", truncate="MIN($ALLSITES).persisted")
    try:
        with stored.open("paris") as paris, stored.open("tokyo"):
            for _ in range(8):
                seq = paris.send(bytes(900_000))
                paris.waitfor(seq, "safe", 30)
            assert wait_until(lambda: len(stored.objects()) < 4)
            assert wait_until(lambda: paris.first("paris") > 4)
        shutil.rmtree(stored.cache)
        with stored.open("paris") as paris:
            first = paris.first("paris")
            assert 1 < first <= seq
            assert [m.seq for m in paris.receive("paris", after=first - 1, timeout=0)] == list(range(first, seq + 1))
    finally:
        stored.close()


def test_store_that_fails_holds_back_persisted_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = threading.Event()
    works.set()
    write = MemoryFileSystem.pipe_file

    def pipe_file(self: MemoryFileSystem, path: str, value: bytes, **options: Any) -> Any:
        written = write(self, path, value, **options)
        if not works.is_set():
            raise OSError("the bucket does not answer")  # and yet has it
        return written

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe_file)
    url = f"memory://{uuid.uuid4().hex}"
    stored = Stored(tmp_path, url)
    try:
        with stored.open("paris") as paris, stored.open("tokyo"):
            paris.waitfor(paris.send(b"first"), "safe", 30)
            works.clear()
            seq = paris.send(b"second")
            assert wait_until(lambda: "store of paris" in paris.status()["trouble"])
            assert "the bucket does not answer" in paris.status()["trouble"]["store of paris"]
            with pytest.raises(StabilityTimeoutError, match=r"paris.persisted is at 1, 1 behind"):
                paris.waitfor(seq, "safe", 0.2)
            seq = paris.send(b"third")
            works.set()
            paris.waitfor(seq, "safe", 30)
            assert paris.status()["trouble"] == {}
        shutil.rmtree(stored.cache)
        with stored.open("paris") as paris:
            assert [m.payload for m in paris.receive("paris", timeout=0)] == [b"first", b"second", b"third"]
    finally:
        stored.close()
        MemoryFileSystem().rm(url, recursive=True)


@pytest.mark.parametrize("site", [{"store": "s3://bucket/a"}, {"store": "folder", "cache": "other"}])
def test_url_and_cache_go_together(site: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="a store that is a URL, and no other, goes with cache"):
        load_config({"key": KEY, "sites": {"a": {"address": "h:1", **site}}})
