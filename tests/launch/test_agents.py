"""Several machines, each with an agent of its own; all of them are this one."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.launch.programs import TORCHLESS, WORKER, Program, children
from tests.launch.queues import Queue
from torchext.launch.errors import LaunchError
from torchext.launch.folders import read_json

pytestmark = pytest.mark.timeout(300)  # on a slow machine; each wait has its own, shorter one

_TRAIN = str(Path(WORKER).with_name("train.py"))


def _agent(
    queue: Queue,
    name: str,
    folder: Path,
    *,
    url: str | None = None,
    environment: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> Program:
    join = [*TORCHLESS, "node", "join", url or str(queue.folder)]
    return Program([*prefix, *join, "--name", name, "--folder", str(folder)], environment=environment)


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


_DEVICE = "queue0"


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two network namespaces, as two machines with a cable between them: 10.123.8.1 and 10.123.8.2."""
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip (Debian: iproute2)")
    names = [f"torchext-queue-{os.getpid()}-{i}" for i in range(2)]
    commands = [f"netns add {name}" for name in names]
    commands.append(f"link add {_DEVICE} netns {names[0]} type veth peer name {_DEVICE} netns {names[1]}")
    for i, name in enumerate(names):
        commands.append(f"-n {name} address add 10.123.8.{i + 1}/24 dev {_DEVICE}")
        commands += [f"-n {name} link set {device} up" for device in ("lo", _DEVICE)]
    try:
        for command in commands:
            done = subprocess.run(["ip", *command.split()], capture_output=True, text=True, timeout=20, check=False)
            if done.returncode:
                pytest.skip(f"may not make network namespaces: ip {command}: {done.stderr.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=20, check=False)


@pytest.mark.slow
def test_machines_with_networks_of_their_own_train_together_and_lose_each_other(
    hosts: list[str], tmp_path: Path
) -> None:
    here, there = (("ip", "netns", "exec", name) for name in hosts)
    environment = {"GLOO_SOCKET_IFNAME": _DEVICE}
    options = ("--engine", "nodes", "--lease", "10", "--listen", "10.123.8.1:0")
    with contextlib.ExitStack() as stack:
        queue = stack.enter_context(Queue(tmp_path / "q", "2x1", options, environment, here))
        more = {
            "url": queue.daemon.wait_for(r"tcp://\S+")[0][0],
            "environment": {**environment, "TORCHEXT_QUEUE_TOKEN": (tmp_path / "q" / "token").read_text()},
        }
        stack.enter_context(_agent(queue, "node0", tmp_path / "a", prefix=here, **more))
        stack.enter_context(_agent(queue, "node1", tmp_path / "b", prefix=there, **more))
        _wait_for_machines(queue, "up", "up")
        wide = queue.submit("--nnodes", "2", "--nproc-per-node", "1", _TRAIN, "3", "0", "-1")
        queue.wait_for_state(wide, "done")
        for node in range(2):
            assert f"rank {node}/2 attempt 0 total 9" in _log(queue, wide, node=node)

        queue.client.call("drain", machine="node0")
        go = tmp_path / "go"
        job = queue.submit("--grace", "3", WORKER, "save", "0", "say", "ready", "wait", str(go))
        queue.wait_until(lambda: queue.job(job)["num_runs"] and "ready" in _log(queue, job))
        queue.client.call("undrain", machine="node0")
        subprocess.run(["ip", "-n", hosts[1], "link", "set", _DEVICE, "down"], check=True, timeout=20)
        part = tmp_path / "b" / str(job) / "run-1" / "node-0"
        queue.wait_until((part / "result.json").exists)  # it has saved, and ended by itself
        assert "rank 0 saved" in (part / "output.log").read_text()
        queue.wait_until(lambda: queue.job(job)["num_runs"] == 2 and "ready" in _log(queue, job, run=2))
        second = queue.job(job)["runs"][1]
        assert second["machines"] == [["node0", 1]]
        assert second["start_s"] > read_json(part / "result.json")["end_s"]
        subprocess.run(["ip", "-n", hosts[1], "link", "set", _DEVICE, "up"], check=True, timeout=20)
        _wait_for_machines(queue, "up", "up")
        go.touch()
        queue.wait_for_state(job, "done")
        assert queue.job(job)["num_runs"] == 2


def _log(queue: Queue, job: int, run: int = 1, node: int = 0) -> str:
    """What a part has printed; empty while its machine does not answer."""
    try:
        return queue.log(job, run, node)
    except LaunchError:
        return ""
