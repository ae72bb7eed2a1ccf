"""Several machines, each with an agent of its own; all of them are this one."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.launch.programs import WORKER, Program, children
from tests.launch.queues import Queue
from torchext.launch.folders import read_json

pytestmark = pytest.mark.timeout(300)  # on a slow machine; each wait has its own, shorter one

_TRAIN = str(Path(WORKER).with_name("train.py"))


def _agent(queue: Queue, name: str, folder: Path) -> Program:
    words = [
        sys.executable,
        "-m",
        "torchext",
        "node",
        "join",
        str(queue.folder),
        "--name",
        name,
        "--folder",
        str(folder),
    ]
    return Program(words)


def _wait_for_machines(queue: Queue, *states: str) -> None:
    queue.wait_until(lambda: [state for _, state, *_ in queue.client.call("machines")] == list(states))


def test_jobs_run_on_machines_that_join_and_outlive_their_agents(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with Queue(tmp_path / "q", "2x1", ("--engine", "nodes")) as queue, _agent(queue, "node1", tmp_path / "b") as second:
        _wait_for_machines(queue, "away", "up")
        wide = queue.submit("--nnodes", "2", "--nproc-per-node", "1", _TRAIN, "3", "0", "-1")
        with _agent(queue, "node9", tmp_path / "z") as stranger:
            assert stranger.wait() == 1
            assert "this queue has no machine 'node9' to join, only node0, node1 (--name)" in stranger.output
        with _agent(queue, "node1", tmp_path / "z") as twin:
            assert twin.wait() == 1
            assert "machine 'node1' has an agent already" in twin.output
        assert queue.job(wide)["num_runs"] == 0
        with _agent(queue, "node0", tmp_path / "a") as first:
            queue.wait_for_state(wide, "done")
            assert "[train node 1 rank 1]: rank 1/2 attempt 0 total 9" in queue.log(wide, node=1)
            job = queue.submit("--grace", "1", WORKER, "say", "ready", "wait", str(go))
            queue.wait_for_log(job, "ready")
            first.signal(signal.SIGKILL)
            first.wait()
            queue.kill()  # and the daemon, too
            queue.start()
            with _agent(queue, "node0", tmp_path / "a"):
                _wait_for_machines(queue, "up", "up")
                go.touch()
                queue.wait_for_state(job, "done")
                assert queue.job(job)["num_runs"] == 1
        second.signal(signal.SIGTERM)
        assert second.wait() == 0


@pytest.mark.slow
def test_a_silent_machine_ends_its_jobs_before_they_start_elsewhere(tmp_path: Path) -> None:
    with (
        Queue(tmp_path / "q", "2x1", ("--engine", "nodes", "--lease", "2")) as queue,
        _agent(queue, "node0", tmp_path / "a") as first,
    ):
        _wait_for_machines(queue, "up", "away")
        job = queue.submit("--grace", "1", WORKER, "save", "0.1", "say", "ready", "stay")
        queue.wait_for_log(job, "ready")
        part = tmp_path / "a" / str(job) / "run-1" / "node-0"
        keeper = read_json(part / "pid.json")["pid"]
        (agent,) = children(keeper)
        first.signal(signal.SIGSTOP)
        queue.wait_until(lambda: not os.path.exists(f"/proc/{agent}"), 30)
        queue.wait_until((part / "result.json").exists, 30)  # it has saved, and ended by itself
        assert "rank 0 saved" in (part / "output.log").read_text()
        first.signal(signal.SIGCONT)
        queue.wait_for_log(job, "ready", run=2)
        assert "killed from outside (status 143); requeued" in [run["outcome"] for run in queue.job(job)["runs"]]


@pytest.mark.slow
def test_jobs_of_a_lost_machine_start_elsewhere(tmp_path: Path) -> None:
    with (
        Queue(tmp_path / "q", "2x1", ("--engine", "nodes", "--lease", "2")) as queue,
        _agent(queue, "node0", tmp_path / "a") as first,
    ):
        _wait_for_machines(queue, "up", "away")
        job = queue.submit("--grace", "1", WORKER, "say", "ready", "stay")
        queue.wait_for_log(job, "ready")
        keeper = read_json(tmp_path / "a" / str(job) / "run-1" / "node-0" / "pid.json")["pid"]
        with _agent(queue, "node1", tmp_path / "b"):
            _wait_for_machines(queue, "up", "up")
            first.signal(signal.SIGKILL)
            queue.wait_until(lambda: not os.path.exists(f"/proc/{keeper}"), 30)
            queue.wait_for_log(job, "ready", run=2)
            assert queue.job(job)["runs"][1]["machines"] == [["node1", 1]]
