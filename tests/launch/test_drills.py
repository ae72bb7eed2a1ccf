"""Whole queues of jobs: under random faults, many at a time, and in the order that the simulator predicts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.drill import Drill
from tests.launch.programs import TORCHEXT, WORKER, Program
from tests.launch.queues import Engine
from torchext.launch.queue import recorded
from torchext.scheduling import Cluster, make_policy, simulate

_TRAIN = str(Path(WORKER).with_name("train.py"))


@pytest.mark.timeout(300)
def test_jobs_get_done_though_anything_may_be_killed(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    Drill(tmp_path, request.config.getoption("--seed")).run(num_faults=3, num_jobs=2)


@pytest.mark.slow
@pytest.mark.timeout(390)  # a hundred faults and more: python -m tests.launch.drill
def test_jobs_get_done_under_many_faults(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    Drill(tmp_path, request.config.getoption("--seed")).run(num_faults=20, num_jobs=20)


@pytest.mark.slow
@pytest.mark.timeout(390)
def test_twenty_jobs_of_two_processes_at_a_time() -> None:
    words = (*TORCHEXT, "--nproc-per-node", "2", _TRAIN, "3", "0", "-1")
    programs = [Program(words) for _ in range(20)]
    try:
        assert [program.wait(350) for program in programs] == [0] * 20
        for program in programs:
            assert program.output.count("total 9") == 2  # nobody has met a process of another job
    finally:
        for program in programs:
            program.__exit__(None, None, None)


@pytest.mark.slow
@pytest.mark.timeout(390)
@pytest.mark.parametrize("policy", ["fifo", "qssf"])
def test_a_queue_ends_in_the_order_that_the_simulator_predicts(policy: str, engine: Engine, tmp_path: Path) -> None:
    cluster = Cluster.uniform(4, 1)
    with engine.queue(tmp_path / "q", "4x1", "--policy", policy) as queue:
        for number in range(30):
            steps = (2, 9, 4, 7, 12)[number % 5]
            queue.submit("--name", f"job{number}", "--estimate", f"{steps}s", _TRAIN, str(steps), "1", "-1")
        queue.wait_until(lambda: all(job["state"] == "done" for job in queue.client.call("jobs")["jobs"]), 350)
        real = recorded(queue.client, cluster)
    # What is not known before is how long each really takes, starting up included.
    predicted = simulate(real.jobs, cluster, make_policy(policy))
    ends = [(float(end_s), r.job.id) for end_s, r in zip(real.finish_s, real.jobs, strict=True)]
    predicted_ends = {r.job.id: float(end_s) for end_s, r in zip(predicted.finish_s, predicted.jobs, strict=True)}
    for (earlier_s, earlier), (later_s, later) in zip(sorted(ends), sorted(ends)[1:], strict=False):
        # The daemon looks ten times a second, so ends as close as a few looks may change places.
        assert predicted_ends[earlier] < predicted_ends[later] + 2.0, (earlier, later)
        assert later_s >= earlier_s
