"""The policy ``dual``: two agents, order and placement, made safe for a real queue."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

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
# Before all others.
_FIRST = -1e12


class Chooser(Protocol):
    """Turns the agents' logits into choices; training samples and takes notes."""

    def order(self, jobs: Sequence[Job], seen: tuple[Tensor, Tensor], said: Ordered, state: ClusterState) -> Ordered:
        """Returns what to order by; `seen` are the features of jobs and cluster."""
        ...

    def place(self, job: Job, seen: tuple[Tensor, Tensor], logits: Tensor) -> int:
        """Returns which candidate to take; `seen` are the features of the candidates and of the job."""
        ...

    def placed(self, job: Job, placement: Placement) -> None:
        """Is told of the whole placement."""
        ...


class Best:
    """Chooses what has the highest score."""

    def order(self, jobs: Sequence[Job], seen: tuple[Tensor, Tensor], said: Ordered, state: ClusterState) -> Ordered:
        """Returns the scores as they are."""
        return said

    def place(self, job: Job, seen: tuple[Tensor, Tensor], logits: Tensor) -> int:
        """Returns the first of the best."""
        return int(logits.argmax())

    def placed(self, job: Job, placement: Placement) -> None:
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

    In the first three cases the decision is qssf's, on the machines of most advantage. `why` tells, for each job.

    Source: after "A Dual-Agent Scheduler for Distributed Deep Learning Jobs on Public Cloud via Reinforcement Learning"
    (KDD 2023), of which only the abstract was at hand.

    Args:
        agents: The networks.
        placing: Makes the placement's speed model and heuristic for a cluster.
        budget_s: Time that a decision on the order may take; inf makes decisions reproducible.
        patience_s: After which a job may wait no longer for others to pass.
        strange: See above.
        order_learned: False leaves the order to qssf (an ablation).
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
        patience_s: float = 3 * 86400.0,
        strange: float = _STRANGE,
        order_learned: bool = True,
        placement_learned: bool = True,
        communicate: bool = True,
        chooser: Chooser | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.agents = agents.eval()
        self.features = JobFeatures()
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
        self._advantage: Advantage | None = None
        self._reservation: Reservation | None = None
        # Of the latest decision: why the agents were not asked (empty if they were), rows of jobs, and their features.
        self._fallback = "no decision yet"
        self._rows: dict[str, int] = {}
        self._described = torch.empty(0, 0)
        self._token: Tensor | None = None

    def order(self, jobs: Sequence[Job], state: ClusterState) -> Sequence[float]:
        """Scores jobs, the lowest first; inf for those that the agents hold back."""
        if not jobs:
            return []
        described = self.features.describe(jobs, state)
        self._reservation = self._overdue(jobs, state)
        said = self._ask(jobs, described, state)
        scores: list[float]
        if said is None:
            scores = (4.0 * described[:, 0]).tolist()
        else:
            scores = (-said.logits).tolist()
            if state.running:  # else nothing would ever happen that could end the wait
                held = (said.logits < said.wait).tolist()
                scores = [math.inf if hold else score for hold, score in zip(held, scores, strict=True)]
        if self._reservation is not None:
            first = self._reservation.job.id
            scores = [_FIRST if job.id == first else score for job, score in zip(jobs, scores, strict=True)]
        return scores

    def place(self, job: Job, state: ClusterState) -> Placement | None:
        """Chooses machines, one after another; the placement carries the speed expected there and its sd."""
        among = ANY_MACHINE if self._reservation is None else self._reservation.open_to(job)
        advantage = self._advantage_for(state)
        row = self._rows.get(job.id)
        if self._token is None or row is None or not self._placement_learned:
            return self._by_advantage(advantage, job, state, among)
        shape = packed(job, state, among)
        if shape is None:
            return None
        seen, token = self._described[row], self._token
        try:
            chosen = advantage.choose(
                job, state, shape, among, lambda features: self._choose(job, features, seen, token)
            )
        except (RuntimeError, ValueError) as error:
            self._blame(f"the placement agent failed: {error}")
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
        service_h = math.exp(self.features.log_service(job)) / 3600
        what = f"forecast {service_h:.2g} GPU-hours, waiting for {(state.now_s - job.submit_s) / 3600:.2g} h"
        reservation = self._reservation
        if reservation is not None and reservation.job.id == job.id:
            patience = f"{self._patience_s / 3600:.3g} h"
            return f"first, for having waited longer than {patience} ({what}); {reservation.words(state)}"
        how = f"qssf: {self._fallback}" if self._fallback else "the agents"
        return f"{what}; order by {how}"

    def _overdue(self, jobs: Sequence[Job], state: ClusterState) -> Reservation | None:
        late = [job for job in jobs if state.now_s - job.submit_s > self._patience_s]
        if not late:
            return None
        first = min(late, key=lambda job: (job.submit_s, job.id))
        kept = self._reservation
        if kept is not None and kept.job.id == first.id and kept.holds(state):
            return kept
        return Reservation.choose(first, state, self.forecast_s)

    def _ask(self, jobs: Sequence[Job], described: np.ndarray, state: ClusterState) -> Ordered | None:
        """Asks the ordering agent, unless that is of no use or not to be trusted."""
        self._rows, self._token = {}, None
        if not self._order_learned and not self._placement_learned:
            self._fallback = "the agents are switched off"
            return None
        if not _any_fits(jobs, state):
            self._fallback = "nothing fits, so the agents were not asked"
            return None
        if self._s_per_job * len(jobs) > self._budget_s:
            self._s_per_job *= 0.9  # so that they are tried again
            self._blame(f"{len(jobs)} jobs would take longer than {self._budget_s:g} s")
            return None
        begin_s = self._clock()
        seen, cluster = torch.from_numpy(described), torch.from_numpy(describe_cluster(jobs, described, state))
        with torch.no_grad():
            distance = float(self.agents.distance(cluster))
            limit = self._strange * float(self.agents.seen_limit)
            if not distance <= limit:
                self._blame(f"far from training (distance {distance:.3g}, trusted up to {limit:.3g})")
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
        self._fallback = "" if self._order_learned else "the ordering agent is switched off"
        self._rows = {job.id: row for row, job in enumerate(jobs)}
        self._described, self._token = seen, said.token
        if not self._order_learned:
            return None
        return self._chooser.order(jobs, (seen, cluster), said, state)

    def _blame(self, reason: str) -> None:
        """Notes that the agents are not to be trusted now; told once in a row of such decisions."""
        self.num_fallbacks += 1
        self._fallback = reason
        self._token = None
        if not self._distrusted:
            _LOG.warning("falling back to qssf: %s", reason)
        self._distrusted = True

    def _choose(self, job: Job, features: np.ndarray, seen: Tensor, token: Tensor) -> int:
        machines = torch.from_numpy(features)
        with torch.no_grad():
            logits = self.agents.placement(machines, seen, token)
        if not torch.isfinite(logits).all():
            raise ValueError("its scores are not finite")
        return self._chooser.place(job, (machines, seen), logits)

    def _by_advantage(self, advantage: Advantage, job: Job, state: ClusterState, among: int) -> Placement | None:
        try:
            return advantage(job, state, among)
        except (RuntimeError, ValueError, ArithmeticError) as error:  # of the linear algebra in the speed model
            self._blame(f"the speed model failed: {error}")
            return packed(job, state, among)

    def _advantage_for(self, state: ClusterState) -> Advantage:
        if self._advantage is None:
            self._advantage = self._placing(state.cluster)
        return self._advantage


def _any_fits(jobs: Sequence[Job], state: ClusterState) -> bool:
    if not state.num_free:
        return False
    tried: set[Shape] = set()
    for job in jobs:
        if job.shape not in tried:
            tried.add(job.shape)
            if packed(job, state) is not None:
                return True
    return False
