"""Deaths, departures, timeouts and mistakes end in named errors on the survivors, soon, and leave nothing behind."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchext
from tests.collectives import fuzz
from tests.ranks import Rank, run_ranks, start_ranks
from torchext.collectives import (
    CollectiveAbortedError,
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
)

LARGE = 4_000_000  # elements; takes long enough to be killed in
# By when a fault is told that is told in a fraction of a second where nothing else runs: long before any timeout.
SOON_S = 15.0


def init(rank: Rank, timeout_s: float = 30.0, prefix: str = "") -> None:
    store = dist.PrefixStore(prefix, rank.store)
    timeout = timedelta(seconds=30)
    dist.init_process_group("dfccl", store=store, rank=rank.rank, world_size=rank.world_size, timeout=timeout)
    if timeout_s < 30:  # of calls that are to time out: all ranks have come by then
        dist.barrier()
        dist.group.WORLD.set_timeout(timedelta(seconds=timeout_s))  # type: ignore[union-attr]


def error_of(call: Callable[[], Any]) -> tuple[type, str, tuple[int, ...], float]:
    """The error, and after what time it came."""
    start = time.monotonic()
    try:
        call()
    except CollectiveError as error:
        return type(error), str(error), error.ranks, time.monotonic() - start
    raise AssertionError("no error")


def shared_memory() -> list[str]:
    """Arenas that this process still maps, once nothing refers to the groups any more."""
    gc.collect()
    return re.findall(r".*torchext-dfccl.*", open("/proc/self/maps").read())


# --- Death ------------------------------------------------------------------------------------------------------------


def reduce_until_error(rank: Rank, size: int) -> tuple[type, str, tuple[int, ...], float]:
    init(rank)
    x = torch.ones(size)
    dist.all_reduce(x)
    rank.announce("running")
    last = time.monotonic()

    def loop() -> None:
        nonlocal last
        while True:
            last = time.monotonic()
            x.fill_(1)
            dist.all_reduce(x)

    kind, text, ranks, _ = error_of(loop)
    again = error_of(lambda: dist.all_reduce(x))  # from then on at once
    assert again[0] is PeerLostError
    assert again[3] < SOON_S
    dist.destroy_process_group()
    assert shared_memory() == []
    return kind, text, ranks, time.monotonic()


@pytest.mark.parametrize("size", [1, LARGE])
def test_a_killed_rank_is_named_on_all_others_soon(size: int) -> None:
    with start_ranks(reduce_until_error, 3, size, store="tcp", deadline_s=60) as ranks:
        for rank in range(3):
            ranks.wait_for(rank, "running")
        ranks.kill(1, signal.SIGKILL)
        killed = time.monotonic()
        outcomes = ranks.wait()
    assert outcomes[1].signal == signal.SIGKILL
    for rank in (0, 2):
        assert outcomes[rank].kind == "returned", str(outcomes[rank])
        kind, text, culprits, when = outcomes[rank].value
        assert kind is PeerLostError
        assert culprits == (1,)
        assert "rank 1 died" in text
        assert when - killed < SOON_S


def run_until_error(rank: Rank, seed: int) -> tuple[str, tuple[int, ...], float]:
    init(rank)
    groups = {ranks: dist.new_group(ranks) for ranks in fuzz.all_groups(rank.world_size)}
    dist.barrier()
    rank.announce("running")

    def loop() -> None:
        for i in range(1_000_000):
            fuzz.run_program(fuzz.Program(seed + i, rank.world_size), rank.rank, groups)

    with pytest.raises((AssertionError, CollectiveError)) as caught:
        loop()
    when = time.monotonic()
    failed = caught.value.__cause__ or caught.value  # an AssertionError names the program
    if not isinstance(failed, CollectiveError):
        raise failed
    dist.destroy_process_group()
    return f"{type(failed).__name__}: {failed}", failed.ranks, when


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["preemptive", "ordered"])
@pytest.mark.parametrize("attempt", range(10))
def test_ranks_stopped_and_killed_anywhere_in_random_programs(
    engine: str, attempt: int, request: pytest.FixtureRequest
) -> None:
    rng = random.Random(f"{request.config.getoption('--seed')}/{attempt}")
    env = {"TORCHEXT_DFCCL_ENGINE": engine}
    with start_ranks(run_until_error, 3, rng.randrange(10**6), store="tcp", env=env, deadline_s=60) as ranks:
        for rank in range(3):
            ranks.wait_for(rank, "running")
        for _ in range(3):
            stopped = rng.randrange(3)
            time.sleep(rng.uniform(0.0, 0.3))  # a point in time is what it is about
            ranks.kill(stopped, signal.SIGSTOP)
            time.sleep(rng.uniform(0.0, 0.5))
            ranks.kill(stopped, signal.SIGCONT)
        time.sleep(rng.uniform(0.0, 0.2))
        killed = rng.randrange(3)
        ranks.kill(killed, signal.SIGKILL)
        when_killed = time.monotonic()
        outcomes = ranks.wait()
    for rank, outcome in enumerate(outcomes):
        if rank == killed:
            assert outcome.signal == signal.SIGKILL  # it had met no error before, whoever was stopped
            continue
        assert outcome.kind == "returned", str(outcome)
        text, culprits, when = outcome.value
        # It may have waited for the other survivor alone, which has left after it was told.
        assert text.startswith("PeerLostError") or "gave up" in text or "destroyed" in text, text
        assert culprits in ((killed,), (3 - rank - killed,)), text
        assert when - when_killed < SOON_S


def wait_for_killed(rank: Rank) -> str:
    init(rank)
    if rank.rank == 1:
        rank.announce("ready")
        rank.wait_for("never", 60)
    work = dist.all_reduce(torch.ones(10), async_op=True)
    future = work.get_future()
    rank.announce("ready")
    with pytest.raises(PeerLostError):
        work.wait()
    with pytest.raises(RuntimeError, match="rank 1 died"):
        future.wait()
    return "told"


def test_a_rank_killed_outside_any_call_fails_those_that_wait_for_it_and_their_futures() -> None:
    with start_ranks(wait_for_killed, 2, store="tcp", deadline_s=60) as ranks:
        for rank in range(2):
            ranks.wait_for(rank, "ready")
        ranks.kill(1, signal.SIGKILL)
        outcomes = ranks.wait()
    assert outcomes[0].value == "told", str(outcomes[0])


def stopped_for_a_while(rank: Rank) -> float:
    init(rank)
    dist.barrier()
    rank.announce("ready")
    rank.wait_for("go")
    x = torch.ones(100_000)
    for _ in range(20):
        dist.all_reduce(x)
        x /= 2
    dist.destroy_process_group()
    return float(x.sum())


def test_a_stopped_rank_that_continues_is_no_error() -> None:
    with start_ranks(stopped_for_a_while, 2, store="tcp", deadline_s=60) as ranks:
        for rank in range(2):
            ranks.wait_for(rank, "ready")
        ranks.kill(1, signal.SIGSTOP)
        ranks.release("go")
        with pytest.raises(Exception, match="still running"):
            ranks.wait_for(0, "never announced", timeout_s=1.5)  # rank 0 waits meanwhile
        ranks.kill(1, signal.SIGCONT)
        assert ranks.values() == [100_000.0] * 2


# --- Departure, absence, mistakes -------------------------------------------------------------------------------------


def leave_early(rank: Rank) -> Any:
    init(rank)
    x = torch.full((5,), float(rank.rank))
    dist.all_reduce(x)
    assert x[0] == 1.0
    if rank.rank == 1:
        dist.destroy_process_group()
        return None
    return error_of(lambda: dist.all_reduce(x))


def test_a_rank_that_left_is_named_by_those_that_wait_for_it() -> None:
    kind, text, culprits, seconds = run_ranks(leave_early, 2, store="tcp")[0]
    assert kind is PeerLostError
    assert culprits == (1,)
    assert "rank 1 has left" in text
    assert seconds < SOON_S


def miss_each_other(rank: Rank) -> Any:
    init(rank, timeout_s=2.0)
    dtype = torch.float32 if rank.rank == 0 else torch.float64
    with torchext.tag("loss"):
        result = error_of(lambda: dist.all_reduce(torch.ones(4, 8, dtype=dtype)))
    rank.announce("told")
    rank.wait_for("leave")
    return result


def test_at_the_timeout_each_side_tells_what_the_other_has_called_instead() -> None:
    with start_ranks(miss_each_other, 2, store="tcp", deadline_s=60) as ranks:
        for rank in range(2):
            ranks.wait_for(rank, "told")
        ranks.release("leave")
        values = ranks.values()
    for rank, (kind, text, culprits, seconds) in enumerate(values):
        assert kind is CollectiveTimeoutError
        assert culprits == (1 - rank,)
        for dtype in ("float32", "float64"):
            assert f"all_reduce(sum, {dtype}, shape (4, 8)) tagged 'loss'" in text
        assert f"rank {rank}" in text
        assert "test_faults.py" in text
        assert re.search(r"after [\d.]+ s \(timeout 2 s\)", text)
        assert 1.9 < seconds < SOON_S


def wait_in_vain(rank: Rank) -> Any:
    init(rank, timeout_s=2.0)
    if rank.rank == 2:
        rank.announce("absent")
        rank.wait_for("over")
        return None
    work = dist.all_reduce(torch.ones(10), async_op=True)
    result = error_of(work.wait)
    assert not work.is_success()
    assert work.is_completed()
    assert isinstance(work.exception(), CollectiveError)
    rank.announce("over")
    return result


def test_a_rank_that_does_not_call_is_named_at_the_timeout() -> None:
    with start_ranks(wait_in_vain, 3, store="tcp", deadline_s=60) as ranks:
        for rank in (0, 1):
            ranks.wait_for(rank, "over")
        ranks.release("over")
        values = ranks.values()
    for kind, text, _culprits, seconds in values[:2]:
        assert kind is CollectiveTimeoutError or "gave up" in text
        assert "rank 2 has not joined it" in text
        assert seconds < SOON_S


def send_another_size(rank: Rank) -> Any:
    init(rank)
    if rank.rank == 0:
        return error_of(lambda: dist.all_to_all_single(torch.empty(5), torch.empty(6), [2, 3], [2, 4]))
    return error_of(lambda: dist.all_to_all_single(torch.empty(6), torch.empty(6), [3, 3], [3, 3]))


def test_splits_that_do_not_fit_are_told_at_once() -> None:
    for kind, text, _culprits, seconds in run_ranks(send_another_size, 2, store="tcp"):
        assert kind is CollectiveMismatchError
        assert re.search(r"sends this rank \d+ bytes where it expects \d+", text)
        assert seconds < SOON_S


def receive_another_type(rank: Rank) -> tuple[type, str, tuple[int, ...], float]:
    if rank.rank == 0:
        return error_of(lambda: dist.send(torch.ones(4), 1))
    return error_of(lambda: dist.recv(torch.empty(4, dtype=torch.int32), 0))


def receive_another_size(rank: Rank) -> Any:
    init(rank)
    if rank.rank == 0:
        dist.send(torch.ones(4), 1)
        return None
    return error_of(lambda: dist.recv(torch.empty(8), 0))


def test_a_message_of_another_size_is_told_at_once() -> None:
    kind, text, culprits, _seconds = run_ranks(receive_another_size, 2, store="tcp")[1]
    assert kind is CollectiveMismatchError
    assert culprits == (0,)
    assert "16 bytes" in text


def join_what_has_failed(rank: Rank, heard: bool) -> Any:
    """Rank 0 gives up before the others make the call; rank 2 makes it when it has failed on both.

    Args:
        rank: This one.
        heard: Whether rank 2 has heard of both calls when it makes its own.
    """
    init(rank)

    def others_come() -> None:
        with torchext.tag("others"):
            dist.barrier()

    if rank.rank == 0:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        result = error_of(lambda: work.wait(timedelta(seconds=0.05)))
    else:
        rank.store.wait([f"told {rank.rank - 1}"])
        if heard and rank.rank == 2:
            others_come()
        result = error_of(lambda: dist.all_reduce(torch.ones(3)))
    rank.store.set(f"told {rank.rank}", "")
    if heard and rank.rank != 2:
        others_come()
    x = torch.full((3,), 10.0)
    dist.all_reduce(x)  # the next under the same key is another
    assert x[0] == 30
    return result


@pytest.mark.parametrize("heard", [False, True])
@pytest.mark.parametrize("engine", ["preemptive", "ordered"])
def test_a_call_that_has_failed_on_others_fails_at_once(engine: str, heard: bool) -> None:
    env = {"TORCHEXT_DFCCL_ENGINE": engine}
    first, *others = run_ranks(join_what_has_failed, 3, heard, store="tcp", env=env)
    assert first[0] is CollectiveTimeoutError
    assert first[2] == (1, 2)
    for kind, text, _culprits, seconds in others:
        assert kind is CollectiveAbortedError
        assert "rank 0 gave up on it: wait(timeout=0.05 s) was called for it and is over" in text
        assert seconds < SOON_S


# --- The end of groups ------------------------------------------------------------------------------------------------


def abort_and_start_again(rank: Rank) -> list[type]:
    kinds = []
    for attempt in range(3):
        init(rank, prefix=str(attempt))
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(100_000), group=group)
        work = dist.all_reduce(torch.ones(10 + rank.rank), async_op=True)  # which never match
        if rank.rank == 0:
            dist.group.WORLD.abort()  # type: ignore[union-attr]
        kinds.append(error_of(work.wait)[0])
        dist.destroy_process_group()
        del group, work
        assert shared_memory() == []
    return kinds


def test_after_abort_and_destroy_the_job_can_start_again() -> None:
    for kinds in run_ranks(abort_and_start_again, 2, store="tcp"):
        assert all(kind in (CollectiveAbortedError, PeerLostError) for kind in kinds)


def end_without_destroy(rank: Rank) -> int:
    code = f"""
import torch, torch.distributed as dist, torchext
store = dist.TCPStore("127.0.0.1", {os.environ["STORE_PORT"]}, is_master=False)
dist.init_process_group("dfccl", store=store, rank={rank.rank}, world_size=2)
work = dist.all_reduce(torch.ones(3), async_op=True)
work.get_future().wait()
if {rank.rank}:
    dist.all_reduce(torch.ones(7), async_op=True)  # in flight at the end
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    # Where rank 0 has seen the call that rank 1 had in flight, it says so, once; nobody says anything else.
    unanswered = "rank 1 made a call that this rank has never made: all_reduce("
    # But for torch's store, where this machine has no name for its address: "[W... socket.cpp:207] [c10d] ...".
    said = [line for line in done.stderr.splitlines() if "[c10d]" not in line]
    if len(said) == 1 and rank.rank == 0:
        assert said[0].startswith(unanswered), done.stderr
    else:
        assert said == [], done.stderr
    return done.returncode


def test_a_program_that_ends_without_destroying_its_group_ends_well() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert run_ranks(end_without_destroy, 2, env={"STORE_PORT": str(server.port)}) == [0, 0]


def end_with_threads_waiting(rank: Rank) -> int:
    code = f"""
import threading, torch, torch.distributed as dist, torchext
store = dist.TCPStore("127.0.0.1", {os.environ["STORE_PORT"]}, is_master=False)
dist.init_process_group("dfccl", store=store, rank={rank.rank}, world_size=2)
if {rank.rank}:
    try:
        dist.recv(torch.ones(1), 0)
    except torchext.collectives.CollectiveError:
        pass
else:
    for i in range(50):
        threading.Thread(target=dist.all_reduce, args=(torch.ones(4 + i),), daemon=True).start()
    while dist.group.WORLD.stats()["queue_depth"] < 50:
        threading.Event().wait(0.01)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "terminate" not in done.stderr
    return done.returncode


def test_a_program_that_ends_with_many_threads_waiting_ends_well() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    values = run_ranks(end_with_threads_waiting, 2, env={"STORE_PORT": str(server.port)})
    assert values == [0, 0]


def use_in_a_fork(rank: Rank) -> str:
    init(rank)
    if rank.rank:
        dist.barrier()
        dist.send(torch.ones(3), 0)
        dist.destroy_process_group()
        return ""
    received = torch.zeros(3)
    work = dist.irecv(received, 1)
    assert work is not None
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        texts = []
        for use in (work.wait, work.is_completed, work.get_future):
            try:
                texts.append(f"{use()}")
            except RuntimeError as error:
                texts.append(f"refused: {error}")
        dist.destroy_process_group()
        os.write(writing, "\n".join(texts).encode())
        os._exit(0)
    os.waitpid(child, 0)
    dist.barrier()
    work.wait()
    assert received.tolist() == [1.0] * 3
    text = os.read(reading, 1000).decode()
    os.close(reading)
    os.close(writing)
    dist.destroy_process_group()
    return text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_works_of_the_parent_are_refused_in_a_forked_child() -> None:
    text, _ = run_ranks(use_in_a_fork, 2, store="tcp")
    assert [line.startswith("refused: this process was forked") for line in text.splitlines()] == [True] * 3


def fork(rank: Rank) -> str:
    init(rank)
    dist.barrier()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            dist.barrier()
            text = "no error"
        except RuntimeError as error:
            text = str(error)
        os.write(writing, text.encode())
        os._exit(0)
    os.waitpid(child, 0)
    dist.barrier()  # of the parents: unharmed
    text = os.read(reading, 1000).decode()
    os.close(reading)
    os.close(writing)
    dist.destroy_process_group()
    return text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_is_refused_and_its_parent_unharmed() -> None:
    for text in run_ranks(fork, 2, store="tcp"):
        assert "forked" in text


def meet_too_few(rank: Rank) -> str:
    if rank.rank == 2:
        return ""
    rank.store.set(f"{rank.rank} has come", "")
    rank.store.wait(["0 has come", "1 has come"])
    with pytest.raises(CollectiveTimeoutError, match=r"\[2\] did not come") as caught:
        dist.init_process_group("dfccl", store=rank.store, rank=rank.rank, world_size=3, timeout=timedelta(seconds=3))
    return str(caught.value)


def test_ranks_that_do_not_come_are_named() -> None:
    run_ranks(meet_too_few, 3, store="tcp")
