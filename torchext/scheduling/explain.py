"""What would start next, and why: decisions in words, tried on a copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchext.scheduling.placements import packed
from torchext.scheduling.scheduler import Scheduler
from torchext.scheduling.state import ClusterState
from torchext.scheduling.types import Explains, Job, Placement, Start


@dataclass(frozen=True)
class PlannedStart:
    """A start and its reasons.

    Attributes:
        job_id: The job.
        score: Its score; lower is served first.
        machines: (name, GPUs) of each machine, rank 0's first.
        speed: Expected speed, relative to the machine that durations refer to.
        speed_sd: Standard deviation of `speed`, or None if the policy has no idea of it.
        displaced: Ids of the running jobs that have to stop for it.
        passed: Ids of jobs that come before it in the order and still wait.
        why: What the score came from, in the policy's words; "" if it has none.
    """

    job_id: str
    score: float
    machines: tuple[tuple[str, int], ...]
    speed: float
    speed_sd: float | None
    displaced: tuple[str, ...]
    passed: tuple[str, ...]
    why: str = ""


@dataclass(frozen=True)
class PlannedWait:
    """A job that goes on waiting.

    Attributes:
        job_id: The job.
        score: Its score; lower is served first. inf: the policy holds it back.
        reason: Why, in words.
        why: What the score came from, in the policy's words; "" if it has none.
    """

    job_id: str
    score: float
    reason: str
    why: str = ""


@dataclass(frozen=True)
class Plan:
    """What a scheduler would do now: the starts in their order, and who waits, in the policy's order."""

    starts: tuple[PlannedStart, ...]
    waits: tuple[PlannedWait, ...]


def plan(scheduler: Scheduler) -> Plan:
    """Says what `Scheduler.decide` would do now, and why, without doing it."""
    trial = scheduler.copy()
    starts = explain_starts(trial.decide(), trial)
    waiting = trial.waiting()
    return Plan(
        starts=starts,
        waits=tuple(
            PlannedWait(job.id, score, _explain_wait(score, job, trial), _why(job, trial)) for score, job in waiting
        ),
    )


def explain_starts(starts: Sequence[Start], scheduler: Scheduler) -> tuple[PlannedStart, ...]:
    """Gives the reasons of starts that the scheduler has just decided."""
    whys = [_why(start.job, scheduler) for start in starts]  # before those left are scored again
    waiting = scheduler.waiting() if starts else []
    return tuple(_explain_start(start, waiting, scheduler.state, why) for start, why in zip(starts, whys, strict=True))


def _explain_start(start: Start, waiting: list[tuple[float, Job]], state: ClusterState, why: str) -> PlannedStart:
    placement = start.placement
    rank = (-start.job.priority, start.score, start.job.submit_s)
    return PlannedStart(
        job_id=start.job.id,
        score=start.score,
        machines=tuple((state.cluster.machines[index].name, gpus) for index, gpus in placement.gpus),
        speed=state.speed(start.job, placement) if placement.speed is None else placement.speed,
        speed_sd=placement.speed_sd,
        displaced=tuple(running.job.id for running in start.displaced),
        passed=tuple(job.id for score, job in waiting if (-job.priority, score, job.submit_s) < rank),
        why=why,
    )


def _why(job: Job, scheduler: Scheduler) -> str:
    policy = scheduler.policy
    return policy.why(job, scheduler.state) if isinstance(policy, Explains) else ""


def _explain_wait(score: float, job: Job, scheduler: Scheduler) -> str:
    if score == float("inf"):
        return "the policy holds it back"
    state = scheduler.state
    placement: Placement | None = scheduler.policy.place(job, state)
    if placement is not None:
        return "would fit, but must not pass the jobs before it"
    if packed(job, state) is not None:
        return "would fit, but the policy keeps the machines that are free for later, or for another job"
    if scheduler.policy.place(job, ClusterState(state.cluster)) is None:
        cap = job.max_price_per_gpu_hour
        price = "" if cap is None else f" at no more than {cap:g} per GPU and hour"
        return f"needs {job.num_gpus} GPUs{price} as the cluster never has them, even empty"
    free = max((free for index, free in enumerate(state.free) if state.is_open(index)), default=0)
    where = "" if job.gpus_per_node is None else f", {job.gpus_per_node} on each machine"
    return f"needs {job.num_gpus} GPUs{where}; {state.num_free} are free, at most {free} on one machine"
