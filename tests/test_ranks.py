"""The helper that runs ranks, tried with real processes that return, raise, die, hang and multiply."""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from tests import leaks
from tests.ranks import Outcome, Rank, RanksError, run_ranks, start_ranks

ROOT = Path(__file__).parent.parent
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: /proc, os.pidfd_open and os.waitid")


class TwoPartError(Exception):
    """Cannot be read back from a pickle: its arguments are not those of its constructor."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def place(rank: Rank, *args: int) -> tuple[int, int, int, tuple[int, ...]]:
    return rank.rank, rank.world_size, os.getpid(), args


def fail_on_one(rank: Rank) -> None:
    if rank.rank == 1:
        print("about to fail")
        raise KeyError("the reason")


def fail_unpicklably(rank: Rank) -> None:
    raise TwoPartError("two ", "parts")


def return_a_lock(rank: Rank) -> threading.Lock:
    return threading.Lock()


def fail_or_hang(rank: Rank) -> None:
    if rank.rank == 0:
        raise ValueError("rank 0 gave up")
    rank.wait_for("never", timeout_s=100)


def end_early(rank: Rank) -> None:
    if rank.rank == 0:
        os._exit(3)
    os.kill(os.getpid(), signal.SIGSEGV)


def wait_here(rank: Rank) -> None:
    rank.announce("waiting")
    rank.wait_for("go", timeout_s=100)


def spin_here(rank: Rank) -> None:
    rank.announce("spinning")
    while True:
        pass


def hang_in_a_thread_at_the_end(rank: Rank) -> str:
    threading.Thread(target=threading.Event().wait).start()
    return "done"


def start_another(rank: Rank, file: Path, own_session: bool) -> None:
    child = subprocess.Popen(["sleep", "1000"], start_new_session=own_session)
    file.write_text(str(child.pid))
    rank.announce("started")
    rank.wait_for("go", timeout_s=100)


def read_from_all(rank: Rank) -> list[bytes]:
    rank.store.set(f"from {rank.rank}", f"{rank.rank}")
    return [rank.store.get(f"from {other}") for other in range(rank.world_size)]


def sum_over_ranks(rank: Rank) -> float:
    import torch
    import torch.distributed as dist

    x = torch.full((3,), float(rank.rank + 1))
    dist.all_reduce(x)
    return x.sum().item()


def wait_in_a_collective(rank: Rank) -> None:
    import torch.distributed as dist

    if rank.rank == 0:
        dist.barrier()


def environment_of(rank: Rank, name: str) -> str | None:
    return os.environ.get(name)


def hash_of_a_word(rank: Rank) -> int:
    return hash("word")


def fork_and_exit(rank: Rank) -> int:
    child = os.fork()
    if child == 0:
        threading.Event().wait()
    return child


def read_input(rank: Rank) -> str:
    return sys.stdin.read()


def test_each_rank_runs_in_a_process_of_its_own() -> None:
    values = run_ranks(place, 3, 7, 8)
    assert [value[:2] for value in values] == [(0, 3), (1, 3), (2, 3)]
    assert len({value[2] for value in values} | {os.getpid()}) == 4
    assert all(value[3] == (7, 8) for value in values)


def test_an_exception_comes_back_with_its_rank_traceback_and_output() -> None:
    with pytest.raises(RanksError, match="1 of 2 ranks failed") as caught:
        run_ranks(fail_on_one, 2)
    message = str(caught.value)
    assert "rank 1 raised" in message
    assert "in fail_on_one" in message
    assert "KeyError: 'the reason'" in message
    assert "about to fail" in message
    assert "rank 0" not in message
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_exception_that_cannot_be_pickled_comes_back_as_text() -> None:
    with start_ranks(fail_unpicklably, 1) as ranks:
        (outcome,) = ranks.wait()
    assert outcome.kind == "raised"
    assert isinstance(outcome.error, RuntimeError)
    assert str(outcome.error) == "TwoPartError: two parts"
    assert "in fail_unpicklably" in outcome.traceback


def test_a_value_that_cannot_be_pickled_is_an_error_of_that_rank() -> None:
    with pytest.raises(RanksError, match="returned what cannot be pickled: <unlocked"):
        run_ranks(return_a_lock, 1)


def test_a_function_that_cannot_be_sent_is_an_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        run_ranks(lambda rank: None, 1)
    assert list(tmp_path.iterdir()) == []


def test_the_cause_comes_first_and_the_others_do_not_wait_for_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.ranks._GRACE_S", 0.5)
    start = time.monotonic()
    with pytest.raises(RanksError) as caught:
        run_ranks(fail_or_hang, 2, deadline_s=200)
    assert time.monotonic() - start < 60
    message = str(caught.value)
    assert message.index("rank 0 gave up") < message.index("rank 1 timed out")


def test_exit_status_and_signal_are_told_apart() -> None:
    with start_ranks(end_early, 2) as ranks:
        exited, killed = ranks.wait()
    assert (exited.kind, exited.exitcode, exited.signal) == ("exited", 3, None)
    assert (killed.kind, killed.exitcode, killed.signal) == ("killed", None, signal.SIGSEGV)
    assert "in end_early" in killed.output  # faulthandler's
    assert "killed by SIGSEGV" in str(killed)


def test_a_test_can_kill_one_rank_and_release_the_others() -> None:
    with start_ranks(wait_here, 3) as ranks:
        for rank in range(3):
            ranks.wait_for(rank, "waiting")
        ranks.kill(1, signal.SIGKILL)
        ranks.release("go")
        outcomes = ranks.wait()
    assert [outcome.kind for outcome in outcomes] == ["returned", "killed", "returned"]
    assert outcomes[1].signal == signal.SIGKILL
    assert [outcome.pid for outcome in outcomes] == ranks.pids


def test_the_deadline_ends_all() -> None:
    start = time.monotonic()
    with start_ranks(spin_here, 2, deadline_s=0.5) as ranks:
        outcomes = ranks.wait()
    assert 0.5 <= time.monotonic() - start < 20
    assert [outcome.kind for outcome in outcomes] == ["timed out", "timed out"]


def test_who_runs_too_long_shows_where_it_was() -> None:
    with start_ranks(spin_here, 2) as ranks:
        for rank in range(2):
            ranks.wait_for(rank, "spinning")
        outcomes = ranks.wait(timeout_s=0)
    for outcome in outcomes:
        assert outcome.kind == "timed out"
        assert "in spin_here" in outcome.stack
        assert "in spin_here" in str(outcome)


@linux_only
def test_a_stopped_rank_is_killed_without_another_step() -> None:
    with start_ranks(wait_here, 2) as ranks:
        for rank in range(2):
            ranks.wait_for(rank, "waiting")
        ranks.kill(0, signal.SIGSTOP)
        while leaks.state(ranks.pids[0]) != "T":
            os.sched_yield()
        stopped, waiting = ranks.wait(timeout_s=0)
    assert (stopped.kind, stopped.signal, stopped.stack) == ("timed out", signal.SIGKILL, "")
    assert waiting.kind == "timed out"
    assert "in wait_here" in waiting.stack


def test_a_rank_that_cannot_end_has_timed_out_though_it_returned() -> None:
    with start_ranks(hang_in_a_thread_at_the_end, 1) as ranks:
        while ranks._processes[0]._files.load_result() is None:
            os.sched_yield()
        (outcome,) = ranks.wait(timeout_s=0)
    assert (outcome.kind, outcome.value) == ("timed out", "done")


@linux_only
@pytest.mark.parametrize("own_session", [False, True])
def test_what_a_rank_started_is_killed_with_it(own_session: bool, tmp_path: Path) -> None:
    with start_ranks(start_another, 1, tmp_path / "pid", own_session) as ranks:
        ranks.wait_for(0, "started")
        pid = int((tmp_path / "pid").read_text())
        assert leaks.state(pid) in ("R", "S", "D")
        ended = os.pidfd_open(pid)
    assert select.select([ended], [], [], 20)[0], "still running"  # killed already, but to end may take it a moment
    os.close(ended)


@linux_only
@pytest.mark.parametrize("own_session", [False, True])
def test_what_a_rank_leaves_running_is_reported_and_killed(
    own_session: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.ranks._SURVIVORS_S", 0.2)
    with start_ranks(start_another, 1, tmp_path / "pid", own_session) as ranks:
        ranks.release("go")
        with pytest.raises(RanksError, match="the ranks left processes behind: sleep 1000"):
            ranks.values()
        ended = os.pidfd_open(int((tmp_path / "pid").read_text()))
    assert select.select([ended], [], [], 20)[0], "still running"
    os.close(ended)


@linux_only
def test_a_fork_that_a_rank_leaves_is_reported_and_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.ranks._SURVIVORS_S", 0.2)
    with start_ranks(fork_and_exit, 1) as ranks:
        with pytest.raises(RanksError, match="the ranks left processes behind"):
            ranks.values()
        (outcome,) = ranks.wait()
        ended = os.pidfd_open(outcome.value)
    assert select.select([ended], [], [], 20)[0], "still running"
    os.close(ended)


@pytest.mark.skipif("PYTHONHASHSEED" in os.environ, reason="PYTHONHASHSEED fixes the order of sets")
def test_the_order_of_sets_differs_between_ranks() -> None:
    assert len(set(run_ranks(hash_of_a_word, 2))) == 2


def test_leaving_the_block_early_kills_the_ranks() -> None:
    with start_ranks(wait_here, 2) as ranks:
        ranks.wait_for(0, "waiting")
    assert [leaks.state(pid) for pid in ranks.pids] == ["", ""]
    ranks.close()  # again: nothing happens


def test_an_exception_in_the_block_kills_the_ranks() -> None:
    with pytest.raises(ZeroDivisionError), start_ranks(wait_here, 2) as ranks:
        raise ZeroDivisionError
    assert [leaks.state(pid) for pid in ranks.pids] == ["", ""]


@linux_only
def test_ranks_end_when_the_test_process_is_killed() -> None:
    program = """if True:
        from tests.ranks import start_ranks
        from tests.test_ranks import wait_here
        ranks = start_ranks(wait_here, 2)
        for rank in range(2):
            ranks.wait_for(rank, "waiting")
        print(*ranks.pids, ranks._folder, flush=True)
        ranks.wait()
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment, text=True) as test:
        assert test.stdout is not None
        *pids, folder = test.stdout.readline().split()
        watches = [os.pidfd_open(int(pid)) for pid in pids]
        test.kill()
    try:
        for watch in watches:
            ready, _, _ = select.select([watch], [], [], 30)
            assert ready, "a rank outlives its test"
    finally:
        for watch in watches:
            os.close(watch)
        for file in Path(folder).iterdir():
            file.unlink()
        Path(folder).rmdir()


def test_waiting_for_an_event_of_a_dead_rank_is_an_error() -> None:
    with start_ranks(place, 1) as ranks:
        ranks.wait()
        with pytest.raises(RanksError, match="rank 0 has ended and has not announced 'x'"):
            ranks.wait_for(0, "x")


def test_waiting_for_an_event_that_does_not_come_is_an_error() -> None:
    with start_ranks(wait_here, 1) as ranks:
        ranks.wait_for(0, "waiting")
        with pytest.raises(RanksError, match=r"still running and has not announced 'x', only \['waiting'\]"):
            ranks.wait_for(0, "x", timeout_s=0.05)


@pytest.mark.parametrize("store", ["file", "tcp"])
def test_ranks_share_a_store(store: str) -> None:
    assert run_ranks(read_from_all, 2, store=store) == [[b"0", b"1"]] * 2


def test_without_a_store_the_error_says_what_to_pass() -> None:
    with pytest.raises(RanksError, match='pass store="file" or store="tcp"'):
        run_ranks(read_from_all, 1)


@pytest.mark.parametrize("store", [None, "tcp"])
def test_a_process_group_over_gloo(store: str | None) -> None:
    assert run_ranks(sum_over_ranks, 2, backend="gloo", store=store) == [9.0, 9.0]


def test_a_rank_whose_peer_left_a_collective_does_not_hang() -> None:
    with pytest.raises(RanksError, match=r"rank 0 (raised|timed out)"):
        run_ranks(wait_in_a_collective, 2, backend="gloo", deadline_s=15)


def test_environment_reaches_the_ranks() -> None:
    assert run_ranks(environment_of, 1, "OF_THE_TEST", env={"OF_THE_TEST": "yes"}) == ["yes"]


def test_standard_input_of_a_rank_is_empty() -> None:
    assert run_ranks(read_input, 1) == [""]


def test_an_outcome_reads_as_a_report() -> None:
    outcome = Outcome(rank=2, pid=1, kind="exited", exitcode=3, output="last words\n")
    assert str(outcome) == "rank 2 exited with status 3\noutput:\nlast words"
