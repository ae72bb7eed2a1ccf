"""What a queue has done, in the form that the simulator gives: for its metrics and plots, and to compare the two."""

from __future__ import annotations

import numpy as np

from torchext.launch.queue.client import Client
from torchext.launch.queue.types import JobState
from torchext.scheduling import Cluster, Job, Placement, RecordedJob, Result, Run

_OUTCOMES = {"done": "finished", "preempted": "displaced", "requeued": "displaced"}


def recorded(client: Client, cluster: Cluster) -> Result:
    """Collects the jobs of a queue that are done, with all their runs; a job's duration is the time that it ran.

    Args:
        client: Of the queue.
        cluster: The machines of the queue.

    Returns:
        As `torchext.scheduling.simulate` does; ``plot({"queue": result})`` draws it, ``summarize(result)`` sums it up.
    """
    index = {machine.name: i for i, machine in enumerate(cluster.machines)}
    jobs: list[RecordedJob] = []
    starts_s: list[float] = []
    runs: list[Run] = []
    for listed in client.call("jobs")["jobs"]:
        if listed["state"] != JobState.DONE.value:
            continue
        described = client.call("job", job=listed["id"])
        asked = described["submission"]
        job = Job(
            id=asked["name"] if not any(asked["name"] == other.job.id for other in jobs) else str(listed["id"]),
            submit_s=listed["submit_s"],
            num_gpus=listed["num_nodes"] * listed["nproc_per_node"],
            tenant=listed["user"],
            job_class=asked["job_class"],
            estimate_s=asked["estimate_s"],
            deadline_s=asked["deadline_s"],
            gpus_per_node=listed["nproc_per_node"],
            priority=listed["priority"],
            max_price_per_gpu_hour=asked["max_price_per_gpu_hour"],
        )
        started = [run for run in described["runs"] if run["start_s"] is not None]
        for run in started:
            placement = Placement(tuple((index[name], slots) for name, slots in run["machines"]))
            outcome = _OUTCOMES.get(run["outcome"], "failed")
            runs.append(Run(len(jobs), placement, run["start_s"], run["end_s"], outcome))
        jobs.append(RecordedJob(job, duration_s=listed["run_s"]))
        starts_s.append(started[0]["start_s"])
    runs.sort(key=lambda run: run.end_s)
    ends_s = {run.job: run.end_s for run in runs}
    finish_s = np.array([ends_s[i] for i in range(len(jobs))])
    num_events = len(jobs) + 2 * len(runs)
    return Result(cluster, tuple(jobs), (), np.array(starts_s), finish_s, runs, num_events)
