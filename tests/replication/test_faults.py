"""Several real site processes, and what happens to them: killed, stopped, cut off, full, lied to."""

from __future__ import annotations

import contextlib
import filecmp
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.replication.fuzz import run_schedule
from tests.replication.sites import KEY, Cluster, content
from torchext._native import replication as native
from torchext.replication.config import load_config
from torchext.replication.handshake import PROTOCOL, HandshakeError, connect
from torchext.replication.log import HEADER, LAST
from torchext.transport import GreetingError, greet

ALL = ["paris", "tokyo", "oregon"]
EVERYWHERE = "MIN($ALLSITES).persisted"


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, ALL, proxied=True) as cluster:
        for site in cluster.start_all():
            assert site.answer() == site.pid
        yield cluster


def restart(cluster: Cluster, name: str, **settings: Any) -> None:
    assert cluster.start(name, **settings).answer() == cluster[name].pid


def test_every_site_gets_every_message_once_and_in_order(three: Cluster) -> None:
    for name in ALL:
        three[name].call("register", "all", EVERYWHERE)
        three[name].post("send", 50, 10_000)
    for name in ALL:
        assert three[name].answer() == 50
        three[name].call("waitfor", 50, "all", 30)
    for name in ALL:
        assert [three[name].call("held", origin) for origin in ALL] == [50, 50, 50]


@pytest.mark.parametrize("victim", ["tokyo", "paris"])
def test_killed_site_comes_back_and_catches_up(three: Cluster, victim: str) -> None:
    paris = three["paris"]
    paris.call("register", "all", EVERYWHERE)
    paris.post("send", 30, 300_000)  # killed somewhere in here
    if victim == "tokyo":
        three["tokyo"].kill()
        sent = paris.answer()
        assert sent == 30
        restart(three, "tokyo")
    else:
        paris.kill()
        restart(three, "paris")
        three["paris"].call("register", "all", EVERYWHERE)
        sent = three["paris"].call("send", 1, 1000)
    three["paris"].call("waitfor", sent, "all", 30)
    may_lack = range(1, sent) if victim == "paris" else ()  # one of those that it did not live to give a number to
    for name in ALL:
        assert three[name].call("held", "paris", list(may_lack)) == sent


def test_persisted_is_never_claimed_for_what_a_killed_site_lost(three: Cluster) -> None:
    paris, tokyo = three["paris"], three["tokyo"]
    paris.call("register", "tokyo", "MIN(tokyo).persisted")
    for _ in range(3):  # while it writes and syncs
        paris.post("send", 20, 200_000)
        claimed = max(paris.answer() - 20, 0)
        paris.call("waitfor", claimed + 3, "tokyo", 30)
        tokyo.kill()
        said = paris.call("frontier", "tokyo")
        restart(three, "tokyo")
        tokyo = three["tokyo"]
        assert tokyo.call("held", "paris") >= said


def test_cut_link_resumes_in_the_middle_of_a_message(three: Cluster, tmp_path: Path) -> None:
    paris = three["paris"]
    paris.call("register", "all", EVERYWHERE)
    size = 24 << 20
    proxy = three.proxies["paris", "tokyo"]
    proxy.cut_after_bytes = proxy.carried_bytes + (9 << 20)
    before = proxy.carried_bytes
    (tmp_path / "file").write_bytes(content("paris", 1, size))
    assert paris.call("send_file", str(tmp_path / "file")) == 1
    paris.call("waitfor", 1, "all", 60)
    assert proxy.carried_bytes - before > size
    # It was cut, and what had arrived was not sent again, but for what was on its way.
    assert proxy.carried_bytes - before < size + (8 << 20)
    assert three["tokyo"].call("held", "paris") == 1


def test_half_open_link_is_found_and_made_anew(three: Cluster) -> None:
    paris = three["paris"]
    paris.call("register", "all", EVERYWHERE)
    paris.call("waitfor", paris.call("send", 1, 100), "all", 30)
    three.proxies["paris", "tokyo"].swallows = True
    seq = paris.call("send", 5, 100_000)
    with pytest.raises(RuntimeError, match=r"tokyo.persisted is at 1, 5 behind"):
        paris.call("waitfor", seq, "all", 0.5)
    three.proxies["paris", "tokyo"].swallows = False  # carries again, but what it swallowed is lost
    paris.call("waitfor", seq, "all", 30)
    assert three["tokyo"].call("held", "paris") == seq


def test_stopped_site_does_not_hold_up_the_others(three: Cluster) -> None:
    paris, tokyo = three["paris"], three["tokyo"]
    paris.call("register", "one other", "MAX($ALLSITES - $MYSITE).persisted")
    paris.call("register", "all", EVERYWHERE)
    tokyo.signal(signal.SIGSTOP)
    seq = paris.call("send", 20, 500_000)
    paris.call("waitfor", seq, "one other", 30)
    with pytest.raises(RuntimeError, match=r"tokyo.persisted is at 0, 20 behind"):
        paris.call("waitfor", seq, "all", 0.2)
    tokyo.signal(signal.SIGCONT)
    paris.call("waitfor", seq, "all", 30)
    assert tokyo.call("held", "paris") == seq


def test_full_disk_elsewhere_holds_back_only_its_own_acks(three: Cluster) -> None:
    paris, tokyo = three["paris"], three["tokyo"]
    paris.call("register", "all", EVERYWHERE)
    paris.call("register", "oregon", "MIN(oregon).persisted")
    tokyo.call("limit_file_size", 1 << 20)
    seq = paris.call("send", 10, 500_000)
    paris.call("waitfor", seq, "oregon", 30)
    with pytest.raises(RuntimeError, match=r"tokyo.persisted is at"):
        paris.call("waitfor", seq, "all", 0.5)
    assert wait_until(lambda: "no room for" in tokyo.call("status")["trouble"].get("store of paris", ""))
    tokyo.call("limit_file_size", 0)
    paris.call("waitfor", seq, "all", 30)
    assert tokyo.call("held", "paris") == seq
    assert wait_until(lambda: tokyo.call("status")["trouble"] == {})


def test_full_disk_here_is_said_and_passes(three: Cluster) -> None:
    paris = three["paris"]
    paris.call("register", "all", EVERYWHERE)
    first = paris.call("send", 1, 100)
    paris.call("limit_file_size", 1 << 20)
    with pytest.raises(RuntimeError, match=r"StoreFullError: .*no room for"):
        paris.call("send", 1, 5_000_000)
    paris.call("limit_file_size", 0)
    assert paris.call("send", 1, 5_000_000) == first + 1
    paris.call("waitfor", first + 1, "all", 30)
    assert three["oregon"].call("held", "paris") == first + 1


def test_lost_store_is_filled_again_by_the_others(three: Cluster, tmp_path: Path) -> None:
    paris = three["paris"]
    paris.call("register", "all", EVERYWHERE)
    seq = paris.call("send", 20, 200_000)
    paris.call("waitfor", seq, "all", 30)
    paris.kill()
    (tmp_path / "paris").rename(tmp_path / "lost")
    restart(three, "paris")
    three["paris"].call("register", "all", EVERYWHERE)
    # Having heard that the others have more under its name, it does not reuse the numbers.
    three["paris"].call("waitfor", seq, "all", 30)
    assert three["paris"].call("held", "paris") == seq
    assert three["paris"].call("send", 1, 1000) == seq + 1
    three["paris"].call("waitfor", seq + 1, "all", 30)
    assert three["tokyo"].call("held", "paris") == seq + 1


def test_site_that_was_down_gets_what_is_left_after_truncation(tmp_path: Path) -> None:
    with Cluster(tmp_path, ALL, settings={"truncate": "MIN(paris, tokyo).persisted"}) as cluster:
        for name in ("paris", "tokyo"):
            cluster.start(name)
        for name in ("paris", "tokyo"):
            cluster[name].answer()
        paris = cluster["paris"]
        paris.call("register", "all", EVERYWHERE)
        paris.call("register", "two", "MIN(paris, tokyo).persisted")
        seq = paris.call("send", 20, 500_000)
        paris.call("waitfor", seq, "two", 30)
        for name in ("paris", "tokyo"):
            assert wait_until(lambda name=name: cluster[name].call("first", "paris") > 10)
        restart(cluster, "oregon")
        paris.call("waitfor", seq, "all", 30)
        assert cluster["oregon"].call("first", "paris") == paris.call("first", "paris")
        assert cluster["oregon"].call("held", "paris") == seq


def test_sites_come_and_go_while_the_others_run(tmp_path: Path) -> None:
    with Cluster(tmp_path, ALL) as cluster:
        two = {name: site for name, site in cluster.config("paris")["sites"].items() if name != "oregon"}
        for name in two:
            restart(cluster, name, sites=two)
        paris = cluster["paris"]
        paris.call("register", "all", EVERYWHERE)
        paris.call("waitfor", paris.call("send", 5, 300_000), "all", 30)
        restart(cluster, "oregon")
        for name in two:
            cluster[name].call("add_site", "oregon", cluster.config(name)["sites"]["oregon"]["address"])
        seq = paris.call("send", 5, 300_000)
        paris.call("waitfor", seq, "all", 30)
        assert cluster["oregon"].call("held", "paris") == seq  # what was sent before it came, too
        cluster["tokyo"].kill()
        seq = paris.call("send", 5, 300_000)
        with pytest.raises(RuntimeError, match=r"tokyo.persisted is at 10, 5 behind"):
            paris.call("waitfor", seq, "all", 0.2)
        paris.call("register", "tokyo", "MIN(tokyo)")
        with pytest.raises(RuntimeError, match="there is no site 'tokyo'"):
            paris.call("remove_site", "tokyo")
        paris.call("change", "tokyo", "MIN($MYSITE)")
        paris.call("remove_site", "tokyo")
        paris.call("waitfor", seq, "all", 30)
        with pytest.raises(RuntimeError, match=r"expected one of the other sites \(oregon\), got 'tokyo'"):
            paris.call("remove_site", "tokyo")
        cluster["oregon"].call("remove_site", "tokyo")
        cluster["oregon"].call("register", "all", EVERYWHERE)
        cluster["oregon"].call("waitfor", cluster["oregon"].call("send", 1, 10), "all", 30)
        restart(cluster, "tokyo")  # knocks in vain
        assert set(paris.call("status")["connections"]) == {"oregon"}
        for name in ("paris", "oregon"):  # and is taken in again
            cluster[name].call("add_site", "tokyo", cluster.config(name)["sites"]["tokyo"]["address"])
        seq = paris.call("send", 1, 10)
        paris.call("waitfor", seq, "all", 30)
        assert cluster["tokyo"].call("held", "paris") == seq


def test_file_is_sent_without_being_in_memory(tmp_path: Path) -> None:
    size = 96 << 20
    with open(tmp_path / "file", "wb") as file:
        file.truncate(size)
        for at in range(0, size, 1 << 20):
            os.pwrite(file.fileno(), at.to_bytes(8, "little"), at + 77)
    with Cluster(tmp_path, ["paris", "tokyo"]) as cluster:
        restart(cluster, "paris")
        before = [anonymous_kib(cluster["paris"].pid)]
        assert cluster["paris"].call("send_file", str(tmp_path / "file")) == 1
        restart(cluster, "tokyo")  # the log's files that are mapped no more go out by sendfile
        before.append(anonymous_kib(cluster["tokyo"].pid))
        cluster["paris"].call("register", "all", EVERYWHERE)
        cluster["paris"].call("waitfor", 1, "all", 60)
        cluster["tokyo"].call("save", "paris", 1, str(tmp_path / "copy"))
        for name, kib in zip(cluster.names, before, strict=True):
            assert anonymous_kib(cluster[name].pid) - kib < 16 << 10
    assert filecmp.cmp(tmp_path / "file", tmp_path / "copy", shallow=False)


def anonymous_kib(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().split("RssAnon:")[1].split()[0])


def test_memory_and_files_do_not_grow_with_what_passes(tmp_path: Path) -> None:
    with Cluster(tmp_path, ["paris", "tokyo"]) as cluster:
        for site in cluster.start_all():
            site.answer()
        paris = cluster["paris"]
        paris.call("register", "all", EVERYWHERE)

        def use(rounds: int) -> None:
            for number in range(rounds):
                seq = paris.call("send", 60, 20_000)
                paris.call("change", "all", EVERYWHERE if number % 2 else "MIN($ALLSITES).verified")
                paris.call("waitfor", seq, "all", 60)
                assert cluster["tokyo"].call("held_since", "paris", seq - 10) == seq
                paris.call("truncate", seq)

        def sizes() -> list[tuple[int, int]]:
            found = []
            for name in cluster.names:
                pid = cluster[name].pid
                found.append((anonymous_kib(pid), len(list(Path(f"/proc/{pid}/fd").iterdir()))))
            return found

        use(20)
        before = sizes()
        use(100)  # 120 MB
        for (kib, num_fds), (kib_before, num_fds_before) in zip(sizes(), before, strict=True):
            assert kib - kib_before < 8 << 10
            assert num_fds - num_fds_before < 20  # that of a connection made anew, of a file more


def wait_until(condition: Any, deadline_s: float = 30.0) -> bool:
    deadline = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        threading.Event().wait(0.01)
    return True


# Strangers and liars: hand-made connections to a real site.


@pytest.fixture
def lonely(tmp_path: Path) -> Iterator[tuple[Cluster, dict[str, Any]]]:
    """Site tokyo alone; the test plays paris."""
    with Cluster(tmp_path, ["paris", "tokyo"]) as cluster:
        restart(cluster, "tokyo")
        yield cluster, cluster.config("paris")


PLACE = struct.Struct("<qqI")  # number, offset, checksum


def data_connection(config: dict[str, Any]) -> socket.socket:
    sock, reply = connect(load_config(config), "paris", "tokyo", {"purpose": "data", "stream": "paris"})
    sock.sendall(PLACE.pack(*reply["place"]))
    sock.settimeout(20)
    return sock


@pytest.mark.parametrize(
    "frame",
    [
        HEADER.pack(0x4D525453, 0xFFFFFFFF, 1, 0, 1, 0, 0),  # a length of 4 GiB
        HEADER.pack(0x4D525453, 10, 7, 0, 1, 0, 0) + bytes(10),  # a gap
        HEADER.pack(0x4D525453, 10, 1, 0, 1, 0, 0) + bytes(10),  # a wrong checksum
        b"GET / HTTP/1.1\r\nHost: tokyo.example.org\r\n\r\n",
    ],
    ids=["length", "gap", "checksum", "http"],
)
def test_liar_is_hung_up_on_and_nothing_of_it_kept(lonely: tuple[Cluster, dict[str, Any]], frame: bytes) -> None:
    cluster, config = lonely
    with data_connection(config) as sock:
        sock.sendall(frame)
        assert sock.recv(1) == b""
    assert cluster["tokyo"].call("held", "paris") == 0
    restart_paris_and_send(cluster)


def restart_paris_and_send(cluster: Cluster) -> None:
    restart(cluster, "paris")
    cluster["paris"].call("register", "all", EVERYWHERE)
    cluster["paris"].call("waitfor", cluster["paris"].call("send", 3, 1000), "all", 30)
    assert cluster["tokyo"].call("held", "paris") == 3


def test_late_bytes_of_an_older_connection_are_not_taken(lonely: tuple[Cluster, dict[str, Any]]) -> None:
    cluster, config = lonely
    checksum, frames = 0, []
    for seq in (1, 2):
        payload = content("paris", seq, 100)
        frames.append(bytearray(HEADER.size + 100))
        checksum = native.put_frame(frames[-1], 0, payload, 0, 100, seq, 0, LAST, 0, checksum)
    with data_connection(config) as older:
        older.sendall(frames[0][:50])  # the rest was on a slow way when paris connected anew
        with data_connection(config) as newer:
            assert older.recv(1) == b""
            with contextlib.suppress(OSError):
                older.sendall(frames[0][50:] + frames[1])
            newer.sendall(frames[0] + frames[1])
            assert wait_until(lambda: cluster["tokyo"].call("held", "paris") == 2)
            assert cluster["tokyo"].call("status")["trouble"] == {}


def test_control_frame_without_bounds_is_hung_up_on(lonely: tuple[Cluster, dict[str, Any]]) -> None:
    cluster, config = lonely
    sock, _ = connect(load_config(config), "paris", "tokyo", {"purpose": "control"})
    with sock:
        sock.settimeout(20)
        sock.sendall(struct.pack("<IB", 1 << 31, 2))
        assert sock.recv(1) == b""
    restart_paris_and_send(cluster)


def test_nobody_is_heard_without_the_key(lonely: tuple[Cluster, dict[str, Any]]) -> None:
    cluster, config = lonely
    with pytest.raises(HandshakeError, match=r"tokyo at .*, greeted with the key as token: .* another token"):
        connect(load_config({**config, "key": "another key, not ours"}), "paris", "tokyo", {"purpose": "control"})
    host, port = config["sites"]["tokyo"]["address"].split(":")
    whole = {"site": "paris", "to": "tokyo", "purpose": "status"}
    for words, why in (
        ({**whole, "to": "oregon"}, "this is tokyo, not oregon"),
        ({**whole, "site": "mallory"}, "tokyo knows no site 'mallory'; it knows paris, tokyo"),
        ({**whole, "purpose": "sightseeing"}, "tokyo does not serve 'sightseeing' to paris"),
        ({**whole, "site": ["paris"]}, "closed the connection"),
    ):
        address = host, int(port)
        refusal = pytest.raises((GreetingError, ConnectionResetError), match=why)
        with socket.create_connection(address, timeout=20) as sock, refusal:
            greet(sock, KEY.encode().hex(), PROTOCOL, words, 20)
    for junk in (struct.pack("<I", 1 << 30), b"", struct.pack("<I", 3) + b"{]}"):
        with socket.create_connection((host, int(port)), timeout=20) as sock:
            sock.sendall(junk)
            sock.shutdown(socket.SHUT_WR)
            assert sock.recv(1) == b""
    restart_paris_and_send(cluster)


def test_impostor_at_the_address_of_a_site_stops_nobody(tmp_path: Path) -> None:
    answers = [b"[" * 16000, b'{"nonce": "", "proof": "\\ud800"}', b'{"nonce": {}, "proof": ""}', b'{"error": [[]]}']
    with socket.create_server(("127.0.0.1", 0)) as impostor, Cluster(tmp_path, ["paris", "tokyo"]) as cluster:
        impostor.settimeout(30)
        config = cluster.config("paris")
        config["sites"]["tokyo"]["address"] = f"127.0.0.1:{impostor.getsockname()[1]}"
        restart(cluster, "paris", **config)
        for answer in 2 * answers:  # the attempts of both links
            sock, _ = impostor.accept()
            with sock:
                sock.recv(1000)
                sock.sendall(struct.pack("<I", len(answer)) + answer)
                while sock.recv(1000):
                    pass
        assert cluster["paris"].call("send", 1, 100) == 1


@pytest.mark.parametrize("place", [(-1, 0, 0), (0, -1, 0), (7, 0, 1)], ids=["number", "offset", "gap"])
def test_place_that_is_none_is_hung_up_on(lonely: tuple[Cluster, dict[str, Any]], place: tuple[int, int, int]) -> None:
    cluster, config = lonely
    sock, _ = connect(load_config(config), "paris", "tokyo", {"purpose": "data", "stream": "paris"})
    with sock:
        sock.settimeout(20)
        sock.sendall(PLACE.pack(*place))
        if place[0] == 7:  # where a stream may begin that was truncated; what follows has to go on from there
            sock.sendall(HEADER.pack(0x4D525453, 10, 1, 0, 1, 0, 0) + bytes(10))
        assert sock.recv(1) == b""
    assert cluster["tokyo"].call("send", 1, 100) == 1


def test_two_processes_cannot_share_a_store(lonely: tuple[Cluster, dict[str, Any]]) -> None:
    cluster, _ = lonely
    tokyo = cluster["tokyo"]
    second = Cluster(cluster.folder, ["tokyo"])
    with second, pytest.raises(RuntimeError, match="is in use by another process"):
        second.start("tokyo").answer()
    assert tokyo.call("last", "tokyo") == 0


@pytest.mark.parametrize("seed", range(4))
def test_random_faults_leave_no_gap_and_no_false_claim(tmp_path: Path, seed: int) -> None:
    run_schedule(tmp_path, seed)
