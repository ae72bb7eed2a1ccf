"""From a job and a decision about it to what one machine is told to start, and what is known of that before."""

from __future__ import annotations

from pathlib import Path

from torchext.launch.queue.store import RunRow
from torchext.launch.queue.types import Part, PartKey, Request, Submission


def make_part(asked: Submission, run: RunRow, key: PartKey, endpoint: str | None, *, job_folder: Path) -> Part:
    """Describes one part of a run.

    Args:
        asked: The job.
        run: The run, whose slots are chosen.
        key: Which of its parts.
        endpoint: Where the store of the run is; None for the part that holds it.
        job_folder: For the job's own files.
    """
    assert run.slots is not None
    assert asked.nproc_per_node is not None
    num_nodes = str(len(run.machines)) if asked.min_nodes is None else f"{asked.min_nodes}:{len(run.machines)}"
    words = ["--nnodes", num_nodes, "--nproc-per-node", str(asked.nproc_per_node)]
    words += ["--grace", f"{asked.grace_s:g}"]
    if len(run.machines) > 1:
        words += ["--node-rank", str(key.node), "--rdzv-backend", "c10d", "--rdzv-id", f"{run.job}.{run.number}"]
        meeting = ",".join(filter(None, [asked.rendezvous, f"is_host={key.node == 0}"]))
        words += ["--rdzv-endpoint", endpoint or "localhost:0", "--rdzv-conf", meeting]
    return Part(
        key=key,
        words=(*asked.options, *words, *asked.command),
        python=asked.python,
        cwd=asked.cwd,
        env=_environment(asked, key, job_folder),
        grace_s=asked.grace_s,
        slots=run.slots[key.node],
        machines=tuple(name for name, _ in run.machines),
        holds_store=key.node == 0 and len(run.machines) > 1,
    )


def make_request(asked: Submission, key: PartKey, *, job_folder: Path) -> Request:
    """Describes a run that has not been placed yet.

    Args:
        asked: The job.
        key: The first part of the run.
        job_folder: For the job's own files.
    """
    assert asked.nproc_per_node is not None
    env = _environment(asked, key, job_folder)
    return Request(key, asked.python, env, asked.num_nodes, asked.nproc_per_node)


def _environment(asked: Submission, key: PartKey, job_folder: Path) -> dict[str, str]:
    return {
        **asked.env,
        "TORCHEXT_JOB": asked.name,
        "TORCHEXT_JOB_ID": str(key.job),
        "TORCHEXT_RUN": str(key.run),
        "TORCHEXT_JOB_FOLDER": str(job_folder),
    }
