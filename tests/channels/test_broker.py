"""Channels across machines: once, in order, whatever becomes of the network; and that deaths are told."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.channels.processes import DEADLINE_S, die, ends, process
from tests.channels.proxy import Proxy
from tests.channels.test_messages import equal
from torchext import transport
from torchext.channels import (
    Broker,
    Channel,
    ChannelClosed,
    ChannelError,
    ChannelFull,
    ChannelLoader,
    ChannelTimeout,
    PeerDied,
    Sender,
    WeightBroadcast,
    broker,
    carriers,
    join,
    wire,
)
from torchext.channels.link import Link
from torchext.channels.trees import stack

ROOT = Path(__file__).parents[2]
TOKEN = "a token of the tests"
SIZE = 1 << 12


def until(condition: Callable[[], bool]) -> None:
    """Waits for what nothing announces."""
    deadline = time.monotonic() + DEADLINE_S
    event = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        event.wait(0.005)


@contextlib.contextmanager
def served(channel: Channel, weights: WeightBroadcast | None = None, **options: Any) -> Iterator[Broker]:
    parts: dict[str, Any] = {"rollouts": channel} if weights is None else {"rollouts": channel, "policy": weights}
    with Broker("127.0.0.1:0", parts, token=TOKEN, **{"grace_s": DEADLINE_S, **options}) as served:
        yield served


def message(i: int) -> dict[str, Any]:
    noise = torch.randn(SIZE, generator=torch.Generator().manual_seed(i))  # cannot be compressed
    return {"i": i, "x": noise, "r": i / 2, "even": i % 2 == 0}


def explore(address: str, first: int, count: int) -> None:
    with join(address, token=TOKEN, timeout=DEADLINE_S) as site:
        channel = site.channel("rollouts")
        with channel.sender(f"explorer-{first}") as sender:
            for i in range(first, first + count):
                sender.send(message(i), timeout=DEADLINE_S, version=i)
        site.close(timeout=DEADLINE_S)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_messages_of_other_machines_arrive_once_and_in_order(batch_size: int) -> None:
    # With batches, they are put into rows of the learner's open batch.
    with (
        Channel(slots=4, num_senders=2) as channel,
        served(channel) as server,
        process(explore, server.address, 0, 40) as first,
        process(explore, server.address, 1000, 40) as second,
    ):
        numbers = []
        for batch in ChannelLoader(channel, batch_size, timeout=DEADLINE_S):
            numbers += batch["i"].tolist()
            assert equal(batch, stack([message(int(i)) for i in batch["i"]]))
        assert [i for i in numbers if i < 1000] == list(range(40))
        assert [i for i in numbers if i >= 1000] == list(range(1000, 1040))
        assert [ends(first), ends(second)] == [0, 0]
        senders = {peer["name"]: peer["presence"] for peer in channel.stats()["peers"] if peer["role"] == "sender"}
        assert senders == {"explorer-0@127.0.0.1": "left", "explorer-1000@127.0.0.1": "left"}


@pytest.mark.parametrize("seed", range(3))
def test_no_cut_loses_or_repeats_a_message(seed: int) -> None:
    chance = random.Random(seed)
    count = 60
    cuts = (chance.randrange(1, 12 * 4 * SIZE) for _ in range(30))
    with (
        Channel(slots=3) as channel,
        served(channel) as server,
        Proxy(server.address, cuts, "127.0.0.2") as network,
        process(explore, network.address, 0, count) as child,
    ):
        got = [channel.receive_versioned(DEADLINE_S) for _ in range(count)]
        assert [version for _, version in got] == list(range(count))
        assert all(equal(tree, message(i)) for i, (tree, _) in enumerate(got))
        assert list(channel) == []  # and that was all
        assert ends(child) == 0
        assert network.num_cuts > 0


def test_a_cut_while_the_channel_is_full() -> None:
    # The message in hand is neither lost with its connection nor put in twice, by the old one and the new.
    with (
        Channel(slots=1) as channel,
        served(channel) as server,
        Proxy(server.address, iter(()), "127.0.0.2") as network,
        join(network.address, token=TOKEN) as site,
    ):
        far = site.channel("rollouts")
        sender = far.sender()
        for i in range(3):
            sender.send(i, timeout=DEADLINE_S)
        until(lambda: channel.stats()["depth"] == 1)
        for _ in range(3):
            connections = len(network._pairs)
            network.cut()
            until(lambda known=connections: len(network._pairs) > known)  # type: ignore[misc]
        assert [channel.receive(DEADLINE_S) for _ in range(3)] == [0, 1, 2]
        sender.close()
        assert list(channel) == []


def test_what_a_superseded_connection_holds_is_left_to_the_new_one() -> None:
    with contextlib.ExitStack() as stack, Channel() as channel:
        pairs = [[stack.enter_context(sock) for sock in socket.socketpair()] for _ in range(2)]
        session = broker._Session(channel._own_queue(), "127.0.0.1:1", threading.Event())
        for _, far in pairs:
            wire.send_words(far, wire.Kind.JOINED, {"sender": 1, "name": "explorer-0", "pid": 1}, seq=1)
        (old, _), (new, _) = pairs
        turn = session.take_over(old)
        frame = wire.receive(old)
        assert session.take_over(new) == turn + 1
        with pytest.raises(ConnectionError, match="connected again"):
            session._take(old, frame, turn)
        assert session.done == 0
        assert session._take(new, wire.receive(new), turn + 1)
        assert session.done == 1
        session.end()


def test_closing_at_the_moment_when_the_connection_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    greet, waiting = Link._greet, []

    def greet_late(link: Link, words: dict[str, Any]) -> Any:
        if words.get("resumes"):
            waiting.append(link)
            assert link.closing.wait(DEADLINE_S)
        return greet(link, words)

    monkeypatch.setattr(Link, "_greet", greet_late)
    with (
        Channel(slots=1) as channel,
        WeightBroadcast({"w": torch.zeros(1)}) as weights,
        served(channel, weights) as server,
        Proxy(server.address, iter(()), "127.0.0.2") as network,
    ):
        site = join(network.address, token=TOKEN)
        site.weights("policy")
        sender = site.channel("rollouts").sender()
        for i in range(3):
            sender.send(i, timeout=DEADLINE_S)
        until(lambda: channel.stats()["depth"] == 1)
        network.cut()
        until(lambda: len(waiting) == 2)
        with pytest.raises(ChannelTimeout, match=r"\d messages were not taken by the learner"):
            site.close(timeout=0.1)


def test_a_learner_may_be_busy_for_longer_than_silence_is_borne(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (broker, carriers):
        monkeypatch.setattr(module, "SILENT_S", 1.0)
    with Channel(slots=1) as channel, served(channel) as server, join(server.address, token=TOKEN) as site:
        sender = site.channel("rollouts").sender()
        large = torch.arange(1 << 20)  # more than fits into the sockets
        thread = threading.Thread(target=lambda: [sender.send(large + i, timeout=DEADLINE_S) for i in range(4)])
        thread.start()
        until(lambda: channel.stats()["depth"] == 1)
        threading.Event().wait(2.0)
        for i in range(4):
            assert torch.equal(channel.receive(DEADLINE_S), large + i)
        thread.join()
        sender.close()


@pytest.mark.parametrize("policy", ["drop_oldest", "drop_newest"])
def test_full_channels_drop_and_count_on_the_machine_where_they_are_full(policy: Any) -> None:
    with (
        Channel(slots=2, policy=policy) as channel,
        served(channel) as server,
        join(server.address, token=TOKEN) as site,
    ):
        far = site.channel("rollouts")
        with far.sender() as sender:
            for i in range(50):
                sender.send(i)
        site.close(timeout=None)
        near, there = channel.stats(), far.stats()
        got = list(channel)
        assert got == sorted(got)
        assert got[-1] == 49 if policy == "drop_oldest" else got[0] == 0
        dropped = sum(stats[f"dropped_{policy[5:]}"] for stats in (near, there))
        assert len(got) + dropped == 50


def test_errors_of_full_channels_are_raised_where_the_message_is_sent() -> None:
    with (
        Channel(slots=1, policy="error") as channel,
        served(channel) as server,
        join(server.address, token=TOKEN) as site,
    ):
        with site.channel("rollouts").sender() as sender:
            sent = 0
            with contextlib.suppress(ChannelFull):
                while sent < 1000:  # far more than fit here, there and between
                    sender.send(sent)
                    sent += 1
        assert sent < 1000
        assert [channel.receive(DEADLINE_S) for _ in range(sent)] == list(range(sent))  # what was taken arrives
        assert list(channel) == []


# --- Compression ---------------------------------------------------------------------------------------------------


def test_it_compresses_where_the_network_is_slower_than_that_saves() -> None:
    def after(link: float, compressor: float, ratio: float) -> bool:
        compression = wire.Compression(available=True)
        for _ in range(20):
            compression.note_sent(1 << 20, (1 << 20) / link)
            compression.note_compressed(1 << 20, int(ratio * (1 << 20)), (1 << 20) / compressor)
        return compression.pays(1 << 20)

    assert after(link=1e8, compressor=5e8, ratio=0.4)  # 1 GbE, frames of a game
    assert not after(link=1e10, compressor=5e8, ratio=0.4)  # 100 GbE
    assert not after(link=1e8, compressor=5e8, ratio=1.0)  # noise
    compression = wire.Compression(available=True)
    assert not compression.pays(1 << 20)  # nothing is known yet
    assert [compression.samples(1 << 20) for _ in range(34)] == [True, *[False] * 32, True]
    assert not compression.samples(100)
    assert not wire.Compression(available=False).samples(1 << 20)


@pytest.mark.parametrize("batch_rows", [0, 3])
def test_compressed_messages_and_weights_arrive_as_they_were(batch_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lz4", reason="needs lz4: pip install 'torchext[lz4]'")
    monkeypatch.setattr(wire.Compression, "pays", lambda _, size: size >= wire.Compression.LEAST_BYTES)
    sizes: list[int] = []
    decompressed = wire.decompressed
    monkeypatch.setattr(wire, "decompressed", lambda data, raw: sizes.append(len(data)) or decompressed(data, raw))
    model = {"w": torch.zeros(1 << 16)}
    with Channel() as channel, WeightBroadcast(model) as weights, served(channel, weights) as server:
        channel._own_queue().set_batch_rows(batch_rows)
        with join(server.address, token=TOKEN) as site, site.channel("rollouts").sender() as sender:
            trees = [{"zeros": torch.full((1 << 14,), i), "noise": torch.randn(1 << 14)} for i in range(3)]
            for tree in trees:
                sender.send(tree, timeout=DEADLINE_S)
            for tree in trees:
                assert equal(channel.receive(DEADLINE_S), tree)
            far = site.weights("policy")
            weights.publish({"w": torch.full((1 << 16,), 7.0)})
            assert far.wait(timeout=DEADLINE_S) == 1
            assert (far.state_dict()["w"] == 7).all()
    assert len(sizes) == 4
    assert all(size < (3 << 16) for size in sizes)


# --- Weights -------------------------------------------------------------------------------------------------------


def test_weights_follow_the_learners_versions_and_never_go_back() -> None:
    model, copy = torch.nn.Linear(300, 300), torch.nn.Linear(300, 300)
    chance = random.Random(0)
    cuts = (chance.randrange(100, 3000) for _ in range(20))
    with (
        Channel() as channel,
        WeightBroadcast(model) as weights,
        served(channel, weights) as server,
        Proxy(server.address, cuts, "127.0.0.2") as network,
        join(network.address, token=TOKEN) as site,
    ):
        far = site.weights("policy")
        seen = 0
        for number in itertools.count(1):
            with torch.no_grad():
                model.weight.fill_(number)
            assert weights.publish() == number
            if number % 10 == 0:
                network.cut()
            if number < 40:
                version = far.wait(newer_than=seen, timeout=DEADLINE_S)
                assert version > seen
                seen = far.load_into(copy)
                assert (copy.weight == seen).all()  # whole, and the number it has at the learner
            else:
                break
        while seen < number:
            far.wait(newer_than=seen, timeout=DEADLINE_S)
            seen = far.load_into(copy)
        assert seen == number
        weights.close()
        with pytest.raises(ChannelClosed):
            far.wait(newer_than=number, timeout=DEADLINE_S)


# --- Deaths --------------------------------------------------------------------------------------------------------


def wait_for_pid(address: str, pids: Channel, dies: str) -> None:
    """A machine with one explorer: that process, or this one, which joins, is killed."""
    site = join(address, token=TOKEN, timeout=DEADLINE_S)
    channel = site.channel("rollouts")
    with process(send_and_wait, channel, pids) as child:
        if dies == "explorer":
            # Not waited for by its parent before, from when on the kernel may not tell how it ended.
            until(lambda: any(peer["presence"] == "dead" for peer in channel.stats()["peers"]))
            assert ends(child) == -signal.SIGKILL
            site.close(timeout=DEADLINE_S)
        else:
            ends(child)


def send_and_wait(channel: Channel, pids: Channel) -> None:
    sender, pid_sender = channel.sender("explorer-3"), pids.sender()
    sender.send("last words", timeout=DEADLINE_S)
    pid_sender.send(os.getpid(), timeout=DEADLINE_S)
    pid_sender.close()
    with sender.reserve(torch.empty(4)):
        while True:
            signal.pause()


def test_the_death_of_an_explorer_elsewhere_is_told_with_its_exit_code() -> None:
    with (
        Channel() as channel,
        Channel() as pids,
        served(channel) as server,
        process(wait_for_pid, server.address, pids, "explorer") as site,
    ):
        pid = pids.receive(DEADLINE_S)
        os.kill(pid, signal.SIGKILL)
        assert channel.receive(DEADLINE_S) == "last words"
        with pytest.raises(PeerDied, match=r"explorer-3@127.0.0.1 \(process \d+\) died with exit code -9") as caught:
            channel.receive(DEADLINE_S)
        assert caught.value.pid == pid
        assert ends(site) == 0


def test_explorers_whose_machine_is_lost_are_told_to_be_dead() -> None:
    with (
        Channel() as channel,
        Channel() as pids,
        served(channel, grace_s=0.2) as server,
        process(wait_for_pid, server.address, pids, "site") as site,
    ):
        pid = pids.receive(DEADLINE_S)
        assert channel.receive(DEADLINE_S) == "last words"
        until(lambda: any(p["name"] == "explorer-3@127.0.0.1" for p in channel.stats()["peers"]))
        try:
            site.kill()
            with pytest.raises(PeerDied, match=r"explorer-3@127.0.0.1 .* unknown exit code"):
                channel.receive(DEADLINE_S)
        finally:
            os.kill(pid, signal.SIGKILL)


def send_for_ever(sender: Sender) -> None:
    while True:
        sender.send(torch.zeros(SIZE), timeout=DEADLINE_S)


def learn_and_die(ports: Channel, goes: Channel) -> None:
    channel, weights = Channel(slots=2), WeightBroadcast({"w": torch.zeros(2)})
    server = Broker("127.0.0.1:0", {"rollouts": channel, "policy": weights}, token=TOKEN)
    weights.publish()
    with ports.sender() as sender:
        sender.send(server.address, timeout=DEADLINE_S)
    goes.receive(DEADLINE_S)
    die()


def test_explorers_elsewhere_learn_that_the_learner_died() -> None:
    with (
        Channel() as ports,
        Channel() as goes,
        goes.sender() as go,
        process(learn_and_die, ports, goes) as learner,
    ):
        address = ports.receive(DEADLINE_S)
        with join(address, token=TOKEN) as site:
            channel, weights = site.channel("rollouts"), site.weights("policy")
            assert weights.wait(timeout=DEADLINE_S) == 1
            sender = channel.sender()
            go.send(None)
            with pytest.raises(PeerDied, match=r"learner at 127.0.0.1:\d+ \(process \d+\) died") as caught:
                send_for_ever(sender)
            assert caught.value.pid == learner.pid
            with pytest.raises(PeerDied, match="learner at"):
                weights.wait(newer_than=1, timeout=DEADLINE_S)
            with pytest.raises(ChannelClosed):
                sender.send(1, timeout=DEADLINE_S)


def test_the_end_of_the_learners_channel_is_told() -> None:
    with Channel() as channel, served(channel) as server, join(server.address, token=TOKEN) as site:
        sender = site.channel("rollouts").sender()
        channel.close()
        with pytest.raises(ChannelClosed):
            send_for_ever(sender)


def test_closing_tells_how_many_messages_are_lost() -> None:
    with Channel(slots=1) as channel, served(channel) as server:
        site = join(server.address, token=TOKEN)
        sender = site.channel("rollouts").sender()
        for i in range(3):
            sender.send(i, timeout=DEADLINE_S)
        until(lambda: channel.stats()["depth"] == 1)
        with pytest.raises(
            ChannelTimeout, match=r"\d messages were not taken by the learner within 0.1 s, and are lost"
        ):
            site.close(timeout=0.1)
        site.close()


# --- Strangers -----------------------------------------------------------------------------------------------------


def test_strangers_are_turned_away_and_the_broker_goes_on() -> None:
    with Channel() as channel, served(channel) as server:
        with pytest.raises(ChannelError, match="the other end has another token"):
            join(server.address, token="another").channel("rollouts")
        with join(server.address, token=TOKEN) as site:
            with pytest.raises(ChannelError, match=r"there is no 'weights' here; there are: rollouts"):
                site.weights("weights")
            with pytest.raises(ChannelError, match=r"'rollouts' is a channel, not a WeightBroadcast"):
                site.weights("rollouts")
        host, _, port = server.address.rpartition(":")
        for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, b"\x02\x00\x00\x00{}", b"\x04\x00\x00\x00null"):
            with (
                socket.create_connection((host, int(port)), timeout=DEADLINE_S) as stranger,
                contextlib.suppress(OSError),  # the broker may hang up at any time
            ):
                stranger.sendall(garbage)
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(1 << 16):
                    pass
        with join(server.address, token=TOKEN) as site, site.channel("rollouts").sender() as sender:
            sender.send(1)
            assert channel.receive(DEADLINE_S) == 1


def test_the_broker_goes_on_once_there_are_descriptors() -> None:
    with Channel() as channel, served(channel) as server, socket.socket() as caller:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            host, _, port = server.address.rpartition(":")
            caller.connect((host, int(port)))
            caller.settimeout(0.2)
            with pytest.raises(TimeoutError):
                caller.recv(1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        words = {"part": "rollouts", "kind": "channel", "session": "s"}
        caller.settimeout(DEADLINE_S)
        assert transport.greet(caller, TOKEN, wire.PURPOSE, words, DEADLINE_S)["slots"] == 8


def test_nobody_there_is_told_at_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ChannelTimeout, match=rf"no broker answers at 127.0.0.1:{port} within 0 s"):
        join(f"127.0.0.1:{port}", token=TOKEN, timeout=0).channel("rollouts")


def test_wrong_arguments_are_named() -> None:
    with Channel() as channel:
        with pytest.raises(ValueError, match="host:port"):
            Broker("nowhere", {"rollouts": channel}, token=TOKEN)
        with pytest.raises(ValueError, match="host:port"):
            join("nowhere", token=TOKEN)
        with pytest.raises(ValueError, match="token must not be empty"):
            Broker("127.0.0.1:0", {"rollouts": channel}, token="")
        with pytest.raises(ValueError, match="token must not be empty"):
            join("127.0.0.1:1", token="")
        with pytest.raises(ValueError, match="parts must name at least one"):
            Broker("127.0.0.1:0", {}, token=TOKEN)
        with pytest.raises(TypeError, match=r"parts\['model'\] must be a Channel or WeightBroadcast, got Linear"):
            Broker("127.0.0.1:0", {"model": torch.nn.Linear(1, 1)}, token=TOKEN)  # type: ignore[dict-item]
        with served(channel) as server, pytest.raises(OSError, match=f"cannot listen at {server.address}"):
            Broker(server.address, {"rollouts": channel}, token=TOKEN)


# --- Messages as bytes ---------------------------------------------------------------------------------------------

_leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=4),
    st.binary(max_size=4),
    st.lists(st.integers(0, 9), max_size=3).map(lambda shape: torch.arange(float(np.prod(shape))).reshape(shape)),
    st.integers(0, 5).map(lambda n: np.arange(n, dtype=np.int32)),
)
_trees = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3), st.tuples(inner, inner)
    ),
    max_leaves=8,
)


@given(_trees)
def test_messages_carried_into_rows_come_out_as_they_went_in(tree: Any) -> None:
    with Channel() as source, Channel() as target, source.sender() as sender:
        target._own_queue().set_batch_rows(2)
        for _ in range(2):
            sender.send(tree)
        receiver, carrier = source._join(), target.sender()._endpoint
        assert carrier is not None
        for version in range(2):
            array, header_bytes, _, _ = receiver.receive_bytes(10)  # type: ignore[misc]
            assert carrier.send_bytes(array.data, header_bytes, version, 10) == 0
        for version in range(2):
            got, stamp = target.receive_versioned(10)
            assert equal(got, tree)
            assert stamp == version


@given(st.binary(max_size=80), st.integers(0, 80))
def test_damaged_messages_are_refused_or_read_but_never_crash(data: bytes, header_bytes: int) -> None:
    with Channel() as target, target.sender() as sender:
        target._own_queue().set_batch_rows(2)
        assert sender._endpoint is not None
        with contextlib.suppress(ValueError, RuntimeError, IndexError):
            sender._endpoint.send_bytes(data, header_bytes, 0, 10)


# --- Two network namespaces ----------------------------------------------------------------------------------------

# The explorers reach the broker through a proxy on its host, which cuts connections within messages of 800 kB; and
# the cable is out for a while.
NOISE = """
import torch
def noise(i):  # cannot be compressed
    return torch.randint(0, 256, (800_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(i))
"""
LEARNER = f"""{NOISE}
import subprocess, threading
from tests.channels.proxy import Proxy
from torchext.channels import Broker, Channel

def plug(state):
    subprocess.run(["ip", "link", "set", "veth0", state], check=True)

cuts = (300_000 + 950_000 * i for i in range(4))
with Channel(slots=2) as channel, Broker("10.77.0.1:7000", dict(rollouts=channel), token="t", grace_s=60) as broker:
    with Proxy(broker.address, cuts, "10.77.0.1", 7001) as network:
        print("ready", flush=True)
        got = []
        for i in range(20):
            got.append(channel.receive(50))
            if i == 10:
                plug("down")
                threading.Timer(0.5, plug, ("up",)).start()
        print([torch.equal(x, noise(i)) for i, x in enumerate(got)] == [True] * 20)
        print(list(channel), network.num_cuts, flush=True)  # and nothing twice
"""
EXPLORER = f"""{NOISE}
from torchext.channels import join
with join("10.77.0.1:7001", token="t", timeout=50) as site:
    with site.channel("rollouts").sender() as sender:
        for i in range(20):
            sender.send(noise(i), timeout=50)
    site.close(timeout=50)
"""
HOSTS = """
set -e
unshare -n sh -c 'echo up; exec sleep 100' > "$DIR/other" &
other=$!
trap 'kill $other' EXIT
while ! [ -s "$DIR/other" ]; do :; done
ip link add veth0 type veth peer name veth1 netns $other
ip address add 10.77.0.1/24 dev veth0 && ip link set veth0 up && ip link set lo up
nsenter -t $other -n sh -c 'ip address add 10.77.0.2/24 dev veth1 && ip link set veth1 up'
"$PYTHON" -c "$LEARNER" &
learner=$!
nsenter -t $other -n "$PYTHON" -c "$EXPLORER"
wait $learner
"""


def test_two_hosts_with_a_network_between_them_that_fails(tmp_path: Path) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare(1) and ip(8)")
    probe = "unshare -n true && ip link add name torchext0 type veth peer name torchext1"
    if subprocess.run(["unshare", "-rn", "sh", "-c", probe], check=False, capture_output=True).returncode:
        pytest.skip("needs network namespaces, which this user may make, and ip(8)")
    done = subprocess.run(
        ["unshare", "-rn", "sh", "-c", HOSTS],
        env={**os.environ, "DIR": str(tmp_path), "PYTHON": sys.executable, "LEARNER": LEARNER, "EXPLORER": EXPLORER},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout == "ready\nTrue\n[] 4\n", done.stdout + done.stderr
