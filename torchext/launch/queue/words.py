"""What people read: jobs in lines, why a job was started where it was, and why another never can be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchext.launch.queue.types import Submission
    from torchext.scheduling import Cluster, PlannedStart


def explain(planned: PlannedStart) -> str:
    """Puts the reasons of a start in words."""
    where = ", ".join(f"{name} ({slots} slot{'s' * (slots > 1)})" for name, slots in planned.machines)
    words = f"score {planned.score:.6g}, the lowest that could start; on {where}; expected speed {planned.speed:.3g}"
    if planned.speed_sd is not None:
        words += f" +- {planned.speed_sd:.2g}"
    if planned.passed:
        words += f"; passes {_some(planned.passed)}, for which there is no room"
    if planned.displaced:
        words += f"; stops {_some(planned.displaced)}"
    return words


def _some(jobs: tuple[str, ...]) -> str:
    more = f" and {len(jobs) - 5} more" if len(jobs) > 5 else ""
    return f"job{'s' * (len(jobs) > 1)} {', '.join(jobs[:5])}{more}"


def too_large(asked: Submission, cluster: Cluster) -> str:
    """Says why a cluster can never run a job."""
    machines = cluster.machines
    cap = asked.max_price_per_gpu_hour
    fitting = [m for m in machines if m.num_gpus >= (asked.nproc_per_node or 1)]
    words = f"the cluster can never run {asked.num_nodes} node(s) with {asked.nproc_per_node} process(es) each: "
    if not fitting:
        return words + f"its largest machine has {max(m.num_gpus for m in machines)} slots (--nproc-per-node)"
    if len(fitting) < asked.num_nodes:
        return words + f"only {len(fitting)} of its machines have so many slots (--nnodes)"
    return words + f"too few of its machines cost no more than {cap:g} per GPU and hour (--max-price)"


def job_lines(jobs: list[dict[str, Any]], now_s: float) -> list[list[str]]:
    """Returns a head and a line for each job, cell by cell; jobs as the daemon tells of them."""
    lines = [["job", "name", "user", "state", "nodes", "procs", "age", "runs", "note"]]
    for job in jobs:
        age_s = (job["end_s"] or now_s) - job["submit_s"]
        words = [job["id"], job["name"], job["user"], job["state"], job["num_nodes"], job["nproc_per_node"]]
        lines.append([*map(str, words), span(age_s), str(job["num_runs"]), job["reason"]])
    return lines


def span(seconds: float) -> str:
    """Writes a time as people do: 45s, 12m, 3.5h, 2.1d."""
    if seconds < 100:
        return f"{seconds:.0f}s"
    if seconds < 6000:
        return f"{seconds / 60:.0f}m"
    return f"{seconds / 3600:.1f}h" if seconds < 172800 else f"{seconds / 86400:.1f}d"
