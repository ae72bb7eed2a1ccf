"""Blocking calls in a circle are told to all ranks with the whole circle, or resolved; no circle is made up."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchext  # noqa: F401  registers the backend
from tests.collectives.blocking import HOPELESS, PROGRAMS, THREADED
from tests.collectives.test_faults import SOON_S
from tests.ranks import Rank, run_ranks, start_ranks
from torchext.collectives import (
    CollectiveError,
    CollectiveMismatchError,
    DeadlockError,
    Options,
    PeerLostError,
    without_collectives,
)


def init(rank: Rank, on_deadlock: Any = "raise", timeout_s: float = 30.0, prefix: str = "") -> None:
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            without_collectives(thread)  # the harness's
    dist.init_process_group(
        "dfccl",
        store=dist.PrefixStore(prefix, rank.store),
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=timedelta(seconds=30),
        pg_options=Options(on_deadlock=on_deadlock),
    )
    if timeout_s < 30:  # of calls that are to time out: all ranks have come by then
        dist.barrier()
        dist.group.WORLD.set_timeout(timedelta(seconds=timeout_s))  # type: ignore[union-attr]


def by_engine(engine: str) -> dict[str, str]:
    return {"TORCHEXT_DFCCL_ENGINE": engine}


both_engines = pytest.mark.parametrize("engine", ["preemptive", "ordered"])


def stats() -> dict[str, int]:
    found: dict[str, int] = dist.group.WORLD.stats()  # type: ignore[union-attr]
    return found


def error_of(call: Callable[[], Any]) -> tuple[type, str, tuple[int, ...], float]:
    """The error, and after what time it came."""
    start = time.monotonic()
    try:
        call()
    except CollectiveError as error:
        return type(error), str(error), error.ranks, time.monotonic() - start
    raise AssertionError("no error")


# --- The same programs on gloo, told, and resolved --------------------------------------------------------------------


def attempt(rank: Rank, name: str) -> bool:
    """Whether the program gave the right values on gloo; it may also raise, hang or die."""
    rank.announce("running")
    if name in HOPELESS:
        HOPELESS[name](rank.rank)
        return True
    got, expected = {**PROGRAMS, **THREADED}[name][0](rank.rank)
    return all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))


ON_GLOO = [
    name if name in ("two_groups", "reduce_against_all_gather") else pytest.param(name, marks=pytest.mark.slow)
    for name in (*PROGRAMS, *THREADED, *HOPELESS)
]


@pytest.mark.parametrize("name", ON_GLOO)
def test_gloo_does_not_end_with_the_right_values(name: str) -> None:
    world_size = {**PROGRAMS, **THREADED}[name][1] if name not in HOPELESS else 2
    with start_ranks(attempt, world_size, name, backend="gloo", deadline_s=60) as ranks:
        for rank in range(world_size):
            ranks.wait_for(rank, "running")
        outcomes = ranks.wait(timeout_s=2)  # a thousand times what it takes where it works
    assert not all(outcome.kind == "returned" and outcome.value for outcome in outcomes)


def run_each(rank: Rank, on_deadlock: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, (program, world_size) in PROGRAMS.items():
        if world_size != rank.world_size:
            continue
        init(rank, on_deadlock, prefix=name)
        if on_deadlock == "raise":
            results[name] = error_of(lambda program=program: program(rank.rank))  # type: ignore[misc]
        else:
            got, expected = program(rank.rank)
            right = all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))
            results[name] = right, stats()["deferred"]
        dist.destroy_process_group()
    return results


@pytest.mark.parametrize(
    ("engine", "world_size"), [("preemptive", 2), ("preemptive", 3), ("preemptive", 4), ("ordered", 2), ("ordered", 3)]
)
def test_raise_tells_each_rank_the_whole_circle(engine: str, world_size: int) -> None:
    results = run_ranks(run_each, world_size, "raise", store="tcp", env=by_engine(engine), deadline_s=200)
    names = [name for name, (_, n) in PROGRAMS.items() if n == world_size]
    for rank, told in enumerate(results):
        assert list(told) == names
        for name, (kind, text, ranks, seconds) in told.items():
            assert kind is (CollectiveMismatchError if name == "different_operations" else DeadlockError), text
            assert ranks == tuple(range(world_size))
            assert f"at rank {rank} failed after" in text
            for other in range(world_size):
                assert re.search(rf"rank {other} has waited \d+\.\d s for rank \d in [a-z_/]+\(", text), text
            assert len(re.findall(r", at \S+blocking\.py:\d+", text)) == world_size
            assert re.search(r"shape \([\d, ]*\)", text)
            assert seconds < SOON_S
    if world_size == 2:
        assert "tagged 'a'" in results[0]["tags_of_one_group"][1]
        assert "tagged 'b'" in results[0]["tags_of_one_group"][1]
        assert "of ranks [0, 1]" in results[0]["two_groups"][1]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_defer_gives_the_right_values(world_size: int) -> None:
    results = run_ranks(run_each, world_size, "defer", store="tcp", deadline_s=200)
    for name in results[0]:
        assert all(told[name][0] for told in results), name
        # One rank that goes on may be enough to free the others before they notice the circle.
        assert sum(told[name][1] for told in results) > 0, name


# --- What deferral sees -----------------------------------------------------------------------------------------------

READERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "an operation": lambda x: float((x + 0)[0]),
    "item": lambda x: x[0].item(),
    "a view, then an operation": lambda x: float(x.view(10, 100)[0].sum() / 100),
    "out=": lambda x: float(torch.add(x, 0, out=torch.empty(1000))[5]),
    "numpy": lambda x: float(x.numpy()[3]),
    "tolist": lambda x: x.tolist()[0],
    "array": lambda x: float(memoryview(x.numpy())[1]),
    "dlpack": lambda x: float(torch.from_dlpack(x)[2]),
    "repr": lambda x: float(re.findall(r"\d+\.", repr(x))[0]),
    "pickle": lambda x: float(pickle.loads(pickle.dumps(x))[0]),
    "deepcopy": lambda x: float(copy.deepcopy(x)[0]),
    "save": lambda x: save(x),
    "copy_": lambda x: float(torch.empty(1000).copy_(x)[7]),
    "a detached one": lambda x: float(x.detach()[0]),
    "autograd": lambda x: gradient(x),
    "in place": lambda x: float(x.add_(0)[0]),
    "another collective": lambda x: again(x),
}


def save(x: torch.Tensor) -> float:
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return float(torch.load(buffer)[0])


def gradient(x: torch.Tensor) -> float:
    weight = torch.ones(1000, requires_grad=True)
    (weight * x).sum().backward()
    assert weight.grad is not None
    return float(weight.grad[0])


def again(x: torch.Tensor) -> float:
    dist.all_reduce(x)
    return float(x[0]) / 2


def read_in_all_ways(rank: Rank) -> list[tuple[str, float, int]]:
    """Rank 0 is deferred; its tensor is complete only once rank 1 has been told to go on."""
    found = []
    init(rank, "defer")
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for name, read in READERS.items():
        before = stats()["deferred"]
        x, y = torch.full((1000,), 1.0 + rank.rank), torch.full((1000,), 10.0 + rank.rank)
        calls = [lambda x=x: dist.all_reduce(x, group=groups[0]), lambda y=y: dist.all_reduce(y, group=groups[1])]
        for call in calls if rank.rank == 0 else reversed(calls):
            call()
        found.append((name, read(x), stats()["deferred"] - before))
        assert torch.equal(y, torch.full((1000,), 21.0))
    dist.barrier()
    dist.barrier()  # the first call after the last deferral takes the modes away
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert torch.overrides._get_current_function_mode() is None  # type: ignore[no-untyped-call]
    dist.destroy_process_group()
    return found


def test_a_deferred_tensor_is_waited_for_by_whatever_reads_it() -> None:
    results = run_ranks(read_in_all_ways, 2, store="tcp", deadline_s=200)
    for found in results:
        assert {name: value for name, value, _ in found} == dict.fromkeys(READERS, 3.0)
    for (name, _, first), (_, _, second) in zip(*results, strict=True):
        assert first + second > 0, name


def defer_in_vain(rank: Rank) -> Any:
    init(rank, "defer")
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    x, y = torch.ones(4), torch.ones(4)
    mine, other = ((x, groups[0]), (y, groups[1])) if rank.rank == 0 else ((y, groups[1]), (x, groups[0]))
    dist.all_reduce(mine[0], group=mine[1])
    first = error_of(lambda: mine[0].sum())  # which needs the other's next call, and that needs this value
    again = error_of(lambda: mine[0] + 1)  # a value that never came is never read
    del other
    dist.destroy_process_group()
    return first, again


def test_a_deadlock_that_deferral_cannot_resolve_is_told_at_the_first_use() -> None:
    for first, again in run_ranks(defer_in_vain, 2, store="tcp"):
        assert first[0] is DeadlockError
        assert "test_deadlocks.py" in first[1]
        assert again[0] is DeadlockError
        assert again[3] < SOON_S


def barrier_in_a_circle(rank: Rank, on_deadlock: str) -> Any:
    init(rank, on_deadlock)
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    x = torch.full((3,), 1.0 + rank.rank)
    calls = [lambda: dist.barrier(group=groups[0]), lambda: dist.all_reduce(x, group=groups[1])]
    for call in calls if rank.rank == 0 else reversed(calls):
        call()
    x += 0
    dist.destroy_process_group()
    return float(x[0])


def test_a_barrier_is_never_deferred_but_the_call_on_the_other_side_is() -> None:
    assert run_ranks(barrier_in_a_circle, 2, "defer", store="tcp") == [3.0, 3.0]


# --- Mismatches, departures -------------------------------------------------------------------------------------------

MISMATCHES: dict[str, Callable[[int], Any]] = {
    "dtype": lambda r: dist.all_reduce(torch.ones(4, dtype=[torch.float32, torch.float64][r])),
    "shape": lambda r: dist.all_reduce(torch.ones(4 + r)),
    "reduce-op": lambda r: dist.all_reduce(torch.ones(4), [dist.ReduceOp.SUM, dist.ReduceOp.MAX][r]),
    "root": lambda r: dist.broadcast(torch.ones(4), 1 - r),
    "operation": lambda r: (
        dist.reduce_scatter(torch.ones(2), [torch.ones(2)] * 2)
        if r == 0
        else dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(2))
    ),
    "splits": lambda r: dist.all_to_all_single(
        torch.empty([5, 8][r]), torch.empty(6), [[2, 3], [5, 3]][r], [[2, 4], [3, 3]][r]
    ),
}


def mismatch(rank: Rank) -> list[Any]:
    told = []
    for name, program in MISMATCHES.items():
        init(rank, prefix=name)
        told.append(error_of(lambda program=program: program(rank.rank)))  # type: ignore[misc]
        dist.destroy_process_group()
    return told


@both_engines
def test_each_kind_of_mismatch_is_told_to_both_ranks_long_before_the_timeout(engine: str) -> None:
    for told in run_ranks(mismatch, 2, store="tcp", env=by_engine(engine)):
        for (kind, text, _, seconds), name in zip(told, MISMATCHES, strict=True):
            assert kind is CollectiveMismatchError, (name, text)
            assert seconds < SOON_S
            if name != "splits":
                assert "rank 0 has waited" in text
                assert "rank 1 has waited" in text


def run_hopeless(rank: Rank) -> dict[str, Any]:
    told = {}
    for name, program in HOPELESS.items():
        init(rank, prefix=name)
        told[name] = error_of(lambda program=program: program(rank.rank))  # type: ignore[misc]
        dist.destroy_process_group()
    return told


@both_engines
def test_programs_that_nothing_saves_are_told_to_both_ranks(engine: str) -> None:
    for told in run_ranks(run_hopeless, 2, store="tcp", env=by_engine(engine)):
        for name, (kind, text, ranks, seconds) in told.items():
            assert kind is CollectiveMismatchError, (name, text)
            assert ranks == (0, 1)
            assert seconds < SOON_S
            assert len(re.findall(r", at \S+blocking\.py:\d+", text)) == 2
        assert "barrier" in told["uneven_steps"][1]
        assert "all_reduce(sum, float32, shape (100,))" in told["uneven_steps"][1]
        assert "all_gather(" in told["reduce_against_all_gather"][1]
        assert "reduce(sum" in told["reduce_against_all_gather"][1]


def leave_after_the_epoch(rank: Rank) -> Any:
    init(rank)
    x = torch.ones(100)
    for _ in range(2):
        dist.all_reduce(x)
    if rank.rank == 0:
        return error_of(lambda: dist.all_reduce(x))
    dist.destroy_process_group()
    return None


def test_a_rank_that_has_ended_without_joining_is_told_to_the_others() -> None:
    kind, text, _, _ = run_ranks(leave_after_the_epoch, 2, store="tcp")[0]
    assert kind is PeerLostError
    assert "rank 1 has left" in text


def run_threaded(rank: Rank) -> bool:
    init(rank)
    right = True
    for program, _ in THREADED.values():
        got, expected = program(rank.rank)
        right = right and all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))
    assert stats()["deadlocks"] == 0
    dist.destroy_process_group()
    return right


def test_threads_with_blocking_calls_give_the_right_values() -> None:
    assert run_ranks(run_threaded, 2, store="tcp") == [True, True]


def nobody_receives(rank: Rank) -> Any:
    init(rank)
    if rank.rank == 0:
        return error_of(lambda: dist.send(torch.ones(1_000_000), 1))
    return error_of(dist.barrier)


def test_a_send_that_nobody_receives_is_told_to_both() -> None:
    for kind, text, _, _ in run_ranks(nobody_receives, 2, store="tcp"):
        assert kind is DeadlockError
        assert "send/recv(float32, shape (1000000,), group rank 0 to 1)" in text
        assert "barrier" in text


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def leave_calls_unanswered(rank: Rank) -> list[str]:
    """Small sends and broadcasts are over at once for who makes them; rank 1 does not receive all."""
    logging.getLogger("torchext.collectives").addHandler(log := Lines())
    init(rank)
    if rank.rank == 0:
        dist.send(torch.ones(3), 1)
        dist.broadcast(torch.ones(5), 0)
        dist.send(torch.ones(2), 1, tag=7)
    else:
        dist.recv(torch.empty(2), 0, tag=7)
        dist.broadcast(torch.ones(5), 1)  # another root
    dist.barrier()
    dist.destroy_process_group()
    return log.lines


def test_small_calls_that_nobody_answers_are_told_when_the_group_ends() -> None:
    first, second = run_ranks(leave_calls_unanswered, 2, store="tcp")
    assert [line for line in first if "broadcast" in line] == [
        "rank 1 made a call that this rank has never made: broadcast(float32, shape (5,), root at group rank 1)"
    ]
    assert len(first) == 1
    assert sorted(line.split(": ")[1] for line in second) == [
        "broadcast(float32, shape (5,), root at group rank 0)",
        "send/recv(float32, shape (3,), group rank 0 to 1)",
    ]


# --- No false alarm ---------------------------------------------------------------------------------------------------


def in_order(rank: Rank, steps: int, seed: int) -> dict[str, int]:
    """Blocking calls in one order on overlapping groups, with pauses of each rank's own, and a second thread."""
    init(rank)
    groups = {tuple(r): dist.new_group(r) for r in ([0, 1], [1, 2], [0, 2], [0, 1, 2])}
    shared, own, pause = random.Random(seed), random.Random(f"{seed}/{rank.rank}"), threading.Event()
    background = dist.new_group([0, 1, 2])

    def log() -> None:
        for _ in range(steps // 4):
            if own.random() < 0.3:
                pause.wait(0.2)
            dist.all_reduce(torch.ones(1), group=background)

    thread = threading.Thread(target=log)
    thread.start()
    rank.announce("running")
    for step in range(steps):
        members = shared.choice(list(groups))
        size = shared.choice([1, 100, 50_000])
        if own.random() < 0.15:
            pause.wait(own.choice([0.01, 0.15, 0.4]))
        if rank.rank in members:
            x = torch.full((size,), float(step))
            dist.all_reduce(x, group=groups[members])
            assert x[-1] == step * len(members)
    thread.join()
    dist.barrier()
    found = stats()
    dist.destroy_process_group()
    return found


@both_engines
def test_slow_and_stopped_ranks_of_an_in_order_program_are_no_deadlock(
    engine: str, request: pytest.FixtureRequest
) -> None:
    rng = random.Random(request.config.getoption("--seed"))
    with start_ranks(in_order, 3, 60, rng.random(), store="tcp", env=by_engine(engine), deadline_s=200) as ranks:
        for rank in range(3):
            ranks.wait_for(rank, "running")
        for stopped_s in (0.3, 1.5, 0.6):
            rank = rng.randrange(3)
            ranks.kill(rank, signal.SIGSTOP)
            threading.Event().wait(stopped_s)
            ranks.kill(rank, signal.SIGCONT)
            threading.Event().wait(0.2)
        for found in ranks.values():
            assert found.get("failed", 0) == 0
            assert found["deadlocks"] == 0


def working_thread(rank: Rank) -> float:
    """Each main thread waits in a group whose call on the other rank is made by a thread that is busy elsewhere."""
    init(rank)
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    x, y = torch.ones(3), torch.ones(3)

    def late() -> None:
        threading.Event().wait(1.0)
        dist.all_reduce(y, group=groups[1 - rank.rank])

    thread = threading.Thread(target=late, daemon=True)
    thread.start()
    dist.all_reduce(x, group=groups[rank.rank])
    thread.join()
    assert stats()["deadlocks"] == 0
    dist.destroy_process_group()
    return float(x[0] + y[0])


@both_engines
def test_a_thread_that_has_not_issued_anything_yet_may_still_do_so(engine: str) -> None:
    assert run_ranks(working_thread, 2, store="tcp", env=by_engine(engine)) == [4.0, 4.0]
