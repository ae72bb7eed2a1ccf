"""How long will a job run? A forecast from the jobs that have ended."""

from __future__ import annotations

from torchext.scheduling.types import Job

# A group's own mean counts as much as that of the wider group once it has seen this many jobs.
_PRIOR_JOBS = 5.0


class History:
    """Mean running time of ended jobs: of all, of a number of GPUs, of a tenant's jobs with that number.

    Each mean is drawn towards that of the wider group, by less the more jobs it comes from, so that a new tenant is
    judged by others' jobs and an old one by its own. Without any history a job is expected to run for its user's
    estimate, or else for an hour.

    Source: the rolling estimate of the QSSF service, Hu et al., "Characterization and Prediction of Deep Learning
    Workloads in Large-Scale GPU Datacenters" (Helios), SC 2021, section 4.2. There, job names and a gradient-boosted
    model take part too; public traces have no names.
    """

    def __init__(self) -> None:
        self._sums: dict[object, list[float]] = {}  # group -> [number of jobs, seconds]

    def add(self, job: Job, run_s: float) -> None:
        """Counts an ended job that ran for so long."""
        for group in _groups(job):
            entry = self._sums.setdefault(group, [0.0, 0.0])
            entry[0] += 1
            entry[1] += run_s

    def forecast_s(self, job: Job) -> float:
        """Returns the expected running time, in seconds."""
        mean_s = 3600.0 if job.estimate_s is None else job.estimate_s
        for group in _groups(job):
            entry = self._sums.get(group)
            if entry is not None:
                mean_s = (entry[1] + _PRIOR_JOBS * mean_s) / (entry[0] + _PRIOR_JOBS)
        return mean_s


def _groups(job: Job) -> tuple[object, ...]:
    """Lists the groups of a job, the widest first."""
    return ("", job.num_gpus, (job.tenant, job.num_gpus), (job.tenant, job.num_gpus, job.job_class))
