"""What the ends of its parts mean for a run, and for its job."""

from __future__ import annotations

from torchext.launch.queue.store import JobRow, RunRow
from torchext.launch.queue.types import JobState, PartReport, PartState, Submission, Why

_MOST_LOSSES = 3  # runs of a job that may be lost with their node or agent; beyond, the job is likely what kills them


def goes_on_without(asked: Submission, reports: list[PartReport]) -> bool:
    """Whether the job can do without those nodes of a run that were lost; never without the one of the store."""
    min_nodes = asked.min_nodes
    if min_nodes is None or _lost(reports[0]):
        return False
    left = [report for report in reports if not _lost(report)]
    running = any(not report.state.idle for report in left)
    return running and len(left) >= min_nodes and not any(report.status for report in left)


def judge(row: JobRow, run: RunRow, reports: list[PartReport]) -> tuple[JobState | None, str, bool]:
    """Says what the job ends as (None: it waits again), why in words, and whether it has to be put in line.

    A failure or a loss is counted in `row`.
    """
    left = [report for report in reports if row.submission.min_nodes is None or not _lost(report)]
    enough = len(left) >= (row.submission.min_nodes or len(reports))
    if enough and all(report.state is PartState.ENDED and report.status == 0 for report in left):
        return JobState.DONE, "done", False
    if run.why in (Why.CANCEL, Why.PREEMPT_CANCEL):
        return JobState.CANCELLED, "cancelled", False
    if run.why in (Why.PREEMPT, Why.REQUEUE):
        return None, run.why.value, run.why is Why.REQUEUE
    statuses = [report.status for report in reports if report.status]
    # A peer of one that has failed is ended by us, with 143.
    own = [status for status in statuses if not _by_signal(status)]
    if not own:
        row.losses += 1
        words = "a node or agent was lost" if not statuses else f"killed from outside (status {statuses[0]})"
        if row.losses <= _MOST_LOSSES:
            return None, f"{words}; requeued", True
        return JobState.FAILED, f"{words}, as {_MOST_LOSSES} runs before: not tried again", False
    row.failures += 1
    if row.failures <= row.submission.retries:
        return None, f"failed with status {own[0]}; retry {row.failures} of {row.submission.retries}", True
    return JobState.FAILED, f"failed with status {own[0]}", False


def _lost(report: PartReport) -> bool:
    """Whether a part did not end by itself: its agent or machine went, or was killed."""
    return report.state is PartState.LOST or (report.status is not None and _by_signal(report.status))


def _by_signal(status: int) -> bool:
    """Whether this is how `torchext run` ends when a signal ends it: sent by us, by the system, or by hand."""
    return status > 128
