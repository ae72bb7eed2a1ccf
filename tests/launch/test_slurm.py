"""Slurm as the engine of a queue: what it is told, and what becomes of jobs when it, or somebody, ends them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch import slurm as emulated
from tests.launch.programs import WORKER
from tests.launch.queues import Engine, Queue
from torchext.launch.errors import LaunchError
from torchext.launch.queue import slurm as commands
from torchext.launch.queue.daemon import Daemon
from torchext.scheduling import Cluster, Machine

pytestmark = pytest.mark.timeout(300)  # on a slow machine; each wait has its own, shorter one


@pytest.fixture(scope="module")
def own_slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[emulated.Slurm]:
    with emulated.running(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture
def slurm(own_slurm: emulated.Slurm) -> Iterator[emulated.Slurm]:
    yield own_slurm
    own_slurm.wait_until_idle()


def test_jobs_wait_in_slurm_held_and_run_where_and_when_the_queue_says(slurm: emulated.Slurm, tmp_path: Path) -> None:
    go = tmp_path / "go"

    def listed() -> list[str]:
        return sorted(slurm.call("squeue", "--noheader", "--format=%j %T %D %C %N|%r").splitlines())

    def wait_until_held(*others: str) -> str:
        found: list[str] = []

        def look() -> bool:
            lines = slurm.call("squeue", "--noheader", "--name=later", "--format=%i %T %r").splitlines()
            found[:] = [line.split()[0] for line in lines if line.endswith(" PENDING JobHeldUser")]
            return len(lines) == len(found) == 1 and found[0] not in others

        queue.wait_until(look)
        return found[0]

    with Engine(slurm).queue(tmp_path / "q", "2x1") as queue:
        queue.client.call("drain", machine="node0")
        steps = ("show", "SLURMD_NODENAME", "show", "SLURM_JOB_ID", "save", "1", "say", "ready", "wait", str(go))
        job = queue.submit("--name", "mine", "--grace", "9", WORKER, *steps)
        queue.wait_for_log(job, "ready")
        assert "SLURMD_NODENAME=node1" in queue.log(job)
        later = queue.submit("--name", "later", WORKER, *steps)
        never = queue.submit("--name", "never", WORKER)
        pending = [f"{name} PENDING 1 1 |JobHeldUser" for name in ("later", "never")]
        queue.wait_until(lambda: listed() == [pending[0], "mine RUNNING 1 1 node1|None", pending[1]])
        queue.client.call("cancel", job=never)
        first = wait_until_held()
        slurm.call("scancel", first)
        second = wait_until_held(first)
        slurm.call("scontrol", "release", second)  # and so it starts on node0, but nothing of the job does
        third = wait_until_held(first, second)
        queue.kill()
        queue.start()
        # The older of the two is the next again.
        slurm.call("scancel", slurm.call("squeue", "--noheader", "--name=mine", "--format=%i").strip())
        queue.wait_for_log(job, "ready", run=2)
        assert queue.log(job).count("rank 0 saved") == 1
        assert wait_until_held() == third
        go.touch()
        for each in (job, later):
            queue.wait_for_state(each, "done")
        assert "SLURMD_NODENAME=node1" in queue.log(later)
        assert f"SLURM_JOB_ID={third}\n" in queue.log(later)
        assert [queue.job(each)["num_runs"] for each in (job, later, never)] == [2, 1, 0]
        outcomes = [run["outcome"] for run in queue.job(job)["runs"]]
        assert outcomes == ["killed from outside (status 143); requeued", "done"]


def test_the_cluster_is_that_of_slurm_unless_said_otherwise(slurm: emulated.Slurm, tmp_path: Path) -> None:
    with Queue(tmp_path / "q", "", ("--engine", "slurm"), slurm.environment) as queue:
        machines = queue.client.call("machines")
        assert [(name, slots) for name, _, slots, *_ in machines] == [(name, 2) for name in emulated.NODES]
        slurm.call("scontrol", "update", "nodename=node2", "state=drain", "reason=test")
        try:
            queue.wait_until(
                lambda: [machine[1] for machine in queue.client.call("machines")] == ["up", "up", "away", "up"]
            )
        finally:
            slurm.call("scontrol", "update", "nodename=node2", "state=resume")
        queue.wait_until(lambda: queue.client.call("machines")[2][1] == "up")


@pytest.mark.allow_leaks("processes", reason="the daemon of the node is started again, for the tests that follow")
def test_a_job_whose_node_goes_down_saves_and_starts_elsewhere(slurm: emulated.Slurm, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with Engine(slurm).queue(tmp_path / "q", "2x1") as queue:
        job = queue.submit("--grace", "9", WORKER, "save", "0", "say", "ready", "wait", str(go))
        queue.wait_for_log(job, "ready")
        ((first, _),) = queue.job(job)["runs"][0]["machines"]
        slurm.kill_node(first)
        try:
            queue.wait_for_log(job, "ready", run=2)
            # The daemon of the node alone was gone: what it had started was told by its files.
            assert "rank 0 saved" in queue.log(job, run=1)
            ((second, _),) = queue.job(job)["runs"][1]["machines"]
            assert {first, second} == {"node0", "node1"}
            go.touch()
            queue.wait_for_state(job, "done")
        finally:
            slurm.start_node(first)
        assert queue.job(job)["num_runs"] == 2


def test_a_job_that_waits_in_slurm_for_others_can_be_cancelled(slurm: emulated.Slurm, tmp_path: Path) -> None:
    slurm.call("sbatch", "--nodelist=node0", "--exclusive", "--output=/dev/null", "--wrap=sleep 1000")
    with Engine(slurm).queue(tmp_path / "q", "1x1") as queue:
        job = queue.submit("--name", "mine", WORKER)
        queue.wait_until(lambda: "mine PENDING" in slurm.call("squeue", "--noheader", "--format=%j %T"))
        queue.wait_until(lambda: "JobHeld" not in slurm.call("squeue", "--noheader", "--format=%r"))
        queue.client.call("cancel", job=job)
        queue.wait_for_state(job, "cancelled")
    slurm.call("scancel", "--name=wrap")


def test_a_refusal_and_a_missing_python_fail_the_job_and_say_why(
    slurm: emulated.Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(slurm).queue(tmp_path / "q", "1x1") as queue:
        monkeypatch.setattr("sys.executable", "/nowhere/python")
        job = queue.submit(WORKER)
        queue.wait_for_state(job, "failed")
        assert re.fullmatch(r"torchext: there is no /nowhere/python on \S+\n", queue.log(job))
    monkeypatch.undo()
    with Queue(
        tmp_path / "p", "1x1", ("--engine", "slurm"), {**slurm.environment, "SBATCH_PARTITION": "nowhere"}
    ) as queue:
        job = queue.submit(WORKER)
        queue.wait_for_state(job, "failed")
        assert re.search(r"torchext: cannot start 1\.1\.0 by Slurm: sbatch: .*invalid partition", queue.log(job))


def test_what_a_killed_daemon_leaves_held_never_runs(slurm: emulated.Slurm, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with Engine(slurm).queue(tmp_path / "q", "1x1") as queue:
        job = queue.submit(WORKER, "say", "ready", "wait", str(go))
        queue.wait_for_log(job, "ready")
        comment = slurm.call("squeue", "--noheader", "--format=%k").strip()
        assert re.fullmatch(r"torchext [0-9a-f]{12} 1\.1", comment)
        # As the sbatch of a daemon does that is killed before it knows the number.
        words = ("--hold", f"--comment={comment}", "--output=/dev/null", f"--wrap=touch {tmp_path}/twin")
        twin = slurm.call("sbatch", "--parsable", *words).strip()
        state = ("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={twin}")
        queue.wait_until(lambda: "CANCELLED" in slurm.call(*state))
        go.touch()
        queue.wait_for_state(job, "done")
        assert queue.job(job)["num_runs"] == 1
    assert not (tmp_path / "twin").exists()


def test_a_cluster_file_has_to_name_nodes_of_slurm(
    slurm: emulated.Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match="Slurm has no node 'a', as the cluster file says, only node0, node1"):
        Daemon(tmp_path / "q", cluster=Cluster((Machine("a", 1),)), engine="slurm")
    with pytest.raises(LaunchError, match="node 'node0' has 2 CPUs in Slurm; the cluster file says 3"):
        Daemon(tmp_path / "q", cluster=Cluster((Machine("node0", 3),)), engine="slurm")


def test_a_machine_without_slurm_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="there is no sinfo on PATH: is this a machine of a Slurm cluster"):
        Daemon(tmp_path / "q", engine="slurm")


@pytest.mark.parametrize(
    ("line", "gpus", "gpu_type", "usable", "down"),
    [
        ("n|10.0.0.1|64|gpu:v100:4(S:0-1),gpu:a100:2|mixed", 6, "v100", True, False),
        ("n|n|64+|gpu:8|idle", 8, "", True, False),
        ("n|n|64|(null)|allocated", 0, "", True, False),
        ("n|n|64|shard:8,gpu:h100:8(IDX:0-7)|idle*", 8, "h100", False, False),
        ("n|n|64|gpu:8|down*", 8, "", False, True),
        ("n|n|64|gpu:8|drained", 8, "", False, False),
        ("n|n|64|gpu:8|mixed-", 8, "", False, False),
    ],
)
def test_what_sinfo_says_is_understood(line: str, gpus: int, gpu_type: str, usable: bool, down: bool) -> None:
    machine = commands._read_machine(line)
    assert (machine.cpus, machine.gpus, machine.gpu_type) == (64, gpus, gpu_type)
    assert (machine.usable, machine.down) == (usable, down)


def test_a_controller_that_cannot_be_reached_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text("#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact slurm controller' >&2\nexit 1\n")
    squeue.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(commands.SlurmError, match="squeue: slurm_load_jobs error: Unable to contact") as caught:
        commands.jobs()
    assert caught.value.passing
