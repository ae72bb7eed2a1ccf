"""What each rank waits for can be asked for at any time, from outside as well, and timeouts say it too."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.collectives.test_deadlocks import both_engines, by_engine, error_of, init
from tests.ranks import Rank, run_ranks, start_ranks
from torchext.collectives import CollectiveMismatchError, CollectiveTimeoutError, explain, explain_on_signal
from torchext.collectives.threads import only_waiting, without_collectives


def ask(rank: Rank) -> str:
    """Rank 1 waits for rank 0, which looks until it sees that."""
    init(rank)
    text = ""
    if rank.rank == 0:
        work = dist.all_reduce(torch.ones(5), async_op=True)
        while "rank 1 has waited" not in text:
            text = explain()
            threading.Event().wait(0.01)
        dist.barrier()
        work.wait()
    else:
        dist.barrier()
        dist.all_reduce(torch.ones(5))
    dist.destroy_process_group()
    assert explain() == 'this process is in no "dfccl" group'
    return text


@both_engines
def test_explain_tells_what_each_rank_waits_for(engine: str) -> None:
    text = run_ranks(ask, 2, store="tcp", env=by_engine(engine))[0]
    assert "ranks [0, 1], seen from rank 0:" in text
    assert "rank 0 waits in no collective" in text
    assert "s for rank 0 in barrier on group" in text
    assert "test_explain.py" in text
    assert "in flight here" in text
    assert "all_reduce(sum, float32, shape (5,)), which needs rank 1" in text


def ask_when_a_group_has_ended(rank: Rank) -> str:
    """Rank 1 has left one of two groups."""
    init(rank)
    other = dist.new_group()
    text = ""
    if rank.rank == 1:
        dist.destroy_process_group(other)
        rank.store.set("left", "")
        rank.store.wait(["asked"])
    else:
        rank.store.wait(["left"])
        text = explain()
        rank.store.set("asked", "")
    dist.destroy_process_group()
    return text


def test_a_rank_that_has_left_one_of_several_groups_is_not_said_to_be_gone() -> None:
    text = run_ranks(ask_when_a_group_has_ended, 2, store="tcp", env=by_engine("ordered"))[0]
    assert "rank 1 waits in no collective" in text


def ask_by_signal(rank: Rank) -> str:
    """Rank 0 blocks in its main thread; the signal comes from outside of it until the answer is there."""
    calls: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _frame: calls.append(number))
    init(rank)
    if rank.rank == 1:
        rank.store.wait(["go"])
        dist.all_reduce(torch.ones(3))
        dist.destroy_process_group()
        return ""
    sys.stderr = answer = io.StringIO()

    def signals() -> None:
        while "rank 0 has waited" not in answer.getvalue() or not calls:
            os.kill(os.getpid(), signal.SIGUSR1)
            threading.Event().wait(0.05)
        rank.store.set("go", "")

    thread = threading.Thread(target=signals)
    thread.start()
    dist.all_reduce(torch.ones(3))
    thread.join()
    sys.stderr = sys.__stderr__
    dist.destroy_process_group()
    return answer.getvalue()


@both_engines
def test_a_signal_prints_it_and_calls_the_handler_that_was_there(engine: str) -> None:
    env = {"TORCHEXT_DFCCL_EXPLAIN_ON_SIGUSR1": "1", **by_engine(engine)}
    text = run_ranks(ask_by_signal, 2, store="tcp", env=env)[0]
    assert "s for rank 1 in all_reduce(sum, float32, shape (3,)) on group" in text


def test_a_signal_handler_can_be_installed_twice_and_runs_the_one_before_once() -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _frame: calls.append(number))
    try:
        explain_on_signal(signal.SIGUSR2)
        explain_on_signal(signal.SIGUSR2)
        signal.raise_signal(signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert calls == [signal.SIGUSR2]


def time_out_one_after_the_other(rank: Rank) -> Any:
    """The group's timeout is longer on rank 1, and their calls differ in dtype. No thread is known to be idle."""
    init(rank, timeout_s=2.0 if rank.rank == 0 else 20.0)
    threading.Thread(target=lambda: threading.Event().wait(60), daemon=True).start()
    result = error_of(lambda: dist.all_reduce(torch.ones(2, dtype=[torch.float32, torch.float64][rank.rank])))
    dist.destroy_process_group()
    return result


def test_whoever_hears_second_is_told_of_the_other_call_and_not_only_that_the_peer_has_left() -> None:
    with start_ranks(time_out_one_after_the_other, 2, store="tcp", deadline_s=60) as ranks:
        first, second = ranks.values()
    assert first[0] is CollectiveTimeoutError
    assert "a thread of it waits in all_reduce(sum, float64, shape (2,)) on group" in first[1]
    assert second[0] is CollectiveMismatchError
    assert "rank 0 made another call on this group, all_reduce(sum, float32, shape (2,))" in second[1]
    assert second[3] < 15


# --- Which threads may still issue a call -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("waits_for", "quiet"),
    [("an event without limit", True), ("an event for some time", False), ("a pipe", False), ("a join", True)],
)
def test_a_thread_counts_as_able_to_go_on_unless_it_waits_for_another_thread(waits_for: str, quiet: bool) -> None:
    event, ready = threading.Event(), threading.Event()
    reading, writing = os.pipe()
    inner = threading.Thread(target=event.wait)
    inner.start()
    waits = {
        "an event without limit": event.wait,
        "an event for some time": lambda: event.wait(60),
        "a pipe": lambda: os.read(reading, 1),
        "a join": inner.join,
    }[waits_for]

    def run() -> None:
        ready.set()
        waits()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    me = threading.get_ident()
    try:
        for _ in range(3000):  # until it has come to where it waits
            if only_waiting([me], [(me, threading.get_native_id())]) == quiet:
                break
            event.wait(0.01)
        assert only_waiting([me], [(me, threading.get_native_id())]) == quiet
    finally:
        event.set()
        os.write(writing, b"x")
        thread.join()
        inner.join()
        os.close(reading)
        os.close(writing)


def test_a_declared_thread_does_not_count_until_it_issues_a_call() -> None:
    end = threading.Event()
    thread = without_collectives(threading.Thread(target=lambda: end.wait(60)))
    thread.start()
    assert thread.ident is not None
    me = (threading.get_ident(), threading.get_native_id())
    try:
        assert only_waiting([me[0]], [me])
        assert not only_waiting([me[0]], [me, (thread.ident, thread.native_id or 0)])
    finally:
        end.set()
        thread.join()
