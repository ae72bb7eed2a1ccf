"""Several agents, on this machine: they meet, lose each other, and wait for each other."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.programs import TORCHEXT, TORCHRUN, WORKER, Program, children

pytestmark = pytest.mark.timeout(300)  # on a slow machine; each wait has its own, shorter one

# Dead nodes are noticed after six seconds, and the last call for nodes lasts one.
_QUICK = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=6"


@pytest.fixture
def port() -> Iterator[int]:
    """A port that nobody else gets: bound without listening, so that who asks for it by name and reuses it does."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def _static(port: int, rank: int, *more: str) -> tuple[str, ...]:
    return ("--nnodes", "2", "--node-rank", str(rank), "--master-port", str(port), "--rdzv-conf", _QUICK, *more, WORKER)


def _elastic(port: int, nnodes: str, *more: str, address: str = "127.0.0.1") -> tuple[str, ...]:
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job")
    return ("--nnodes", nnodes, *meeting, "--rdzv-conf", _QUICK, "--local-addr", address, *more, WORKER)


def _wait_for_listener(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert time.monotonic() < deadline


def _first_to_end(*programs: Program) -> Program:
    while True:
        for program in programs:
            with contextlib.suppress(AssertionError):
                program.wait(0.1)
                return program


def test_jobs_of_one_node_share_a_port_peacefully(port: int, tmp_path: Path) -> None:
    go = tmp_path / "go"
    words = ("--master-port", str(port), WORKER, "show", "MASTER_PORT", "wait", str(go))
    with Program((*TORCHRUN, *words)) as first, Program((*TORCHRUN, *words)) as second:
        assert "EADDRINUSE" in _first_to_end(first, second).output
    with Program((*TORCHEXT, *words)) as first:
        assert first.wait_for(r"MASTER_PORT=(\d+)")[0][1] == str(port)
        with Program((*TORCHEXT, *words)) as second:
            assert second.wait_for(r"MASTER_PORT=(\d+)")[0][1] != str(port)
            assert f"127.0.0.1:{port} is in use" in second.output
            go.touch()
            assert first.wait() == second.wait() == 0


def test_a_job_of_several_nodes_says_that_its_port_is_taken(port: int) -> None:
    with Program((*TORCHEXT, *_static(port, 0))):
        _wait_for_listener(port)
        with Program((*TORCHEXT, *_static(port, 0))) as second, Program((*TORCHEXT, *_elastic(port, "2"))) as third:
            assert second.wait() == 1
            assert f"cannot hold the store of job 'none' at 127.0.0.1:{port}" in second.output
            assert "Is another job using that port?" in second.output
            assert third.wait() == 1
            assert f"the store at 127.0.0.1:{port} is held by job 'none'" in third.output


def test_ranks_follow_the_order_of_the_nodes_and_name_the_logs(port: int, tmp_path: Path) -> None:
    go = tmp_path / "go"
    steps = ("say", "hello", "wait", str(go), "fail-first", "3", "1")
    more = ("--nproc-per-node", "2", "--max-restarts", "1", "--tee", "3", "--log-dir", str(tmp_path))
    with Program((*TORCHEXT, *_elastic(port, "2", *more, address="127.0.0.2"), *steps)) as first:
        _wait_for_listener(port)
        # By address it would be the first, as torchrun sorts.
        with Program((*TORCHEXT, *_elastic(port, "2", *more), *steps)) as second:
            for program in (first, second):
                program.wait_for("hello", 2)  # else those that are slow to start may be ended before they say anything
            go.touch()
            assert first.wait() == second.wait() == 0, first.output + second.output
    for node, program in enumerate((first, second)):
        for rank in (2 * node, 2 * node + 1):
            for attempt in (0, 1):
                assert f"[job node {node} rank {rank}]: up {rank}/4 attempt {attempt}" in program.output
                (log,) = tmp_path.glob(f"job_*/attempt_{attempt}/{rank}/stdout.log")
                assert f"up {rank}/4 attempt {attempt}" in log.read_text()


@pytest.mark.slow
def test_torchrun_sorts_nodes_by_address_and_logs_by_local_rank(port: int, tmp_path: Path) -> None:
    more = ("--tee", "3", "--log-dir", str(tmp_path))
    with Program((*TORCHRUN, *_elastic(port, "2", *more, address="127.0.0.2"))) as first:
        _wait_for_listener(port)
        with Program((*TORCHRUN, *_elastic(port, "2", *more))) as second:
            first.wait_for(r"\[default0\]:up 1/2")  # no word of the job, the node or the rank
            second.wait_for(r"\[default0\]:up 0/2")
            assert first.wait() == second.wait() == 0
    logs = sorted(tmp_path.glob("job_*/attempt_*/*/stdout.log"))
    assert [log.parent.name for log in logs] == ["0", "0"]  # for ranks 0 and 1


def test_nodes_join_and_leave_a_running_job(port: int) -> None:
    words = (*TORCHEXT, *_elastic(port, "1:2", "--max-restarts", "0"), "save", "0.1", "say", "ready", "stay")
    with Program(words) as first:
        first.wait_for("up 0/1")
        first.wait_for("ready")
        with Program(words) as second:
            first.wait_for("up 0/2 attempt 1")
            second.wait_for("up 1/2 attempt 1")
            second.wait_for("ready")
            first.wait_for("ready", 2)
            for pid in (second.pid, *children(second.pid)):
                os.kill(pid, signal.SIGKILL)
            first.wait_for("up 0/1 attempt 2")
            first.wait_for("ready", 3)
        assert len(re.findall("rank 0 saved", first.output)) == 2  # each time that the number of nodes changed
        first.signal(signal.SIGTERM)
        assert first.wait() == 128 + signal.SIGTERM


@pytest.mark.slow
def test_with_torchrun_both_agents_die_when_a_node_joins(port: int) -> None:
    words = (*TORCHRUN, *_elastic(port, "1:2", "--max-restarts", "3"), "save", "0.1", "say", "ready", "stay")
    with Program(words) as first:
        first.wait_for("ready")
        with Program(words) as second:
            assert second.wait(110) == 1
            assert first.wait(110) == 1
            assert "DistStoreError" in first.output + second.output


@pytest.mark.slow
def test_torchrun_does_not_notice_that_a_node_is_gone(port: int) -> None:
    words = (*TORCHRUN, *_elastic(port, "1:2", "--max-restarts", "3"), "say", "ready", "stay")
    with Program(words) as first, Program(words) as second:
        first.wait_for("ready")
        second.wait_for("ready")
        survivor, lost = (first, second) if _holds(first, port) else (second, first)
        os.kill(lost.pid, signal.SIGKILL)
        with pytest.raises(AssertionError):
            survivor.wait_for("ready", 2, timeout_s=20)  # three times as long as a node may be silent


def _holds(program: Program, port: int) -> bool:
    """Whether that process listens at the port."""
    rows = [line.split() for line in Path(f"/proc/{program.pid}/net/tcp").read_text().splitlines()[1:]]
    rows += [line.split() for line in Path(f"/proc/{program.pid}/net/tcp6").read_text().splitlines()[1:]]
    inodes = {row[9] for row in rows if int(row[1].rpartition(":")[2], 16) == port and row[3] == "0A"}
    links = [os.readlink(entry) for entry in Path(f"/proc/{program.pid}/fd").iterdir()]
    return any(f"socket:[{inode}]" in links for inode in inodes)


def test_a_node_that_fails_for_good_ends_the_job_on_all(port: int, tmp_path: Path) -> None:
    # The worker of rank 0 would wait for ever, as one does in a collective whose peer is gone.
    go = tmp_path / "go"
    steps = ("save", "0.1", "say", "ready", "wait", str(go), "fail-on", "1", "3", "stay")
    with (
        Program((*TORCHEXT, *_static(port, 0), *steps)) as first,
        Program((*TORCHEXT, *_static(port, 1), *steps)) as other,
    ):
        first.wait_for("ready")  # only then can it save
        go.touch()
        assert other.wait() == 1
        assert "exitcode  : 3" in other.output
        assert first.wait() == 1
        assert "another node of job 'worker' has failed" in first.output
        assert "rank 0 saved" in first.output


@pytest.mark.slow
def test_torchrun_lets_the_other_nodes_wait_for_ever(port: int) -> None:
    steps = ("say", "ready", "fail-on", "1", "3", "stay")
    with (
        Program((*TORCHRUN, *_static(port, 0), *steps)) as first,
        Program((*TORCHRUN, *_static(port, 1), *steps)) as other,
    ):
        assert other.wait() == 1
        with pytest.raises(AssertionError, match="still running"):
            first.wait(15)


@pytest.mark.slow
def test_the_loss_of_a_node_ends_a_job_that_needs_it(port: int) -> None:
    steps = ("save", "0.1", "say", "ready", "stay")
    with (
        Program((*TORCHEXT, *_static(port, 0), *steps)) as first,
        Program((*TORCHEXT, *_static(port, 1), *steps)) as other,
    ):
        first.wait_for("ready")
        other.wait_for("ready")
        for pid in (other.pid, *children(other.pid)):
            os.kill(pid, signal.SIGKILL)
        assert first.wait() == 1
        assert re.search(r"job 'worker' has lost \S+: of at least 2 nodes, 1 are left", first.output)
        assert "rank 0 saved" in first.output


# Both wait for others at the end for no longer than a second, instead of five minutes.
_IMPATIENT = """
import sys
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent as agent
started = agent.__init__
agent.__init__ = lambda self, *args, **more: started(self, *args, **more) or setattr(self, "_exit_barrier_timeout", 1.0)
"""


def _impatient(main: str) -> tuple[str, ...]:
    return (sys.executable, "-c", _IMPATIENT + main)


@pytest.mark.parametrize("launcher", ["ours", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_a_node_waits_for_others_that_take_longer(launcher: str, port: int, tmp_path: Path) -> None:
    main = {
        "ours": "from torchext.launch.cli import run_main\nsys.exit(run_main(sys.argv[1:]))",
        "torchrun": "from torch.distributed.run import main\nmain()",
    }[launcher]
    go = tmp_path / "go"
    meeting = (
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"127.0.0.1:{port}",
        "--rdzv-id",
        "job",
        "--rdzv-conf",
        _QUICK,
    )
    words = (*_impatient(main), "--nnodes", "2", *meeting, WORKER)
    with Program((*words, "say", "done")) as first:
        _wait_for_listener(port)
        with Program((*words, "wait", str(go), "say", "done")) as second:
            first.wait_for("done")
            second.wait_for("up ./2")
            if launcher == "torchrun":
                first.wait()  # and takes the store with it
                assert second.wait() == 1
                return
            with pytest.raises(AssertionError, match="still running"):
                first.wait(3)
            go.touch()
            assert first.wait() == second.wait() == 0


@pytest.mark.slow
def test_real_process_groups_restart_over_nodes(port: int) -> None:
    script = str(Path(WORKER).with_name("train.py"))
    more = ("--nproc-per-node", "2", "--max-restarts", "1", script, "5", "0", "2")
    words = [(*_static(port, rank, *more[:4])[:-1], *more[4:]) for rank in range(2)]
    with Program((*TORCHEXT, *words[0])) as first, Program((*TORCHEXT, *words[1])) as second:
        assert first.wait() == second.wait() == 0, first.output + second.output
        # Sum over steps 0..4 and ranks 0..3 of rank + step.
        ends = re.findall(r"rank ./4 attempt 1 total 70\b", first.output + second.output)
        assert len(ends) == 4
