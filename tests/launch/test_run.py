"""One node: what torchrun's users know, and what is mended."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests import leaks
from tests.launch.programs import TORCHEXT, TORCHRUN, WORKER, Program, children, wait_until_gone

pytestmark = pytest.mark.timeout(300)  # on a slow machine; each wait has its own, shorter one

_TWO = ("--nproc-per-node", "2", WORKER)


def _outcome(*words: str) -> tuple[int, str]:
    with Program(words) as program:
        return program.wait(), program.output


def _table(output: str) -> str:
    """The report of failed workers, without what differs between two runs."""
    table = re.search(r"=====+\n.*?=====+\n(?=.*\Z)", output, re.DOTALL)
    assert table, output
    text = re.sub(r"time +: .*|pid: \d+|host +: .*|\S*/torchelastic_\S*", "", table[0])
    # Which of the two is seen first depends on the moment at which the agent looks.
    return re.sub(r"rank +: \d+ \(local_rank: \d+\)", "", text)


def test_success_and_failure_end_as_in_torchrun() -> None:
    status, output = _outcome(*TORCHEXT, *_TWO, "show", "LOCAL_RANK")
    assert status == 0
    assert sorted(re.findall(r"LOCAL_RANK=\d|up \d/\d attempt \d", output)) == [
        "LOCAL_RANK=0",
        "LOCAL_RANK=1",
        "up 0/2 attempt 0",
        "up 1/2 attempt 0",
    ]
    words = ("--nproc-per-node", "1", WORKER, "fail-on", "0", "3")
    (status, output), (status_there, output_there) = _outcome(*TORCHEXT, *words), _outcome(*TORCHRUN, *words)
    assert status == status_there == 1
    assert "exitcode  : 3" in output
    assert _table(output) == _table(output_there)
    assert "Traceback" not in output


@pytest.mark.slow
def test_torchrun_starts_a_missing_script() -> None:
    status, output = _outcome(*TORCHRUN, "--nproc-per-node", "2", "missing.py")
    assert status == 1
    assert output.count("can't open file") == 2  # one for each worker, and then the report of their failure


def test_a_missing_script_is_named() -> None:
    status, output = _outcome(*TORCHEXT, "--nproc-per-node", "2", "missing.py")
    assert status == 1
    assert output.startswith("torchext run: there is no training script 'missing.py' in ")
    assert output.count("\n") == 1


def test_sigterm_leaves_time_to_save_and_ends_with_143() -> None:
    with Program((*TORCHRUN, *_TWO, "save", "0.1", "say", "ready", "stay")) as program:
        program.wait_for("ready", 2)
        program.signal(signal.SIGTERM)
        assert program.wait() == 1
        assert "Traceback" in program.output
    with Program((*TORCHEXT, *_TWO, "save", "1", "say", "ready", "stay")) as program:
        program.wait_for("ready", 2)
        program.signal(signal.SIGTERM)
        program.wait_for("saving", 2)
        program.signal(signal.SIGTERM)  # one who asks twice does not take the time away
        assert program.wait() == 128 + signal.SIGTERM
        assert len(re.findall("rank . saved", program.output)) == 2
        assert len(re.findall("rank . saving", program.output)) == 2
        assert "Traceback" not in program.output


def test_what_outstays_the_grace_is_killed() -> None:
    with Program((*TORCHEXT, "--grace", "0.3", *_TWO, "deaf", "say", "ready", "stay")) as program:
        program.wait_for("ready", 2)
        program.signal(signal.SIGINT)
        assert program.wait() == 128 + signal.SIGINT
        assert "has not ended within the grace of 0.3 s" in program.output


def test_a_second_ctrl_c_ends_the_grace() -> None:
    with Program((*TORCHEXT, "--grace", "1h", *_TWO, "deaf", "say", "ready", "stay")) as program:
        program.wait_for("ready", 2)
        program.signal(signal.SIGINT)
        program.wait_for("death signal")
        program.signal(signal.SIGINT)
        assert program.wait() == 128 + signal.SIGINT


@pytest.mark.parametrize(
    ("moment", "fails"),
    [
        pytest.param("_rendezvous:before:1", False, marks=pytest.mark.slow),
        pytest.param("_start_workers:before:1", False, marks=pytest.mark.slow),
        pytest.param("_start_workers:after:1", False, marks=pytest.mark.slow),
        pytest.param("_monitor_workers:before:2", False, marks=pytest.mark.slow),
        # Rank 1 fails, and rank 0 has its grace, which a signal does not shorten; after that nothing starts again.
        pytest.param("_end_workers:before:1", True, marks=pytest.mark.slow),
        ("_shutdown:before:1", True),
        pytest.param("_shutdown:after:1", True, marks=pytest.mark.slow),
        pytest.param("_rendezvous:before:2", True, marks=pytest.mark.slow),
        pytest.param("_rendezvous:after:2", True, marks=pytest.mark.slow),
        pytest.param("_start_workers:before:2", True, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_the_run_at_whatever_moment_it_comes(moment: str, fails: bool, tmp_path: Path) -> None:
    signalled = str(Path(WORKER).with_name("signalled.py"))
    go = tmp_path / "go"
    steps = ("save", "0.5", "say", "ready", "wait", str(go), "fail-first", "1", "3", "stay")
    words = (sys.executable, signalled, moment, "SIGTERM", "--max-restarts", "1", *_TWO, *steps)
    with Program(words) as program:
        if fails:
            program.wait_for("ready", 2)
            go.touch()
        assert program.wait() == 128 + signal.SIGTERM
        assert program.processes() == set()
        assert "attempt 1" not in program.output
        if fails:
            assert program.output.count("rank 0 saved") == 1
        assert "Traceback" not in program.output


def _failing_peer(go: Path) -> tuple[str, ...]:
    return (*_TWO, "save", "1.5", "say", "ready", "wait", str(go), "fail-on", "1", "7", "stay")


@pytest.mark.slow
def test_torchrun_keeps_its_own_grace_when_a_peer_fails(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with Program((*TORCHRUN, "--shutdown-timeout", "1", *_failing_peer(go))) as program:
        program.wait_for("ready", 2)
        go.touch()
        assert program.wait() == 1
        assert "rank 0 saved" in program.output  # the second that it was to have is not what it got


def test_grace_holds_when_a_peer_fails(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with Program((*TORCHEXT, "--grace", "0.5", *_failing_peer(go))) as program:
        program.wait_for("ready", 2)
        go.touch()
        assert program.wait() == 1
        assert "rank 0 saving" in program.output
        assert "rank 0 saved" not in program.output
        assert "exitcode  : 7" in program.output
    go.unlink()
    with Program((*TORCHEXT, "--grace", "30", *_failing_peer(go))) as program:
        program.wait_for("ready", 2)
        go.touch()
        program.wait_for("rank 0 saving")
        program.signal(signal.SIGTERM)  # comes while the failure is dealt with, and changes nothing about it
        assert program.wait() == 128 + signal.SIGTERM
        assert "rank 0 saved" in program.output
        assert program.output.count("rank 0 saving") == 1


@pytest.mark.slow
def test_torchrun_leaves_workers_when_it_is_killed() -> None:
    with Program((*TORCHRUN, *_TWO, "save", "0.1", "spawn", "say", "ready", "stay")) as program:
        program.wait_for("ready", 2)
        program.signal(signal.SIGKILL)
        program.wait()
        assert len(program.processes()) == 4  # two workers, and their children


def test_nothing_is_left_when_the_agent_is_killed() -> None:
    with Program((*TORCHEXT, "--grace", "1", *_TWO, "save", "0.1", "spawn", "say", "ready", "stay")) as program:
        program.wait_for("ready", 2)
        (agent,) = children(program.pid)
        assert len(program.processes()) == 6
        os.kill(agent, signal.SIGKILL)
        assert program.wait() == 128 + signal.SIGKILL
        assert program.processes() == set()
        assert len(re.findall("rank . saved", program.output)) == 2


@pytest.mark.parametrize("both", [False, True], ids=["keeper", "keeper and agent"])
def test_nothing_is_left_when_the_keeper_is_killed(both: bool) -> None:
    with Program((*TORCHEXT, *_TWO, "save", "0.1", "say", "ready", "stay")) as program:
        program.wait_for("ready", 2)
        (agent,) = children(program.pid)
        program.signal(signal.SIGSTOP)  # it sees nothing of its agent's death
        if both:
            os.kill(agent, signal.SIGKILL)
        program.signal(signal.SIGKILL)
        assert program.wait() == -signal.SIGKILL
        wait_until_gone(program.processes())
        program.wait_for("rank . saved", 2)


def test_what_workers_leave_behind_is_ended_and_named() -> None:
    with Program((*TORCHEXT, "--grace", "0.2", WORKER, "spawn")) as program:
        (child,) = program.wait_for(r"child (\d+)")
        assert program.wait() == 0
        assert f"ending what the workers have left behind: {child[1]}" in program.output
        assert leaks.state(int(child[1])) == ""


_LEAVES_A_LEADER = """
import subprocess, sys
child = (
    "import signal, sys\\n"
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit('the child was asked to end'))\\n"
    "print(1, flush=True)\\n"
    "while True: signal.pause()"
)
words = [sys.executable, "-S", "-c", child]
subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True).stdout.readline()
"""


def test_leaders_of_sessions_that_workers_leave_behind_are_asked_to_end(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_LEAVES_A_LEADER)
    with Program((*TORCHEXT, "--grace", "60", str(script))) as program:
        assert program.wait() == 0
        assert "the child was asked to end" in program.output
