"""The policy ``dual``: two agents, order and placement, made safe for a real queue."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from torchext.scheduling.dual.features import JobFeatures, describe_cluster
from torchext.scheduling.dual.heuristic import Placing, by_rwgp
from torchext.scheduling.dual.networks import Agents, Ordered
from torchext.scheduling.dual.placing import Advantage
from torchext.scheduling.dual.reserve import Reservation
from torchext.scheduling.placements import packed
from torchext.scheduling.state import ANY_MACHINE, ClusterState
from torchext.scheduling.types import Discipline, Job, Observation, Placement, Shape

_LOG = logging.getLogger(__name__)

# A decision is strange when it is so many times as far from the mean of training as all but a thousandth there were.
_STRANGE = 2.0
_ORDER_OFF = "the ordering agent is switched off"
# What places where the placement agent is not to be trusted.
_BY_ADVANTAGE = "comparative advantage"
# Before all others.
_FIRST = -1e12
# Of scores, per unit of what the heuristic orders by (a log): what agents that have learned nothing use.
_ORDER_SCALE = 4.0
# How many times as large Gittins' index must be for a job to be stopped for another.
_WORTH_STOPPING = 2.0


class Chooser(Protocol):
    """Turns the agents' logits into choices; training samples and takes notes."""

    def order(self, jobs: Sequence[Job], seen: tuple[Tensor, Tensor], said: Ordered, state: ClusterState) -> Ordered:
        """Returns what to order by; `seen` are the features of jobs and cluster."""
        ...

    def place(self, job: Job, seen: tuple[Tensor, Tensor], logits: Tensor) -> int:
        """Returns which candidate to take; `seen` are the features of the candidates and of the job."""
        ...

    def decline(self, job: Job, seen: tuple[Tensor, Tensor], logit: Tensor) -> bool:
        """Returns whether the job waits although it fits; `seen` are the features of that choice and of the job."""
        ...

    def placed(self, job: Job, placement: Placement | None) -> None:
        """Is told of the whole placement; None: it was declined."""
        ...


class Best:
    """Chooses what has the highest score."""

    def order(self, jobs: Sequence[Job], seen: tuple[Tensor, Tensor], said: Ordered, state: ClusterState) -> Ordered:
        """Returns the scores as they are."""
        return said

    def place(self, job: Job, seen: tuple[Tensor, Tensor], logits: Tensor) -> int:
        """Returns the first of the best."""
        return int(logits.argmax())

    def decline(self, job: Job, seen: tuple[Tensor, Tensor], logit: Tensor) -> bool:
        """Declines what is more likely declined than not."""
        return bool(logit > 0)

    def placed(self, job: Job, placement: Placement | None) -> None:
        """Needs no notes."""


class Dual:
    """Orders waiting jobs and places them by two agents trained together; falls back to qssf rather than err.

    The safety net:

    - Time: the agents are asked only if, by what they have taken lately, the queue at hand fits `budget_s`.
    - Errors: scores that are not finite, and errors of the linear algebra, are not used; where the speed model itself
      fails, jobs are packed.
    - Strangeness: agents are trusted only near what they were trained on; `Agents.distance` measures how far the
      cluster's features are, and `strange` times what all but a thousandth of training decisions had is too far.
    - Starvation: a job that has waited for `patience_s` comes first, and if it does not fit, machines are reserved
      for it, on which nothing new starts. It starts at the latest when what ran there has ended, and those of its
      kind that were submitted before it have had their turn.

    Late, wrong or far, jobs are ordered as qssf does, by their forecast service, and placed where they have most
    advantage. Where the agents do not order, their placement alone is not trusted far from training. `why` tells, for
    each job.

    What the agents add to is a heuristic: shortest typical service first, by the laws of `Laws`, with comparative
    advantage. Agents that have learned nothing decide as it does.

    A job may be left waiting although it fits: by the ordering agent, whose action *wait* holds back all jobs that it
    scores below it, and by the placement agent, which may decline machines too slow for the job when better ones may
    come free (`Advantage.hold_features`). It declines for all jobs of that shape, until the order is decided again.
    Neither happens when nothing runs, or to the job that has come first for having waited so long.

    Source: after "A Dual-Agent Scheduler for Distributed Deep Learning Jobs on Public Cloud via Reinforcement Learning"
    (KDD 2023), of which only the abstract was at hand.

    Args:
        agents: The networks.
        placing: Makes the placement's speed model and heuristic for a cluster.
        budget_s: Time that a decision on the order may take; inf makes decisions reproducible.
        patience_s: After which a job may wait no longer for others to pass.
        strange: See above.
        order_learned: False leaves the order to the heuristic (an ablation).
        placement_learned: False leaves placement to the heuristic (an ablation).
        communicate: False keeps waiting jobs from knowing of each other (an ablation).
        chooser: How scores become choices.
        clock: Seconds, for the budget.
    """

    discipline: ClassVar = Discipline.FIRST_FIT
    preemptive: ClassVar = False
    settled: ClassVar = False

    def __init__(
        self,
        agents: Agents,
        *,
        placing: Placing = by_rwgp,
        budget_s: float = 0.25,
        patience_s: float = 7 * 86400.0,
        strange: float = _STRANGE,
        order_learned: bool = True,
        placement_learned: bool = True,
        communicate: bool = True,
        chooser: Chooser | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.agents = agents.eval()
        self.features = JobFeatures(self.preemptive)
        self.num_fallbacks = 0
        self._placing = placing
        self._budget_s = budget_s
        self._patience_s = patience_s
        self._strange = strange
        self._order_learned = order_learned
        self._placement_learned = placement_learned
        self._communicate = communicate
        self._chooser = chooser or Best()
        self._clock = clock
        self._s_per_job = 0.0
        self._distrusted = False
        self._qssf = False  # whether the latest decision on the order had to be left to it
        self._advantage: Advantage | None = None
        self._reservation: Reservation | None = None
        self._declined: dict[Shape, str] = {}  # since the latest decision on the order, with the reason
        # Of the latest decision: why the ordering agent was not heard (empty if it was), what placed instead of the
        # placement agent and why (as well), and features of jobs.
        self._fallback = "no decision yet"
        self._misplaced = ""
        self._described = torch.empty(0, 0)
        self._token: Tensor | None = None

    def order(self, jobs: Sequence[Job], state: ClusterState) -> Sequence[float]:
        """Scores jobs, the lowest first; inf for those that the agents hold back."""
        if not jobs:
            return []
        self._declined, self._misplaced = {}, ""
        self._reservation = self._overdue(jobs, state)
        scores = self._scores(jobs, jobs, state)
        if self._reservation is not None:
            first = self._reservation.job.id
            scores = [_FIRST if job.id == first else score for job, score in zip(jobs, scores, strict=True)]
        return scores

    def _scores(self, jobs: Sequence[Job], waiting: Sequence[Job], state: ClusterState) -> list[float]:
        """Scores jobs against each other; those that wait are the first of them, and only they can be held back."""
        described = self._describe(jobs, state)
        self._described = torch.from_numpy(described)
        said = self._ask(jobs, len(waiting), described, state)
        if said is None:
            order = described[:, 2] + described[:, 3] if self._qssf else described[:, 0]
            plain: list[float] = (_ORDER_SCALE * order).tolist()
            return plain
        scores = -said.logits
        if state.running:  # else nothing would ever happen that could end the wait
            scores[: len(waiting)].masked_fill_(said.logits[: len(waiting)] < said.wait, math.inf)
        agreed: list[float] = scores.tolist()
        return agreed

    def place(self, job: Job, state: ClusterState) -> Placement | None:
        """Chooses machines, one after another; the placement carries the speed expected there and its sd."""
        if job.shape in self._declined:
            return None
        among = ANY_MACHINE if self._reservation is None else self._reservation.open_to(job)
        shape = packed(job, state, among)
        if shape is None:
            return None
        advantage = self._advantage_for(state)
        row, token = self.features.position_of(job), self._token if self._placement_learned else None
        seen = None if row is None else self._described[row]
        try:
            if seen is not None and self._declines(advantage, job, state, among, seen, token):
                self._chooser.placed(job, None)
                return None
            if seen is None or token is None:
                return advantage(job, state, among)
            chosen = advantage.choose(
                job, state, shape, among, lambda features: self._choose(job, features, seen, token)
            )
        except (RuntimeError, ValueError, ArithmeticError) as error:  # of the networks, or of the speed model
            self._misplace(f"the placement failed: {error}", _BY_ADVANTAGE)
            return self._by_advantage(advantage, job, state, among)
        self._distrusted = False
        self._chooser.placed(job, chosen)
        return chosen

    def finished(self, job: Job, run_s: float, work_s: float) -> None:
        """Learns from an ended job."""
        self.features.finished(job, work_s)
        if self._advantage is not None:
            self._advantage.finished(job)

    def observed(self, observation: Observation) -> None:
        """Learns from the speed of a run."""
        if self._advantage is not None:
            self._advantage.model.observe(observation)

    def forecast_s(self, job: Job) -> float:
        """Returns the expected running time at speed 1, in seconds."""
        return self.features.history.forecast_s(job)

    def why(self, job: Job, state: ClusterState) -> str:
        """Says what the latest decision on a job's place in the order came from."""
        service_h = self.features.typical_h(job, state) * job.num_gpus
        what = f"forecast {service_h:.2g} GPU-hours left, waiting for {(state.now_s - job.submit_s) / 3600:.2g} h"
        reservation = self._reservation
        if reservation is not None and reservation.job.id == job.id:
            patience = f"{self._patience_s / 3600:.3g} h"
            return f"first, for having waited longer than {patience} ({what}); {reservation.words(state)}"
        rule = "qssf" if self._qssf else "the heuristic"
        how = f"{rule}: {self._fallback}" if self._fallback else "the agents"
        declined = "" if job.id in state.running else self._declined.get(job.shape, "")
        return f"{what}; order by {how}{declined}{self._misplaced}"

    def _overdue(self, jobs: Sequence[Job], state: ClusterState) -> Reservation | None:
        before_s = state.now_s - self._patience_s  # not all of the time since need have been waiting
        late = [job for job in jobs if job.submit_s < before_s and _waited_s(job, state) > self._patience_s]
        if not late:
            return None
        first = min(late, key=lambda job: (job.submit_s, job.id))
        kept = self._reservation
        if kept is not None and kept.job.id == first.id and kept.holds(state):
            return kept
        return Reservation.choose(first, state, self.forecast_s)

    def _ask(self, jobs: Sequence[Job], num_waiting: int, described: np.ndarray, state: ClusterState) -> Ordered | None:
        """Asks the ordering agent, unless that is of no use or not to be trusted; the first of the jobs wait."""
        self._token, self._qssf = None, False
        if not self._order_learned and not self._placement_learned:
            self._fallback = "the agents are switched off"
            return None
        if not self.preemptive and all(packed(jobs[i], state) is None for i in self.features.kinds):
            self._fallback = "nothing fits, so the agents were not asked"
            return None
        if self._s_per_job * len(jobs) > self._budget_s:
            self._s_per_job *= 0.9  # so that they are tried again
            self._blame(f"{len(jobs)} jobs would take longer than {self._budget_s:g} s")
            return None
        begin_s = self._clock()
        seen, cluster = self._described, torch.from_numpy(describe_cluster(described[:num_waiting], state))
        with torch.no_grad():
            distance = float(self.agents.distance(cluster))
            limit = self._strange * float(self.agents.seen_limit)
            if not distance <= limit:
                reason = f"far from training (distance {distance:.3g}, trusted up to {limit:.3g})"
                if self._order_learned:
                    self._blame(reason)
                else:
                    self._fallback = _ORDER_OFF
                    self._misplace(reason, _BY_ADVANTAGE)
                return None
            try:
                said = self.agents.ordering(seen, cluster, self._communicate)
            except RuntimeError as error:
                self._blame(f"the ordering agent failed: {error}")
                return None
        if not (torch.isfinite(said.logits).all() and torch.isfinite(said.wait)):
            self._blame("the agents' scores are not finite")
            return None
        if not self._placement_learned:
            self._distrusted = False
        self._s_per_job = max(0.7 * self._s_per_job, (self._clock() - begin_s) / len(jobs))
        self._fallback = "" if self._order_learned else _ORDER_OFF
        self._token = said.token
        if not self._order_learned:
            return None
        return self._chooser.order(jobs, (seen, cluster), said, state)

    def _describe(self, jobs: Sequence[Job], state: ClusterState) -> np.ndarray:
        """Describes jobs, with what they would lose by starting now; that is left out where the speed model fails."""
        try:
            return self.features.describe(jobs, state, lambda job: self._advantage_for(state).lost(job, state))
        except (RuntimeError, ValueError, ArithmeticError) as error:
            self._misplace(f"the speed model failed: {error}", "packing")
            return self.features.describe(jobs, state)

    def _blame(self, reason: str) -> None:
        """Leaves the order to qssf, and placement to comparative advantage."""
        self._fallback, self._qssf = reason, True
        self._distrust(reason, "qssf")

    def _misplace(self, reason: str, instead: str) -> None:
        """Leaves the placement to something else, until the order is decided again."""
        self._misplaced = f"; placed by {instead}: {reason}"
        self._distrust(reason, instead)

    def _distrust(self, reason: str, instead: str) -> None:
        """Notes that the agents are not to be trusted now; told once in a row of such decisions."""
        self.num_fallbacks += 1
        self._token = None
        if not self._distrusted:
            _LOG.warning("falling back to %s: %s", instead, reason)
        self._distrusted = True

    def _choose(self, job: Job, features: np.ndarray, seen: Tensor, token: Tensor) -> int:
        machines = torch.from_numpy(features)
        with torch.no_grad():
            logits = self.agents.placement(machines, seen, token)
        if not torch.isfinite(logits).all():
            raise ValueError("the placement agent's scores are not finite")
        return self._chooser.place(job, (machines, seen), logits)

    def _declines(
        self, advantage: Advantage, job: Job, state: ClusterState, among: int, seen: Tensor, token: Tensor | None
    ) -> bool:
        """Whether a job that fits is left waiting for better machines."""
        if not state.running or _waited_s(job, state) > self._patience_s:
            return False
        features = advantage.hold_features(job, state, math.exp(float(seen[1])), among)
        if features is None:
            return False
        if token is None:
            declines = bool(features[0] > 0)
        else:
            hold = torch.from_numpy(features)
            with torch.no_grad():
                logit = self.agents.placement.decline(hold, seen, token)
            if not torch.isfinite(logit):
                raise ValueError("the placement agent's scores are not finite")
            declines = self._chooser.decline(job, (hold, seen), logit)
        if declines:
            share = math.exp(-float(features[1]))
            self._declined[job.shape] = f"; waits for better machines, as those free have {share:.2g} of their speed"
        return declines

    def _by_advantage(self, advantage: Advantage, job: Job, state: ClusterState, among: int) -> Placement | None:
        try:
            return advantage(job, state, among)
        except (RuntimeError, ValueError, ArithmeticError) as error:  # of the linear algebra in the speed model
            self._misplace(f"the speed model failed: {error}", "packing")
            return packed(job, state, among)

    def _advantage_for(self, state: ClusterState) -> Advantage:
        if self._advantage is None:
            self._advantage = self._placing(state.cluster)
        return self._advantage


class PreemptiveDual(Dual):
    """`Dual` for clusters where jobs can be stopped and go on elsewhere: a job may stop others that come after it.

    The heuristic orders running jobs beside waiting ones, by Gittins' index of what is left of them. A running job is
    stopped only for one whose index is less than half of its own, and no more once it has waited for `patience_s` in
    all; nor when the order is left to qssf.

    The agents have learned to order where nothing is stopped, so here the order is left to the heuristic; they place.

    Args:
        agents: As for `Dual`.
        slowdown_s: Job-seconds that one unit of slowdown counts: more of it lets jobs that may be short stop others
            more readily, for a lower slowdown and a longer mean completion time. 0: only completion times count.
        options: As for `Dual`, but for `order_learned`.

    Raises:
        ValueError: `slowdown_s` is negative or not finite.
    """

    preemptive: ClassVar = True

    def __init__(self, agents: Agents, *, slowdown_s: float = 0.0, **options: Any) -> None:
        if not 0 <= slowdown_s < math.inf:
            raise ValueError(f"slowdown_s must be finite and not negative, got {slowdown_s}")
        super().__init__(agents, order_learned=False, **options)
        self.features = JobFeatures(self.preemptive, slowdown_s)
        self._whole: dict[str, float] = {}  # scores of the latest decision, of waiting and running jobs

    def order(self, jobs: Sequence[Job], state: ClusterState) -> Sequence[float]:
        """Scores waiting jobs, as `Dual.order`; or running ones, as they were in the latest decision on those."""
        if jobs and jobs[0].id in state.running:
            return [self._running(job, state) for job in jobs]
        return super().order(jobs, state)

    def _scores(self, jobs: Sequence[Job], waiting: Sequence[Job], state: ClusterState) -> list[float]:
        everything = [*waiting, *(running.job for running in state.running.values())]
        scores = super()._scores(everything, waiting, state)
        self._whole = {job.id: score for job, score in zip(everything, scores, strict=True)}
        return scores[: len(waiting)]

    def _running(self, job: Job, state: ClusterState) -> float:
        if self._qssf or _waited_s(job, state) > self._patience_s:
            return _FIRST
        # One that has just been started was scored as it waited.
        return self._whole.get(job.id, 0.0) - _ORDER_SCALE * math.log(_WORTH_STOPPING)


def _waited_s(job: Job, state: ClusterState) -> float:
    """How long a job has waited in all: since it was submitted, but for the time in which it ran."""
    return state.now_s - job.submit_s - state.service_gpu_s(job) / job.num_gpus
