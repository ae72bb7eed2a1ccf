"""The ordered engine over gloo, on one host and between hosts; faults are named as by the preemptive engine."""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchext
from tests.collectives import fuzz
from tests.collectives import test_faults as faults
from tests.collectives.test_programs import run_all
from tests.ranks import Rank, run_ranks, start_ranks
from torchext.collectives import (
    CollectiveAbortedError,
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DeadlockError,
    Options,
    PeerLostError,
    create,
    mesh,
    order,
    requests,
    without_collectives,
    wrap,
)
from torchext.collectives.order import OrderedWork
from torchext.collectives.work import DoneWork

Tensor = torch.Tensor

ORDERED = {"TORCHEXT_DFCCL_ENGINE": "ordered"}


# --- Disorder ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 4])  # not 3: there, groups are made in two orders, which gloo does not take
def test_reported_programs_give_the_right_values(world_size: int) -> None:
    results = run_ranks(run_all, world_size, backend="dfccl", env=ORDERED, deadline_s=200)
    assert results == [[]] * world_size


def wrapped(rank: Rank) -> None:
    """Two overlapping gloo groups in opposite orders, with large and small tensors, from two groups wrapped apart."""
    sets = [[0, 1], [1, 2], [0, 2], [0, 1, 2]]
    groups = {tuple(ranks): dist.new_group(ranks, backend="gloo") for ranks in sets}
    mine = {ranks: wrap(group) for ranks, group in groups.items() if rank.rank in ranks}
    for step in range(20):
        order = sorted(mine)
        if rank.rank % 2:
            order.reverse()
        works = []
        for ranks in order:
            x = torch.full((1 + 30_000 * (step % 2),), float(rank.rank + step))
            works.append((ranks, x, dist.all_reduce(x, group=mine[ranks], async_op=True)))
        for ranks, x, work in works if step % 3 else reversed(works):
            work.wait()
            assert bool((x == sum(ranks) + step * len(ranks)).all())
    group = mine[(0, 1, 2)]
    assert wrap(group) is group
    assert dist.get_process_group_ranks(group) == [0, 1, 2]
    assert group.inner is groups[(0, 1, 2)]  # type: ignore[attr-defined]
    x = torch.full((3,), float(rank.rank))
    dist.broadcast(x, 2, group=group)
    assert x[0] == 2
    future = dist.all_reduce(x, group=group, async_op=True).get_future().then(lambda f: f.value()[0] + 1)
    assert future.wait()[0] == 7
    for made in mine.values():
        dist.destroy_process_group(made)
    dist.all_reduce(x, group=groups[(0, 1, 2)])  # the wrapped group goes on
    with pytest.raises(CollectiveAbortedError, match="destroyed"):
        group.allreduce([x])
    again = wrap()  # the default group, after the last ordered group has ended
    dist.barrier(again)


def test_wrapped_groups_of_another_backend_share_one_order() -> None:
    run_ranks(wrapped, 3, backend="gloo", deadline_s=60)


class Interrupted(OrderedWork):
    """A signal comes just before the launch."""

    def launch(self, handle: Any) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("kind", [OrderedWork, Interrupted], ids=["while", "before"])
def test_a_collective_whose_launch_is_interrupted_tells_so(kind: type[OrderedWork]) -> None:
    from torchext._native import collectives as native

    def issue(work: OrderedWork) -> None:
        nothing: Any = (requests.BARRIER, requests.NO_REDUCE, 0, -1, -1, (), None, "", [0], [], [])
        work.handle = sequencer.native.issue(links, *nothing, 30.0, True, work)

    def launch() -> dist.Work:
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("not interrupted")

    def describe(work: OrderedWork, error: Exception | None) -> CollectiveError:
        raise AssertionError(str(error))

    sequencer = order.Sequencer()
    links = native.OrderGroup.over_sockets([0], 0, [-1], 1)
    sequencer.native.add(links)
    work, good = kind(sequencer, launch, [], None, describe), OrderedWork(sequencer, DoneWork, [], None, describe)
    with sequencer._launching:  # keeps its own thread from it
        issue(work)
        future = work.get_future()
        issue(good)
        with pytest.raises(KeyboardInterrupt):
            sequencer.launch_ready()
    with pytest.raises(CollectiveError, match=r"barrier was not launched: KeyboardInterrupt\(\) came first"):
        work.wait()
    with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
        future.wait()
    assert good.wait()  # launched by whoever waits
    sequencer.leave(links, "the end", aborted=False)
    sequencer.stop()


def more(rank: Rank) -> None:
    from tests.collectives import test_torch

    dist.init_process_group(
        "dfccl", store=rank.store, rank=rank.rank, world_size=2, pg_options=Options(engine="ordered")
    )
    assert type(dist.group.WORLD) is torchext.collectives.OrderedProcessGroup
    for name in ("objects", "coalesced", "batches", "futures", "from_cpp"):  # the others are more than gloo can do
        getattr(test_torch, name)(rank)
        dist.barrier()
    if rank.rank == 0:
        with (
            torchext.tag("alone"),
            pytest.raises(CollectiveTimeoutError, match=r"barrier tagged 'alone' .*rank 1 has not joined it"),
        ):
            dist.group.WORLD.monitored_barrier(timedelta(seconds=0.2))
    with pytest.raises(CollectiveError, match=r"all_reduce\(float32.*PREMUL_SUM"):  # told in the inner group's words
        dist.all_reduce(torch.ones(3), dist._make_nccl_premul_sum(0.5))
    test_torch.ddp(rank)
    dist.destroy_process_group()


def test_torch_uses_it_as_any_backend() -> None:
    run_ranks(more, 2, store="tcp", deadline_s=200)


# --- Faults -----------------------------------------------------------------------------------------------------------


def test_a_killed_rank_is_named_on_all_others_soon() -> None:
    with start_ranks(faults.reduce_until_error, 3, faults.LARGE, store="tcp", env=ORDERED, deadline_s=60) as ranks:
        for rank in range(3):
            ranks.wait_for(rank, "running")
        ranks.kill(1, signal.SIGKILL)
        killed = time.monotonic()
        outcomes = ranks.wait()
    for rank in (0, 2):
        assert outcomes[rank].kind == "returned", str(outcomes[rank])
        kind, text, culprits, when = outcomes[rank].value
        assert kind is PeerLostError
        assert culprits == (1,)
        assert "rank 1 died" in text
        assert when - killed < faults.SOON_S


def test_a_rank_killed_outside_any_call_fails_those_that_wait_for_it_and_their_futures() -> None:
    with start_ranks(faults.wait_for_killed, 2, store="tcp", env=ORDERED, deadline_s=60) as ranks:
        for rank in range(2):
            ranks.wait_for(rank, "ready")
        ranks.kill(1, signal.SIGKILL)
        outcomes = ranks.wait()
    assert outcomes[0].value == "told", str(outcomes[0])


def test_a_stopped_rank_that_continues_is_no_error() -> None:
    with start_ranks(faults.stopped_for_a_while, 2, store="tcp", env=ORDERED, deadline_s=60) as ranks:
        for rank in range(2):
            ranks.wait_for(rank, "ready")
        ranks.kill(1, signal.SIGSTOP)
        ranks.release("go")
        with pytest.raises(Exception, match="still running"):
            ranks.wait_for(0, "never announced", timeout_s=1.5)  # rank 0 waits meanwhile
        ranks.kill(1, signal.SIGCONT)
        assert ranks.values() == [100_000.0] * 2


def test_at_the_timeout_each_side_tells_what_the_other_has_called_instead() -> None:
    with start_ranks(faults.miss_each_other, 2, store="tcp", env=ORDERED, deadline_s=60) as ranks:
        for rank in range(2):
            ranks.wait_for(rank, "told")
        ranks.release("leave")
        values = ranks.values()
    for rank, (kind, text, culprits, _seconds) in enumerate(values):
        assert kind is CollectiveTimeoutError
        assert culprits == (1 - rank,)
        for dtype in ("float32", "float64"):
            assert f"all_reduce(sum, {dtype}, shape (4, 8)) tagged 'loss'" in text
        assert "test_faults.py" in text
        assert re.search(r"after [\d.]+ s \(timeout 2 s\)", text)


def mismatches(rank: Rank) -> list[Any]:
    left = faults.send_another_size(rank)
    if rank.rank == 0:
        dist.isend(torch.ones(4), 1)
        right = None
    else:
        right = faults.error_of(lambda: dist.recv(torch.empty(8), 0))
    other_type = faults.receive_another_type(rank)
    x = torch.ones(2)
    dist.all_reduce(x)  # and none has harmed the group
    return [left, right, other_type, float(x[0])]


def test_sizes_that_do_not_fit_are_told_at_once() -> None:
    values = run_ranks(mismatches, 2, store="tcp", env=ORDERED)
    for (kind, text, _culprits, seconds), _, (other_kind, other_text, *_), total in values:
        assert other_kind is CollectiveMismatchError
        assert "int32" in other_text
        assert "float32" in other_text
        assert kind is CollectiveMismatchError
        assert re.search(r"sends this rank \d+ bytes where it expects \d+", text)
        assert seconds < faults.SOON_S
        assert total == 2.0
    kind, text, culprits, _seconds = values[1][1]
    assert kind is CollectiveMismatchError
    assert culprits == (0,)
    assert "16 bytes" in text


def ends(rank: Rank) -> list[Any]:
    """Departure, abort and a new start, a fork; one after the other, each with a world of its own."""
    kinds = faults.abort_and_start_again(rank)
    text = faults.fork(rank)
    return [kinds, text, faults.leave_early(rank)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_groups_end_and_start_again() -> None:
    for place, (kinds, text, left) in enumerate(run_ranks(ends, 2, store="tcp", env=ORDERED)):
        assert all(kind in (CollectiveAbortedError, PeerLostError) for kind in kinds)
        assert "forked" in text
        if place == 0:
            assert left[0] is PeerLostError
            assert "rank 1 has left" in left[1]
            assert left[3] < faults.SOON_S


@pytest.mark.slow
def test_a_program_that_ends_with_many_threads_waiting_ends_well() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"STORE_PORT": str(server.port), **ORDERED}
    assert run_ranks(faults.end_with_threads_waiting, 2, env=env) == [0, 0]


@pytest.mark.slow
def test_a_program_that_ends_without_destroying_its_group_ends_well() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"STORE_PORT": str(server.port), **ORDERED}
    assert run_ranks(faults.end_without_destroy, 2, env=env) == [0, 0]


def test_ranks_that_do_not_come_are_named() -> None:
    run_ranks(faults.meet_too_few, 3, store="tcp", env=ORDERED)


# --- Between hosts ----------------------------------------------------------------------------------------------------


@pytest.fixture
def two_hosts() -> Iterator[list[str]]:
    """Two network namespaces with one link between them, as hosts have; the interface in each is called dfccl0."""
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip (Debian: iproute2)")
    names = [f"torchext-{os.getpid()}-{i}" for i in range(2)]
    commands = [f"netns add {name}" for name in names]
    commands.append(f"link add dfccl0 netns {names[0]} type veth peer name dfccl0 netns {names[1]}")
    for i, name in enumerate(names):
        commands.append(f"-n {name} address add 10.123.7.{i + 1}/24 dev dfccl0")
        commands += [f"-n {name} link set {device} up" for device in ("lo", "dfccl0")]
    try:
        for command in commands:
            done = subprocess.run(["ip", *command.split()], capture_output=True, text=True, timeout=20, check=False)
            if done.returncode:
                pytest.skip(f"may not make network namespaces: ip {command}: {done.stderr.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=20, check=False)


def enter_host(rank: Rank, namespaces: list[str]) -> None:
    """Makes this rank one of another host than the others: in its own network where there are any, else by name."""
    for module in (create, mesh):
        module._host = lambda: f"host {rank.rank}"  # type: ignore[attr-defined]
    if namespaces:
        os.environ["GLOO_SOCKET_IFNAME"] = "dfccl0"
        with open(f"/run/netns/{namespaces[rank.rank]}") as file:
            assert ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0x40000000) == 0, os.strerror(
                ctypes.get_errno()
            )


def between_hosts(rank: Rank, namespaces: list[str]) -> tuple[type, str, tuple[int, ...], float]:
    enter_host(rank, namespaces)
    # Not asked for: where ranks cannot share memory it is the engine that can.
    dist.init_process_group(
        "dfccl", store=rank.store, rank=rank.rank, world_size=rank.world_size, timeout=timedelta(seconds=40)
    )
    assert type(dist.group.WORLD) is torchext.collectives.OrderedProcessGroup
    fuzz.run_programs(rank, 0, 15, 30.0)
    x = torch.ones(300_000)
    with pytest.raises(CollectiveMismatchError, match="bytes where it expects"):
        dist.all_to_all_single(torch.empty(6), torch.empty(6), *[[1 + rank.rank] * rank.world_size] * 2)
    rank.announce("running")

    def loop() -> None:
        while True:
            dist.all_reduce(x)

    kind, text, ranks, _ = faults.error_of(loop)
    when = time.monotonic()
    dist.destroy_process_group()
    return kind, text, ranks, when


def check_between_hosts(world_size: int, namespaces: list[str]) -> None:
    with start_ranks(between_hosts, world_size, namespaces, store="file", deadline_s=200) as ranks:
        for rank in range(world_size):
            ranks.wait_for(rank, "running")
        ranks.kill(1, signal.SIGKILL)
        killed = time.monotonic()
        outcomes = ranks.wait()
    for rank in {*range(world_size)} - {1}:
        assert outcomes[rank].kind == "returned", str(outcomes[rank])
        kind, text, culprits, when = outcomes[rank].value
        assert kind is PeerLostError
        assert culprits == (1,)
        assert "rank 1 died" in text
        assert when - killed < faults.SOON_S


def test_ranks_that_share_no_memory_agree_over_sockets() -> None:
    check_between_hosts(3, [])


def test_ranks_in_two_networks_agree_over_sockets(two_hosts: list[str]) -> None:
    check_between_hosts(2, two_hosts)


def ring_of_wrapped_groups(rank: Rank) -> tuple[tuple[type, str, tuple[int, ...], float], str]:
    """Each rank waits for its right neighbour; it has no link to the one across, and every other link is a socket."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            without_collectives(thread)  # the harness's
    pairs = [[0, 1], [1, 2], [2, 3], [0, 3]]
    groups = [dist.new_group(pair, backend="gloo") for pair in pairs]
    mesh._host = lambda: f"host {rank.rank // 2}"
    mine = {i: wrap(groups[i]) for i, pair in enumerate(pairs) if rank.rank in pair}
    right = mine[rank.rank]  # by its place in `pairs`
    told = faults.error_of(lambda: dist.all_reduce(torch.ones(5), group=right))
    dist.barrier()
    while "has waited" in (text := torchext.collectives.explain()):  # until all have heard that it is over
        threading.Event().wait(0.01)
    for group in mine.values():
        dist.destroy_process_group(group)
    return told, text


def test_a_circle_of_ranks_that_are_not_all_linked_is_told_to_each() -> None:
    for rank, (told, text) in enumerate(run_ranks(ring_of_wrapped_groups, 4, backend="gloo")):
        kind, message, ranks, seconds = told
        assert kind is DeadlockError
        assert ranks == (0, 1, 2, 3)
        for other in range(4):
            assert f"rank {other} has waited" in message
        assert seconds < faults.SOON_S
        assert f"seen from rank {rank}:" in text


def verdict(versions: dict[int, int]) -> bytes:
    """A record of csrc/collectives/order_state.hpp that tells of a deadlock, by the versions of its ranks' views."""
    members = b"".join(struct.pack("=QQ", rank, version) for rank, version in versions.items())
    num_bytes = -(-(24 + len(members)) // 16) * 16
    return (struct.pack("=IB3xIIQ", num_bytes, 6, 7, 0, len(versions)) + members).ljust(num_bytes, b"\0")


def test_what_two_ranks_tell_of_one_deadlock_does_not_go_around_forever() -> None:
    from torchext._native import collectives as native

    pairs = [socket.socketpair() for _ in range(2)]
    orderer = native.Orderer()
    orderer.add(native.OrderGroup.over_sockets([0, 1, 2], 0, [-1, *(own.detach() for own, _ in pairs)], 1))
    told = [verdict({1: 5, 2: 7}), verdict({1: 6, 2: 6})]
    pairs[0][1].sendall(b"".join(told * 3))  # as they come back from others that pass them on
    orderer.reports()  # reads all that has come
    for _, end in pairs:
        with end:
            end.setblocking(False)
            assert end.recv(10_000) == b"".join(told)


def talk(server: Callable[[socket.socket], Any], client: Callable[[socket.socket], Any]) -> tuple[Any, Any]:
    """Runs both ends of a connection; returns what they return, or their errors."""
    ends = socket.socketpair()
    results: list[Any] = [None, None]

    def run(place: int, fn: Callable[[socket.socket], Any]) -> None:
        with ends[place]:
            try:
                results[place] = fn(ends[place])
            except Exception as error:
                results[place] = error

    thread = threading.Thread(target=run, args=(1, client))
    thread.start()
    run(0, server)
    thread.join()
    return results[0], results[1]


def test_only_those_who_know_the_secret_of_the_store_are_admitted() -> None:
    secret, other = secrets.token_bytes(32), secrets.token_bytes(32)

    def admit(connection: socket.socket) -> int:
        return mesh._admit(connection, 0, secret, 3.0)

    def caller(known: bytes, called: int = 0, magic: bytes = mesh._MAGIC) -> Callable[[socket.socket], bool]:
        def call(connection: socket.socket) -> bool:
            nonce = secrets.token_bytes(mesh._NONCE_BYTES)
            connection.sendall(mesh._HELLO.pack(magic, nonce, 1, called))
            answer = mesh._read(connection, mesh._NONCE_BYTES + mesh._PROOF_BYTES)
            theirs, proof = answer[: mesh._NONCE_BYTES], answer[mesh._NONCE_BYTES :]
            connection.sendall(mesh._proof(known, b"caller", nonce, theirs, 1, called))
            return proof == mesh._proof(known, b"listener", nonce, theirs, 1, called)

        return call

    assert talk(admit, caller(secret)) == (1, True)
    assert talk(admit, caller(other)) == (-1, False)
    assert talk(admit, caller(secret, called=2))[0] == -1
    assert talk(admit, caller(secret, magic=b"http/1.1"))[0] == -1
    assert talk(admit, lambda connection: connection.recv(1))[0] == -1  # says nothing
    assert talk(admit, lambda connection: None)[0] == -1  # hangs up
