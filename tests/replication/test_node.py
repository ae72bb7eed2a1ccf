"""The node as a program uses it; the sites share this process, so no torch and no start-up is paid for."""

from __future__ import annotations

import asyncio
import queue
import random
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.replication.sites import KEY, reserve_port
from torchext.replication import (
    ClosedError,
    Node,
    PredicateError,
    ReplicationError,
    StabilityTimeoutError,
    StoreError,
    StoreFullError,
)
from torchext.replication.predicates import Counter


class Pair:
    """Two sites; ``settings`` hold for both."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self._ports = {name: reserve_port() for name in ("paris", "tokyo")}
        sites = {
            name: {"address": f"127.0.0.1:{sock.getsockname()[1]}", "store": str(folder / name), "zone": f"z{name}"}
            for name, sock in self._ports.items()
        }
        self.config: dict[str, Any] = {"key": KEY, "sites": sites, "segment_bytes": 2 << 20, **settings}
        self.paris = Node(self.config, me="paris")
        self.tokyo = Node(self.config, me="tokyo")

    def close(self) -> None:
        self.paris.close()
        self.tokyo.close()
        for sock in self._ports.values():
            sock.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.close()


def test_bytes_files_and_trees_arrive_as_they_were_sent(pair: Pair, tmp_path: Path) -> None:
    pair.paris.register_predicate("all", "MIN($ALLSITES).verified")
    data = random.Random(0).randbytes(3 << 20)
    (tmp_path / "file").write_bytes(data)
    buffer = bytearray(b"before")
    array = torch.arange(6, dtype=torch.int32).numpy()
    pair.paris.send(buffer)
    buffer[:] = b"after!"  # the message is a copy
    pair.paris.send(b"")
    pair.paris.send(array)
    pair.paris.send(tmp_path / "file")
    seq = pair.paris.send({"weights": torch.arange(10.0), "step": 7})
    pair.paris.waitfor(seq, "all", 30)
    messages = list(pair.tokyo.receive("paris", timeout=0))
    assert [m.seq for m in messages] == [1, 2, 3, 4, 5]
    assert messages[0].payload == b"before"
    assert messages[1].payload == b""
    assert messages[2].payload == array.tobytes()
    messages[3].save(tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == data
    tree = messages[4].tree()
    assert torch.equal(tree["weights"], torch.arange(10.0))
    assert tree["step"] == 7
    with pytest.raises(ReplicationError, match="message 1 of paris is no tree"):
        messages[0].tree()
    assert next(pair.paris.receive("paris", after=3, timeout=0)).payload == data  # one's own as well
    with pytest.raises(ReplicationError, match="is no regular file"):
        pair.paris.send("/dev/null")


def test_receive_goes_on_as_messages_come_and_waits_for_stability(pair: Pair) -> None:
    pair.tokyo.register_ack("checked")
    pair.tokyo.register_predicate("checked", "MIN(paris).checked")
    seen: list[int] = []
    done = threading.Event()

    def read() -> None:
        for message in pair.tokyo.receive("paris", predicate="checked"):
            seen.append(message.seq)
            if message.seq == 3:
                done.set()
                return

    reader = threading.Thread(target=read)
    reader.start()
    pair.paris.register_ack("checked")
    pair.paris.register_predicate("there", "MIN(tokyo).received")
    for _ in range(4):
        seq = pair.paris.send(b"x")
    pair.paris.waitfor(seq, "there", 30)
    pair.paris.ack("paris", 2, "checked")
    pair.tokyo.waitfor(2, "checked", 30, origin="paris")
    with pytest.raises(StabilityTimeoutError):
        pair.tokyo.waitfor(3, "checked", 0.01, origin="paris")
    assert 3 not in seen
    pair.paris.ack("paris", 3, "checked")
    assert done.wait(30)
    reader.join()
    assert seen == [1, 2, 3]


def test_timeout_says_who_is_missing_and_how_far_behind(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    try:
        pair.paris.register_predicate("safe", "MIN($ALLSITES).persisted")
        pair.paris.register_predicate("here", "MIN($MYSITE).persisted")
        pair.paris.waitfor(pair.paris.send(b"1"), "safe", 30)
        pair.tokyo.close()
        pair.paris.send(b"2")
        seq = pair.paris.send(b"3")
        pair.paris.waitfor(seq, "here", 30)  # so that one site alone is missing
        with pytest.raises(StabilityTimeoutError) as caught:
            pair.paris.waitfor(seq, "safe", timeout=0.5)
        assert caught.value.sites == ("tokyo",)
        assert str(caught.value).startswith(
            "message 3 of paris did not become stable under 'safe' = MIN($ALLSITES).persisted within 0.5 s; "
            "stable up to 1. tokyo.persisted is at 1, 2 behind"
        )
        # Under a weaker predicate it is.
        pair.paris.change_predicate("safe", "MIN($MYSITE).persisted")
        assert pair.paris.waitfor(seq, "safe", 30) >= 3
        # And to say so is not taken back under the stronger one.
        pair.paris.change_predicate("safe", "MIN($ALLSITES).persisted")
        assert pair.paris.get_stability_frontier("safe") == 3
        # tokyo may have more than paris knows, but by that predicate never more than paris itself.
        assert pair.paris.read_frontier("safe", 0.1) == 3
        pair.paris.register_predicate("any other", "MAX($ALLSITES - $MYSITE).persisted")
        with pytest.raises(StabilityTimeoutError, match=r"paris has not heard from tokyo within 0.1 s") as caught:
            pair.paris.read_frontier("any other", 0.1)
        assert caught.value.sites == ("tokyo",)
    finally:
        pair.close()


@pytest.mark.parametrize("predicate", ["MIN($ALLSITES).persisted", "MAX(paris).verified", "MIN(tokyo).received"])
def test_what_one_site_was_told_another_reads_at_once(pair: Pair, predicate: str) -> None:
    for node in (pair.paris, pair.tokyo):
        node.register_predicate("safe", predicate)
    for _ in range(30):
        seq = pair.tokyo.send(b"x")
        pair.tokyo.waitfor(seq, "safe", 30)
        assert pair.paris.read_frontier("safe", 30, origin="tokyo", quorum_only=True) == seq
        assert pair.paris.read_frontier("safe", 30, origin="tokyo") == seq
    pair.tokyo.close()
    pair.tokyo = Node(pair.config, me="tokyo")  # answers questions of now, and none that it was asked before
    pair.tokyo.register_predicate("safe", predicate)
    seq = pair.tokyo.send(b"x")
    pair.tokyo.waitfor(seq, "safe", 30)
    assert pair.paris.read_frontier("safe", 30, origin="tokyo") == seq


def test_waits_can_be_awaited_and_end_with_the_node(pair: Pair) -> None:
    pair.paris.register_predicate("safe", "MIN($ALLSITES).persisted")

    async def both() -> list[int]:
        seqs = [pair.paris.send(b"x") for _ in range(2)]
        return await asyncio.gather(*(pair.paris.waitfor_async(seq, "safe", 30) for seq in seqs))

    one, two = asyncio.run(both())
    assert one >= 1
    assert two >= 2
    with pytest.raises(StabilityTimeoutError, match="message 100 of paris"):
        asyncio.run(pair.paris.waitfor_async(100, "safe", 0.01))
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            pair.paris.waitfor(100, "safe")
        except ClosedError as error:
            failed.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    pair.paris.close()
    waiter.join(30)
    assert len(failed) <= 1
    with pytest.raises(ClosedError, match="site paris is closed"):
        pair.paris.send(b"more")
    pair.paris.close()  # again


def test_cancelled_wait_leaves_nothing_behind(pair: Pair) -> None:
    pair.paris.register_predicate("safe", "MIN($ALLSITES).persisted")

    async def cancelled() -> None:
        task = asyncio.create_task(pair.paris.waitfor_async(100, "safe"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    versions = pair.paris._core.frontiers["paris"]._users.values()
    assert [version.waiters for _, version in versions] == [[]]


def test_waits_for_a_site_that_is_removed_end(pair: Pair) -> None:
    pair.paris.register_predicate("safe", "MIN($ALLSITES).persisted")

    async def removed() -> None:
        task = asyncio.create_task(pair.paris.waitfor_async(1, "safe", origin="tokyo"))
        await asyncio.sleep(0)
        pair.paris.remove_site("tokyo")
        with pytest.raises(ReplicationError, match="site tokyo was removed while its message was waited for"):
            await task

    asyncio.run(removed())


def test_site_gets_what_is_left_after_a_long_first_message_was_cut(tmp_path: Path) -> None:
    pair = Pair(tmp_path, predicates={"here": "MIN(paris).persisted", "there": "MIN(tokyo).persisted"})
    try:
        pair.tokyo.close()
        shutil.rmtree(tmp_path / "tokyo")
        pair.paris.send(bytes(5 << 20))
        pair.paris.waitfor(pair.paris.send(b"second"), "here", 30)
        pair.paris.truncate(1)
        log = pair.paris._core.logs["paris"]
        with log.changed:
            assert log.changed.wait_for(lambda: log.first.offset > 0, 30)
        assert log.first.seq == 0  # it begins within message 1
        pair.tokyo = Node(pair.config, me="tokyo")
        pair.paris.waitfor(2, "there", 30)
        assert next(pair.tokyo.receive("paris", after=1, timeout=0)).payload == b"second"
    finally:
        pair.close()


def threads_named(words: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if words in thread.name]


def test_site_removed_and_added_at_once_has_one_pair_of_links(pair: Pair) -> None:
    pair.paris.register_predicate("safe", "MIN($ALLSITES).persisted")
    pair.paris.waitfor(pair.paris.send(b"x"), "safe", 30)
    former = threads_named("replication-paris-to-tokyo")
    assert len(former) == 2
    pair.paris.remove_site("tokyo")
    pair.paris.add_site("tokyo", address=pair.config["sites"]["tokyo"]["address"])
    for thread in former:
        thread.join(30)
        assert not thread.is_alive()
    assert len(threads_named("replication-paris-to-tokyo")) == 2
    pair.paris.waitfor(pair.paris.send(b"x"), "safe", 30)


def test_end_does_not_leave_a_giving_back_behind(pair: Pair, tmp_path: Path) -> None:
    pair.paris.register_predicate("safe", "MIN($ALLSITES).persisted")
    for _ in range(10):
        seq = pair.paris.send(bytes(2 << 20))
    pair.paris.waitfor(seq, "safe", 30)
    pair.paris.close()
    shutil.rmtree(tmp_path / "paris")
    pair.paris = Node(pair.config, me="paris")
    assert pair.paris.wait_received("paris", 1, 30)
    pair.tokyo.close()
    assert threads_named("give-back") == []


def test_site_added_again_is_told_only_what_was_verified(pair: Pair) -> None:
    pair.paris.register_predicate("here", "MIN(paris).verified")
    pair.tokyo.send(b"first")
    pair.paris.waitfor(1, "here", 30, origin="tokyo")
    pair.paris.remove_site("tokyo")
    log = pair.paris._core._retired["tokyo"]
    with log.writing:
        assert log.append(b"second", 6, 0) == 2  # came while the site was forgotten: nobody verified it
    pair.paris._core._keep = lambda *_: None  # type: ignore[method-assign]
    pair.paris.add_site("tokyo", address=pair.config["sites"]["tokyo"]["address"])
    own = pair.paris._core.own()
    assert [own["tokyo", ack] for ack in ("received", "persisted", "verified")] == [2, 1, 1]
    del pair.paris._core._keep
    pair.paris._core.work.set()
    pair.paris.waitfor(2, "here", 30, origin="tokyo")


def test_monitors_outlast_that_a_site_was_gone(pair: Pair) -> None:
    told = queue.SimpleQueue[int]()
    core, address = pair.paris._core, pair.config["sites"]["tokyo"]["address"]
    pair.paris.register_predicate("here", "MIN(paris).verified")
    pair.paris.register_predicate("too", "MIN(paris).received")
    pair.paris.monitor_stability_frontier("here", told.put, origin="tokyo")
    pair.tokyo.send(b"first")
    assert told.get(timeout=30) == 1
    pair.paris.waitfor(1, "too", 30, origin="tokyo")
    with core.lock:
        core._tell("tokyo", ["here", "too"])  # has moved, and is gone before the monitors are told
        pair.paris.remove_site("tokyo")
        pair.paris.add_site("tokyo", address=address)
    pair.tokyo.send(b"second")
    while told.get(timeout=30) < 2:
        pass
    pair.paris.check()


def test_acks_that_a_site_no_longer_tells_of_are_lost(pair: Pair) -> None:
    pair.paris.register_ack("checked")
    pair.tokyo.register_ack("checked")
    pair.paris.register_predicate("checked", "MIN(tokyo).checked")
    pair.paris.send(b"x")
    assert pair.tokyo.wait_received("paris", 1, 30)
    pair.tokyo.ack("paris", 1, "checked")
    pair.paris.waitfor(1, "checked", 30)
    pair.tokyo.close()  # acks of one's own do not outlive the process
    pair.tokyo = Node(pair.config, me="tokyo")
    core, checked = pair.paris._core, Counter("tokyo", "checked")
    with core.lock:
        assert core._moved.wait_for(lambda: core.frontiers["paris"].counter(checked) == 0, 30)
    assert pair.paris.get_stability_frontier("checked") == 1  # what was said stays said


def test_monitors_see_the_frontier_move_and_what_they_raise_is_raised(pair: Pair) -> None:
    pair.paris.register_predicate("safe", "MIN($ALLSITES).received")
    moves: list[int] = []
    reached = threading.Event()

    def moved(frontier: int) -> None:
        moves.append(frontier)
        if frontier == 5:
            reached.set()

    stop = pair.paris.monitor_stability_frontier("safe", moved)
    for _ in range(5):
        pair.paris.send(b"x")
    assert reached.wait(30)
    assert moves == sorted(set(moves))
    stop()
    failed = threading.Event()

    def fail(frontier: int) -> None:
        failed.set()
        raise ValueError(f"cannot bear {frontier}")

    pair.paris.monitor_stability_frontier("safe", fail)
    pair.paris.send(b"x")
    assert failed.wait(30)
    pair.paris.close()
    with pytest.raises(ReplicationError, match="site paris stopped: cannot bear 6"):
        pair.paris.check()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda n: n.waitfor(0, "safe"), "seq: expected the number of a message, from 1, got 0"),
        (lambda n: n.waitfor(1, "unknown"), "there is no predicate 'unknown'; register it first (there are: safe)"),
        (lambda n: n.change_predicate("unknown", "MIN($ALLSITES)"), "there is no predicate 'unknown'"),
        (lambda n: n.register_predicate("safe", "MIN($ALLSITES)"), "predicate 'safe' is there already"),
        (lambda n: n.waitfor(1, "safe", origin="oslo"), "origin: there is no site 'oslo'; there are: paris, tokyo"),
        (lambda n: next(n.receive("oslo")), "origin: there is no site 'oslo'"),
        (lambda n: n.ack("tokyo", 1, "seen"), "message 1 of tokyo is not here"),
        (lambda n: n.ack("tokyo", 1, "persisted"), "'persisted' is told by the node itself"),
        (lambda n: n.register_ack("a b"), "ack: expected a name"),
    ],
)
def test_wrong_calls_are_explained(pair: Pair, call: Any, words: str) -> None:
    pair.paris.register_predicate("safe", "MIN($ALLSITES).received")
    with pytest.raises(ReplicationError) as caught:
        call(pair.paris)
    assert words in str(caught.value)


def test_refused_change_leaves_the_predicate(pair: Pair) -> None:
    pair.paris.register_predicate("safe", "MIN($MYSITE).received")
    with pytest.raises(PredicateError, match="no site 'oslo'"):
        pair.paris.change_predicate("safe", "MIN(oslo)")
    assert pair.paris.predicates() == {"safe": "MIN($MYSITE).received"}
    assert pair.paris.waitfor(pair.paris.send(b"x"), "safe", 30) == 1


def test_truncation_waits_for_the_predicate_and_for_readers(tmp_path: Path) -> None:
    pair = Pair(tmp_path, truncate="MIN($ALLSITES).persisted", max_log_bytes=8 << 20)
    try:
        pair.paris.register_predicate("safe", "MIN($ALLSITES).persisted")
        reader = pair.tokyo.receive("paris")
        pair.paris.send(b"first")
        assert next(reader).payload == b"first"
        for _ in range(40):  # five times what the log may take
            seq = pair.paris.send(bytes(1 << 20), timeout=30)
        pair.paris.waitfor(seq, "safe", 30)
        assert pair.paris.first("paris") > 1
        assert [next(reader).seq for _ in range(40)] == list(range(2, 42))  # all of it was kept for the reader
        reader.close()  # type: ignore[attr-defined]
        with pytest.raises(StoreError, match="is not there"):
            list(pair.paris.receive("paris", timeout=0))
        pair.tokyo.close()
        send_too_much = pytest.raises(StoreFullError, match=r"held back by .*tokyo \(persisted up to 41\)")
        with send_too_much:
            _ = [pair.paris.send(bytes(1 << 20), timeout=0.05) for _ in range(20)]
    finally:
        pair.close()


@pytest.mark.parametrize("files", [0.5, 1, 1.5])
def test_log_bounded_to_less_than_two_files_does_not_block_for_good(tmp_path: Path, files: float) -> None:
    limit = int(files * (2 << 20))
    pair = Pair(tmp_path, truncate="MIN($ALLSITES).persisted", max_log_bytes=limit)
    try:
        for _ in range(12):
            seq = pair.paris.send(bytes(900_000), timeout=30)
        assert seq == 12
    finally:
        pair.close()


def test_send_waits_for_others_that_write_no_longer_than_it_may(pair: Pair) -> None:
    with pair.paris._core.logs["paris"].writing, pytest.raises(ReplicationError, match=r"has been for 0\.05 s"):
        pair.paris.send(b"x", timeout=0.05)
    assert pair.paris.send(b"x", timeout=0) == 1


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl, to make certificates")
def test_tls_hears_only_who_has_a_certificate_of_that_name(tmp_path: Path) -> None:
    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], check=True, cwd=tmp_path, capture_output=True)

    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority", "-days", "2")
    for name in ("paris", "tokyo", "mallory"):
        openssl("req", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signing = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2"]
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signing)

    ports = {name: reserve_port() for name in ("paris", "tokyo")}

    def config(me: str) -> dict[str, Any]:
        sites = {
            name: {"address": f"127.0.0.1:{sock.getsockname()[1]}", "store": str(tmp_path / name)}
            for name, sock in ports.items()
        }
        files = {"ca": "ca.pem", "cert": f"{me}.pem", "key": f"{me}.key"}
        return {"sites": sites, "tls": {k: str(tmp_path / v) for k, v in files.items()}, "segment_bytes": 2 << 20}

    data = random.Random(1).randbytes(5 << 20)
    with Node(config("paris"), me="paris") as paris:
        paris.register_predicate("safe", "MIN($ALLSITES).persisted")
        seq = paris.send(data)
        with Node(config("mallory"), me="tokyo") as mallory:
            with pytest.raises(StabilityTimeoutError):
                paris.waitfor(seq, "safe", 0.5)
            assert mallory.last("paris") == 0
        with Node(config("tokyo"), me="tokyo") as tokyo:
            paris.waitfor(seq, "safe", 30)
            assert next(tokyo.receive("paris")).payload == data
    for sock in ports.values():
        sock.close()
