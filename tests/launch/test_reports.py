"""What users of torchrun and of other launchers have reported, as it goes in a queue, with each engine.

The numbers are those of the reports at github.com/pytorch/pytorch, and of meta-pytorch/torchx where it says so. How
torchrun itself behaves is shown in test_run.py and test_nodes.py.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.programs import WORKER, children
from tests.launch.queues import Engine, Queue

# Slow by their number; test_run.py and test_nodes.py have most of what they show.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_TWO = ("--nnodes", "2", "--nproc-per-node", "1")


@pytest.fixture(scope="module")
def module_queue(any_engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Queue]:
    """Two machines with two slots each."""
    with any_engine.queue(tmp_path_factory.mktemp("reports") / "q", "2x2") as made:
        yield made


@pytest.fixture
def queue(module_queue: Queue, engine: Engine) -> Iterator[Queue]:
    """That queue again; no job may be left in it, and no process of one."""
    before = module_queue.processes()
    yield module_queue
    module_queue.wait_until(lambda: module_queue.processes() <= before)
    assert all(job["end_s"] is not None for job in module_queue.client.call("jobs")["jobs"])


def test_jobs_that_want_one_port_run_side_by_side(queue: Queue, tmp_path: Path) -> None:  # 126510, 73320
    go = tmp_path / "go"
    with socket.socket() as holder:  # so that nobody else gets that port
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        words = ("--nproc-per-node", "1", "--master-port", str(holder.getsockname()[1]), WORKER, "say", "ready")
        jobs = [queue.submit(*words, "wait", str(go)) for _ in range(2)]
        for job in jobs:
            queue.wait_for_log(job, "ready")
        go.touch()
        for job in jobs:
            queue.wait_for_state(job, "done")


def test_a_job_that_is_cancelled_has_its_grace(queue: Queue) -> None:  # 119856
    job = queue.submit("--grace", "60", WORKER, "save", "2", "say", "ready", "stay")
    queue.wait_for_log(job, "ready")
    queue.client.call("cancel", job=job)
    queue.wait_for_state(job, "cancelled")
    assert "rank 0 saved" in queue.log(job)


def test_rank_0_is_on_the_first_of_the_chosen_machines(queue: Queue) -> None:  # 137402, 73656
    job = queue.submit(*_TWO, WORKER)
    queue.wait_for_state(job, "done")
    for node in range(2):
        assert f"up {node}/2" in queue.log(job, node=node)


def test_an_elastic_job_goes_on_when_a_node_is_lost(queue: Queue, engine: Engine, tmp_path: Path) -> None:
    # 111646, 67742
    go = tmp_path / "go"
    quick = ("--rdzv-conf", "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3")
    job = queue.submit(*_TWO, "--min-nodes", "1", "--grace", "9", *quick, WORKER, "save", "0", "wait", str(go))
    queue.wait_for_log(job, "up 0/2")
    keeper = engine.keeper(queue, job, node=1)
    for pid in (keeper, *children(keeper)):
        os.kill(pid, signal.SIGKILL)
    queue.wait_for_log(job, "up 0/1")
    go.touch()
    queue.wait_for_state(job, "done")
    assert queue.job(job)["num_runs"] == 1


def test_a_job_that_lost_a_node_starts_anew_with_all(queue: Queue, engine: Engine, tmp_path: Path) -> None:  # 147064
    go = tmp_path / "go"
    job = queue.submit(*_TWO, "--grace", "9", WORKER, "save", "0", "say", "ready", "wait", str(go))
    for node in range(2):
        queue.wait_until(lambda node=node: "ready" in queue.log(job, node=node))
    keeper = engine.keeper(queue, job, node=1)
    for pid in (keeper, *children(keeper)):
        os.kill(pid, signal.SIGKILL)
    queue.wait_for_log(job, "up 0/2", run=2)
    assert "rank 0 saved" in queue.log(job, run=1)
    go.touch()
    queue.wait_for_state(job, "done")
    lost, done = (run["outcome"] for run in queue.job(job)["runs"])
    # Which of the two is seen first: that one was lost, or that the other was ended for it.
    assert lost in ("a node or agent was lost; requeued", "killed from outside (status 143); requeued")
    assert done == "done"


_WAITS_ON_RANK_1 = """
import os, sys, time
print("up", os.environ["RANK"], flush=True)
while os.environ["RANK"] == "1" and not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
"""


def test_a_node_that_is_done_waits_for_the_other(queue: Queue, engine: Engine, tmp_path: Path) -> None:  # 69520
    go, script = tmp_path / "go", tmp_path / "script.py"
    script.write_text(_WAITS_ON_RANK_1)
    job = queue.submit(*_TWO, str(script), str(go))
    for node in range(2):
        queue.wait_until(lambda node=node: f"up {node}" in queue.log(job, node=node))
    keeper = engine.keeper(queue, job)
    (agent,) = children(keeper)
    queue.wait_until(lambda: not children(agent))  # the worker of rank 0 has ended, its agent has not
    assert not (engine.part(queue, job) / "result.json").exists()
    go.touch()
    queue.wait_for_state(job, "done")


def test_a_crash_of_one_node_ends_the_others_and_the_job(queue: Queue) -> None:  # 76287
    # Rank 0 would wait for ever, as one does in a collective whose peer is gone.
    job = queue.submit(*_TWO, "--grace", "9", WORKER, "save", "0.1", "say", "ready", "fail-on", "1", "3", "stay")
    queue.wait_for_state(job, "failed")
    assert "exitcode  : 3" in queue.log(job, node=1)
    assert "another node of job 'worker' has failed" in queue.log(job) or "rank 0 saved" in queue.log(job)


def test_lines_name_job_and_rank_and_each_rank_has_its_file(queue: Queue, engine: Engine, tmp_path: Path) -> None:
    # 75087, 60911
    go = tmp_path / "go"
    words = ("--name", "mine", "--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "1")
    job = queue.submit(*words, WORKER, "wait", str(go), "fail-first", "3", "1")
    for node in range(2):
        queue.wait_until(lambda node=node: queue.log(job, node=node).count("attempt 0") == 2)
    go.touch()
    queue.wait_for_state(job, "done")
    for rank in range(4):
        node, log = rank // 2, queue.log(job, node=rank // 2)
        for attempt in (0, 1):
            line = f"up {rank}/4 attempt {attempt}"
            assert f"[mine node {node} rank {rank}]: {line}" in log
            files = engine.part(queue, job, node=node).glob(f"ranks/*/attempt_{attempt}/{rank}/stdout.log")
            assert [line in file.read_text() for file in files] == [True]


_FAILS_ONCE = "import os, sys; sys.exit(5 if os.environ['TORCHEXT_RUN'] == '1' else 0)"


def test_retries_count_and_names_may_be_anything(queue: Queue, tmp_path: Path) -> None:  # torchx 394, 405
    script = tmp_path / "script.py"
    script.write_text(_FAILS_ONCE)
    name = "a/job with 'ünusual' \"name\"|$1; -x"
    job = queue.submit("--retries", "1", "--name", name, str(script))
    queue.wait_for_state(job, "done")
    assert queue.job(job)["name"] == name
    outcomes = [run["outcome"] for run in queue.job(job)["runs"]]
    assert outcomes == ["failed with status 1; retry 1 of 1", "done"]
    assert "exitcode  : 5" in queue.log(job)
