"""Training processes and standbys that are killed, stopped and restarted, as real processes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import socket
import struct
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.standby.processes import Net, build, start_standby, step, undisturbed, until
from tests.standby.training import Trainings
from torchext.standby import FencedError, Replicator, StandbyError, StandbyLostError, StandbyLostWarning, wire
from torchext.standby.arena import Segment
from torchext.standby.connect import open_link
from torchext.standby.daemon import Daemon
from torchext.standby.fetching import copy_state
from torchext.standby.link import Identity, fetch, status
from torchext.standby.source import LocalSource

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_STEPS = 12


@pytest.fixture(scope="module")
def trainings() -> Iterator[Trainings]:
    os.environ["TORCHEXT_STANDBY_TOKEN"] = "a secret of the tests"
    running = Trainings()
    del os.environ["TORCHEXT_STANDBY_TOKEN"]
    yield running
    running.close()


def _lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def _kill_until_it_ends(trainings: Trainings, address: str, log: Path, seed: int, **options: Any) -> int:
    """Lets a training die again and again; checks what it did. Returns how often it died."""
    random_numbers = random.Random(seed)
    num_deaths = 0
    while True:
        place = random_numbers.choice(["commit", "copy", "optimizer", "anywhere"])
        lines = random_numbers.randrange(1, 6000)
        if num_deaths == 8:
            place = None
        ended = trainings.run(
            log=str(log), num_steps=NUM_STEPS, standby=address, job=str(log), place=place, lines=lines, **options
        )
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
        num_deaths += 1
    losses, weights = undisturbed(NUM_STEPS)
    done = -1
    allowed = 0 if options.get("mode") == "rpo0" else 1
    for line in _lines(log):
        if "start" in line:
            assert line["start"] >= done + 1 - allowed, "more was done again than is allowed"
        elif "step" in line:
            assert line["loss"] == losses[line["step"]]
            done = line["step"]
    assert done == NUM_STEPS - 1 or _lines(log)[-1].keys() == {"weights"}
    final = _lines(log)[-1]["weights"]
    for name, expected in weights.items():
        assert torch.equal(torch.tensor(final[name], dtype=expected.dtype), expected), name
    return num_deaths


@pytest.mark.parametrize("transport", ["local", "tcp"])
@pytest.mark.parametrize("mode", ["lag1", "rpo0"])
def test_a_training_killed_at_random_points_ends_as_if_undisturbed(
    trainings: Trainings, running: str, tmp_path: Path, mode: str, transport: str
) -> None:
    deaths = sum(
        _kill_until_it_ends(trainings, running, tmp_path / f"{seed}", seed, mode=mode, transport=transport)
        for seed in range(2)
    )
    assert deaths > 1


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["lag1", "rpo0"])
def test_a_hundred_kills(trainings: Trainings, running: str, tmp_path: Path, mode: str) -> None:
    deaths, seed = 0, 100
    while deaths < 100:
        transport = ("local", "tcp")[seed % 2]
        deaths += _kill_until_it_ends(trainings, running, tmp_path / f"{seed}", seed, mode=mode, transport=transport)
        seed += 1


def test_a_standby_that_dies_and_comes_back_gets_the_whole_state(standby: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("torchext.standby.connect._RETRY_S", 0.01)
    process, address = standby
    losses, _ = undisturbed(8)
    model, optimizer = build()
    with Replicator(model, optimizer, standby=address, job="job") as replicator:
        for i in range(3):
            assert step(model, optimizer) == losses[i]
            replicator.commit(i)
        process.kill()
        process.wait()
        with pytest.warns(StandbyLostWarning, match=r"rank 0 of job 'job' has lost its standby at .* training goes on"):
            _ = step(model, optimizer), replicator.commit(3)  # within one step
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # once is enough
            assert step(model, optimizer) == losses[4]
            replicator.commit(4)
        again, _ = start_standby(listen=address)
        try:
            i = 5
            while not replicator.stats["connected"]:
                replicator.commit(i)
                i += 1
            replicator.commit(i)
            replicator.gate()
            replicator.close()
            state = fetch(address, "job")
            assert state.step == i
            for left, right in zip(state.tree["models"]["model"].values(), model.state_dict().values(), strict=True):
                assert torch.equal(left, right)
        finally:
            again.kill()
            again.communicate()


def _wait_no_longer_than(timeout_s: float, replicator: Replicator) -> None:
    """As if given as `timeout`, but from now on: a standby that runs may take longer on a busy machine."""
    link = replicator._publisher._link
    assert link is not None
    link._timeout_s = timeout_s


def test_a_standby_that_stops_costs_one_timeout_or_raises(standby: Any) -> None:
    process, address = standby
    model, optimizer = build()
    with Replicator(model, optimizer, standby=address, job="a") as replicator:
        step(model, optimizer)
        replicator.commit(0)
        replicator.gate()
        _wait_no_longer_than(0.5, replicator)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)  # all of its threads
        replicator.commit(1)
        with pytest.warns(StandbyLostWarning, match=r"no answer \(pulled of step 1\) within 0.5 s"):
            step(model, optimizer)
        replicator.commit(2)
        process.send_signal(signal.SIGCONT)
    model, optimizer = build()
    with Replicator(model, optimizer, standby=address, job="b", on_standby_loss="raise") as replicator:
        step(model, optimizer)
        replicator.commit(0)
        replicator.gate()
        _wait_no_longer_than(0.5, replicator)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)  # all of its threads
        replicator.commit(1)
        with pytest.raises(StandbyLostError, match=r"rank 0 of job 'b' .* at step 1: no answer"):
            step(model, optimizer)
        process.send_signal(signal.SIGCONT)


def test_no_standby_at_all(monkeypatch: Any) -> None:
    model, optimizer = build()
    with Replicator(model, optimizer, standby="127.0.0.1:1", job="a") as replicator:
        with pytest.raises(StandbyLostError, match=r"127\.0\.0\.1:1 cannot be reached: .*refused"):
            replicator.restore()
        with pytest.warns(StandbyLostWarning, match="refused"):
            replicator.commit(0)
    with (
        Replicator(model, optimizer, standby="127.0.0.1:1", job="a", on_standby_loss="raise") as replicator,
        pytest.raises(StandbyLostError, match="refused"),
    ):
        replicator.commit(0)


def test_whatever_ends_the_search_for_a_standby_is_told_and_the_search_goes_on(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [ConnectionRefusedError("nobody is there"), MemoryError("no room")]

    def open_or_fail(*arguments: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop(0)
        return open_link(*arguments, **options)

    monkeypatch.setattr("torchext.standby.connect._RETRY_S", 0.01)
    monkeypatch.setattr("torchext.standby.publisher.open_link", open_or_fail)
    model, optimizer = build()
    with Replicator(model, optimizer, standby=daemon.address, job="a", mode="rpo0") as replicator:
        with pytest.warns(StandbyLostWarning, match="nobody is there"):
            replicator.commit(0)
        search: Any = replicator._publisher._reconnect
        until(lambda: search._fault is not None)
        with pytest.warns(StandbyLostWarning, match="looking for it has failed: MemoryError: no room"):
            replicator.commit(1)
        search = replicator._publisher._reconnect
        until(lambda: search._link is not None)
        replicator.commit(2)
        assert fetch(daemon.address, "a").step == 2


def test_whatever_ends_a_data_stream_is_raised_within_a_step(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(*_: Any) -> Any:
        raise TypeError("a fault within")

    monkeypatch.setattr("torchext.standby.ledger.Ledger.entry", find)
    model, optimizer = build()
    with Replicator(model, optimizer, standby=daemon.address, job="a", transport="tcp") as replicator:
        replicator.commit(0)
        with pytest.raises(TypeError, match="a fault within"):
            replicator.gate()
        replicator._publisher._unlink()


def test_a_standby_out_of_memory_says_how_much_it_needs() -> None:
    with Daemon("127.0.0.1:0", memory_bytes=50_000) as daemon:
        thread = threading.Thread(target=daemon.serve)
        thread.start()
        model, optimizer = build()
        with Replicator(model, optimizer, standby=daemon.address, job="a", mode="rpo0") as replicator:
            step(model, optimizer)
            with pytest.warns(StandbyLostWarning, match=r"out of memory: \d+ bytes more .* of 50000 are in use"):
                replicator.commit(0)
        assert daemon.budget.used_bytes <= 50_000
        daemon.stop()
        thread.join()
        assert daemon.budget.used_bytes == 0


def test_an_old_process_that_comes_back_is_fenced(trainings: Trainings, running: str, tmp_path: Path) -> None:
    address = running
    log = tmp_path / "log"
    pid = trainings.start(log=str(log), num_steps=10**6, standby=address, job="job")
    until(lambda: log.exists() and len(_lines_so_far(log)) >= 5)
    os.kill(pid, signal.SIGSTOP)
    model, optimizer = build(seed=5)
    with Replicator(model, optimizer, standby=address, job="job") as replicator:
        with pytest.raises(FencedError, match=f"rank 0 of job 'job' is being trained by process {pid} on"):
            replicator.commit(0)
        found = replicator.restore()
        assert found is not None
        step(model, optimizer)
        replicator.commit(found.step + 1)
        os.kill(pid, signal.SIGCONT)
        assert trainings.wait() == 1  # FencedError, although it may train on without a standby
        step(model, optimizer)
        replicator.commit(found.step + 2)
    assert fetch(address, "job").step == found.step + 2


def _lines_so_far(log: Path) -> list[str]:
    return log.read_text().splitlines()


def test_a_torn_image_is_never_handed_out(daemon: Daemon) -> None:
    model, optimizer = build()
    with Replicator(model, optimizer, standby=daemon.address, job="job", mode="rpo0") as replicator:
        replicator.commit(0)
    rank = daemon.jobs["job"].ranks[0]
    image = next(image for image in rank.images.images if image.record is not None)
    held = next(iter(image.entries.values()))
    held.slot.base[17] ^= 4
    with pytest.raises(StandbyError, match="another checksum than when it was sealed"):
        fetch(daemon.address, "job")
    held.slot.base[17] ^= 4
    assert fetch(daemon.address, "job").step == 0
    image.tree = image.tree[:-1] + b"!"
    with pytest.raises(StandbyError, match="the commit record of step 0 does not fit"):
        fetch(daemon.address, "job")


def test_a_torn_image_is_not_gone_on_from(daemon: Daemon) -> None:
    model, optimizer = build()
    with Replicator(model, optimizer, standby=daemon.address, job="job", mode="rpo0") as replicator:
        replicator.commit(0)
    image = next(image for image in daemon.jobs["job"].ranks[0].images.images if image.record is not None)
    held = next(iter(image.entries.values()))
    for transport in ("local", "tcp"):  # out of its memory; over the connection
        with Replicator(model, optimizer, standby=daemon.address, job="job", transport=transport) as replicator:
            held.slot.base[17] ^= 4
            with pytest.raises(StandbyError, match="another checksum than when it was sealed"):
                replicator.restore()
            held.slot.base[17] ^= 4
            found = replicator.restore()
            assert found is not None
            assert found.step == 0


def test_where_the_memory_of_the_standby_cannot_be_read_its_state_comes_over_the_connection(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = build()
    with Replicator(model, optimizer, standby=daemon.address, job="job", mode="rpo0") as replicator:
        step(model, optimizer)
        replicator.commit(0, state=torch.arange(2**21))
        expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def open_nothing(*_: Any) -> Any:
        raise PermissionError("not allowed here")

    step(model, optimizer)
    caplog.set_level("INFO")
    with Replicator(model, optimizer, standby=daemon.address, job="job") as replicator:
        with monkeypatch.context() as patch:
            patch.setattr("torchext.standby.fetching.open_segment", open_nothing)
            found = replicator.restore()
        assert found is not None
        assert torch.equal(found.state, torch.arange(2**21))
        assert all(torch.equal(expected[name], tensor) for name, tensor in model.state_dict().items())
        assert "cannot read the standby's memory (not allowed here)" in caplog.text
        replicator.commit(1)


def test_a_process_that_dies_while_it_copies_the_state_holds_no_lock(daemon: Daemon) -> None:
    model, optimizer = build()
    with Replicator(model, optimizer, standby=daemon.address, job="job", mode="rpo0") as replicator:
        replicator.commit(0)
    link = open_link(daemon.address, Identity.of_this_process("job", 0, 1), transport="local", timeout_s=60)
    link.claim(take_over=True, num_streams=0, find=lambda _: torch.empty(0))
    assert link._ask_for_state(None, from_memory=True)["step"] == 0
    assert daemon.jobs["job"].ranks[0].busy.locked()
    link.close()
    with Replicator(model, optimizer, standby=daemon.address, job="job") as replicator:
        found = replicator.restore()
        assert found is not None
        assert found.step == 0


def test_a_process_that_is_given_up_while_it_copies_the_state_is_told_so(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = build()
    with Replicator(model, optimizer, standby=daemon.address, job="job", mode="rpo0") as replicator:
        replicator.commit(0)
    rank = daemon.jobs["job"].ranks[0]

    def copy_late(*arguments: Any) -> Any:
        until(lambda: not rank.busy.locked())
        image = next(image for image in rank.images.images if image.record is not None)
        next(iter(image.entries.values())).slot.base[17] ^= 4  # as another process's commit would
        return copy_state(*arguments)

    monkeypatch.setattr("torchext.standby.handing_out._READER_TIMEOUT_S", 0.1)
    monkeypatch.setattr("torchext.standby.link.copy_state", copy_late)
    with (
        Replicator(model, optimizer, standby=daemon.address, job="job") as replicator,
        pytest.raises(StandbyLostError, match="cannot be reached"),
    ):
        replicator.restore()


def test_a_wrong_token_is_refused(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    client = threading.current_thread()
    message = "the other end has another token than this one; give both sides the same TORCHEXT_STANDBY_TOKEN"
    with monkeypatch.context() as patch:
        patch.setattr(wire, "_secret", lambda _: "one" if threading.current_thread() is client else "another")
        with pytest.raises(StandbyError, match=message):
            status(daemon.address)
    assert status(daemon.address)["jobs"] == {}


def test_a_reader_that_stops_reading_does_not_stop_training(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = build()
    with Replicator(model, optimizer, standby=daemon.address, job="job", mode="rpo0") as replicator:
        replicator.commit(0, state=torch.zeros(1 << 26, dtype=torch.uint8))
        with wire.connect(daemon.address, 30) as sock, monkeypatch.context() as patch:
            patch.setattr("torchext.standby.handing_out._READER_TIMEOUT_S", 0.3)
            wire.greet(sock, {"role": "reader"}, 30)
            wire.send(sock, {"op": "fetch", "job": "job", "rank": 0, "step": None})
            assert wire.receive(sock)[0]["step"] == 0
            for i in range(1, 4):
                replicator.commit(i)
        assert replicator.stats["committed"] == 3
    assert fetch(daemon.address, "job").step == 3


def test_a_standby_without_descriptors_to_spare_keeps_its_images(standby: Any) -> None:
    process, address = standby
    model, optimizer = build()
    with Replicator(model, optimizer, standby=address, job="job", transport="tcp", mode="rpo0") as replicator:
        replicator.commit(0)
        before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (3, before[1]))  # fewer than it has open
        with pytest.raises(StandbyLostError):
            status(address, timeout_s=0.5)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, before)
        assert fetch(address, "job").step == 0
        replicator.commit(1)
        assert fetch(address, "job").step == 1


def test_strangers_wait_for_their_turn_and_have_one_deadline(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchext.standby.session._GREETING_TIMEOUT_S", 1.5)
    host, port = daemon.address.rsplit(":", 1)
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection((host, int(port)), timeout=30)) for _ in range(50)]
        assert status(daemon.address, timeout_s=30)["jobs"] == {}
        slow = stack.enter_context(socket.create_connection((host, int(port)), timeout=0.05))
        slow.sendall(struct.pack("<I", 16_000))
        with pytest.raises(OSError, match=r"reset|Broken pipe"):  # noqa: PT012
            while True:  # a byte at a time does not prolong it
                slow.sendall(b"{")
                with contextlib.suppress(TimeoutError):
                    if slow.recv(1) == b"":
                        raise ConnectionResetError("reset")
        assert all(stranger.recv(1) == b"" for stranger in strangers)


@pytest.mark.parametrize(
    ("hello", "message"),
    [
        ({"rank": 2, "world_size": 2}, r"rank has to be from 0 to the world size - 1, got 2 of 2"),
        ({"rank": -1, "world_size": 2}, r"got -1 of 2"),
        ({"rank": "0", "world_size": 2}, r"got '0' of 2"),
    ],
)
def test_a_rank_that_cannot_be_is_refused(daemon: Daemon, hello: dict[str, Any], message: str) -> None:
    with wire.connect(daemon.address, 30) as sock, pytest.raises(StandbyError, match=message):
        wire.greet(sock, {"role": "primary", "job": "job", "run": "a", **hello}, 30)


def test_memory_outside_of_a_segment_is_never_read() -> None:
    segment = Segment(100, huge_pages=False)
    source = LocalSource(os.getpid())
    try:
        source.declare(1, 100, segment.descriptor, segment.size_bytes - 100, segment.nonce.hex())
        for size, offset in ((100, segment.size_bytes - 99), (-1, 0), (8, -8), (1 << 60, 0)):
            with pytest.raises(StandbyError, match=r"entry 1, .* is not within its segment of"):
                source.declare(1, size, segment.descriptor, offset, segment.nonce.hex())
        with pytest.raises(StandbyError, match="16 bytes, got 0"):
            LocalSource(os.getpid()).declare(1, 100, segment.descriptor, 0, "")
    finally:
        source.close()
        segment.close()


def test_both_ends_notice_a_host_that_is_gone(daemon: Daemon) -> None:
    model, optimizer = build()
    with Replicator(model, optimizer, standby=daemon.address, job="job", transport="tcp", mode="rpo0") as replicator:
        replicator.commit(0)
        session = daemon.jobs["job"].ranks[0].session
        link = replicator._publisher._link
        assert session is not None
        assert link is not None
        for sock in (session._sock, link._sock, *link._streams):
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000


def _message(text: bytes) -> bytes:
    return struct.pack("<I", len(text)) + text


def test_what_a_connection_fails_of_is_named_to_its_other_end(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    with wire.connect(daemon.address, 30) as sock, pytest.raises(StandbyError, match="KeyError: 'pid'"):
        wire.greet(sock, {"role": "primary", "rank": 0, "world_size": 1}, 30)
    assert "Traceback" in caplog.text


def test_random_bytes_do_no_harm(daemon: Daemon) -> None:
    texts = (b"[]", b"1", b"[" * 30_000, b"\xff", b"{}", b'{"nonce":"\\ud800"}')
    proofs = (b'{"proof":"\xc3\xa4"}', b'{"proof":"\\ud800"}', b'{"proof":1}')
    hello = _message(json.dumps({"purpose": wire._PURPOSE, "nonce": "a", "words": {}}).encode())
    words = [*map(_message, texts), *(hello + _message(proof) for proof in proofs)]
    host, port = daemon.address.rsplit(":", 1)
    for data in (b"GET / HTTP/1.1\r\n\r\n" * 3, b"TXS3" + b"\xff" * 40, os.urandom(100), b"", *words):
        # It may hang up before it has read all.
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=10) as sock:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass
    model = Net()
    with Replicator(model, torch.optim.AdamW(model.parameters()), standby=daemon.address, job="job") as replicator:
        replicator.commit(0)
        assert replicator.stats["connected"]
