"""The two agents: which waiting job next, and on which machine; and the critic they share.

Ordering is squeeze-and-communicate: learned queries pool any number of waiting jobs into a few slots (squeeze), slots
attend to each other and to a token that stands for the cluster (communicate), and each job reads the slots back. The
cost is O(Q K) for Q jobs and K slots, and the order of the jobs given does not matter.

Both agents add what they have learned to a heuristic's score, and have learned nothing at first: an untrained pair *is*
shortest forecast service first with comparative advantage, which is what imitating them perfectly would give. The
forecast, too, is corrected by what is learned of true running times.

Source: after the abstract of "A Dual-Agent Scheduler for Distributed Deep Learning Jobs on Public Cloud via
Reinforcement Learning" (KDD 2023); pooling by learned queries as in Lee et al., "Set Transformer" (ICML 2019),
section 3.2.

Shapes: Q jobs, K slots, D width, M machines, T tokens (K slots and the cluster), F features.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchext.scheduling.dual.features import CLUSTER_FEATURES, JOB_FEATURES

# Of a machine, for the job at hand.
MACHINE_FEATURES = (
    "value to the heuristic",
    "expected log speed",
    "its standard deviation",
    "typical log speed",
    "share of its GPUs free",
    "share left free afterwards",
    "loss to neighbours, at most",
    "price, relative to the mean",
)
# Of the choice to leave a job waiting although it would fit.
HOLD_FEATURES = (
    "how far the heuristic is for it",
    "log speed lost by starting now",
    "log of the time that this would cost, in hours",
    "log of the time waited, in hours",
)
# The heuristic's scores are scaled by these at first: how sure the choice is when sampling.
_ORDER_SCALE, _PLACE_SCALE, _HOLD_SCALE = 4.0, 20.0, 4.0
# The wait action starts this far below the last job.
_WAIT_BELOW = 6.0


class Ordered(NamedTuple):
    """What the ordering agent says.

    Args:
        logits: (Q,) of the jobs; the highest is served first.
        forecast: (Q,) log hours of running time at speed 1, that the order is made by.
        wait: Scalar; jobs below it are held back.
        token: (D,), the cluster as the agents see it, for the placement agent.
        value: Scalar, what the critic expects.
    """

    logits: Tensor
    forecast: Tensor
    wait: Tensor
    token: Tensor
    value: Tensor


class _Attention(nn.Module):
    """Rows of one matrix look at the rows of another, of those present: (..., A, D), (..., B, D) -> (..., A, D).

    One head.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ask = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.say = nn.Linear(width, width, bias=False)

    def forward(self, asking: Tensor, told: Tensor, present: Tensor | None = None) -> Tensor:
        # The shorter matrix goes through most of the products, and sums of weights run along the longer one: softmax is
        # several times slower along a dimension of a few.
        scale = 1 / math.sqrt(asking.shape[-1])
        if asking.shape[-2] < told.shape[-2]:
            weights = (scale * self.ask(asking) @ self.key.weight) @ told.transpose(-1, -2)  # (..., A, B)
            if present is not None:
                weights = weights.masked_fill(~present[..., None, :], -math.inf)
            said: Tensor = self.say(torch.softmax(weights, dim=-1) @ told)
        else:
            weights = (scale * self.key(told) @ self.ask.weight) @ asking.transpose(-1, -2)  # (..., B, A)
            if present is not None:
                weights = weights.masked_fill(~present[..., None], -math.inf)
            said = torch.softmax(weights, dim=-2).transpose(-1, -2) @ self.say(told)
        return said


class OrderingAgent(nn.Module):
    """Scores waiting jobs, all of them against each other.

    Args:
        width: D.
        num_slots: K.
    """

    def __init__(self, width: int = 32, num_slots: int = 8) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(len(JOB_FEATURES), width), nn.GELU(), nn.Linear(width, width))
        self.embed_cluster = nn.Sequential(nn.Linear(len(CLUSTER_FEATURES), width), nn.GELU(), nn.Linear(width, width))
        self.slots = nn.Parameter(torch.randn(num_slots, width) / math.sqrt(width))
        self.squeeze = _Attention(width)
        self.communicate = _Attention(width)
        self.think = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.read = _Attention(width)
        self.foretell = nn.Sequential(nn.LayerNorm(2 * width), nn.Linear(2 * width, width), nn.GELU(), _zero(width))
        self.score = nn.Sequential(nn.LayerNorm(2 * width), nn.Linear(2 * width, width), nn.GELU(), _zero(width))
        self.wait = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), _zero(width))
        self.critic = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), _zero(width))
        self.log_scale = nn.Parameter(torch.tensor(math.log(_ORDER_SCALE)))

    def forward(
        self, jobs: Tensor, cluster: Tensor, communicate: bool = True, present: Tensor | None = None
    ) -> Ordered:
        """Scores jobs, of one moment or of several.

        Args:
            jobs: (..., Q, F) float32, `JOB_FEATURES`; at least one.
            cluster: (..., F) float32, `CLUSTER_FEATURES`.
            communicate: False keeps jobs from knowing of each other, to measure what communication is worth.
            present: (..., Q) bool, which rows are jobs; None: all. At least one of each moment must be.
        """
        embedded = self.embed(jobs)
        token = self.embed_cluster(cluster)[..., None, :]
        squeezed = self.slots + self.squeeze(self.slots, embedded, present)
        tokens = torch.cat([squeezed, token], dim=-2)
        if communicate:
            tokens = tokens + self.communicate(tokens, tokens)
        else:
            tokens = torch.cat([torch.zeros_like(squeezed), token], dim=-2)
        tokens = tokens + self.think(tokens)
        known = torch.cat([embedded, self.read(embedded, tokens)], dim=-1)
        better = self.foretell(known)[..., 0]
        # What is foretold is learned from true running times, not from rewards; scores, from rewards alone.
        logits = -self.log_scale.exp() * (jobs[..., 0] + better.detach()) + self.score(known)[..., 0]
        last = tokens[..., -1, :]
        lowest = logits.detach() if present is None else logits.detach().masked_fill(~present, math.inf)
        wait = lowest.amin(-1) - _WAIT_BELOW + self.wait(last)[..., 0]
        return Ordered(logits, jobs[..., 1] + better, wait, last, self.critic(last)[..., 0])


class PlacementAgent(nn.Module):
    """Scores machines for one job; a gang's machines are chosen one after another, each knowing of those before.

    It may also decline, for better machines to come free.

    Args:
        width: D, as the ordering agent's.
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(len(MACHINE_FEATURES), width), nn.GELU())
        self.job = nn.Linear(len(JOB_FEATURES), width)
        self.token = nn.Linear(width, width)
        self.score = nn.Sequential(nn.GELU(), nn.Linear(width, width), nn.GELU(), _zero(width))
        self.log_scale = nn.Parameter(torch.tensor(math.log(_PLACE_SCALE)))
        self.embed_hold = nn.Sequential(nn.Linear(len(HOLD_FEATURES), width), nn.GELU())
        self.hold = nn.Sequential(nn.GELU(), nn.Linear(width, width), nn.GELU(), _zero(width))
        self.log_hold_scale = nn.Parameter(torch.tensor(math.log(_HOLD_SCALE)))

    def decline(self, hold: Tensor, job: Tensor, token: Tensor) -> Tensor:
        """Says whether a job that fits should wait nevertheless.

        Args:
            hold: (..., F) float32, `HOLD_FEATURES`.
            job: (..., F) float32.
            token: (..., D), the ordering agent's view of the cluster.

        Returns:
            (...) logits; above 0 it waits.
        """
        around = self.embed_hold(hold) + self.job(job) + self.token(token)
        logit: Tensor = self.log_hold_scale.exp() * hold[..., 0] + self.hold(around)[..., 0]
        return logit

    def forward(self, machines: Tensor, job: Tensor, token: Tensor, present: Tensor | None = None) -> Tensor:
        """Scores machines that could take the job's next part.

        Args:
            machines: (..., M, F) float32, `MACHINE_FEATURES`, of the candidates.
            job: (..., F) float32.
            token: (..., D), the ordering agent's view of the cluster.
            present: (..., M) bool, which rows are candidates; None: all.

        Returns:
            (..., M) logits; -inf where there is no candidate.
        """
        embedded = self.embed(machines)
        if present is None:
            mean = embedded.mean(-2)
        else:
            mean = (embedded * present[..., None]).sum(-2) / present.sum(-1, keepdim=True)
        around = mean + self.job(job) + self.token(token)
        scores: Tensor = self.log_scale.exp() * machines[..., 0] + self.score(embedded + around[..., None, :])[..., 0]
        return scores if present is None else scores.masked_fill(~present, -math.inf)


class Agents(nn.Module):
    """Both agents, and what the training has seen of clusters, by which strange ones are told.

    Attributes:
        seen_mean: (F,) mean of the cluster's features in training.
        seen_sd: (F,) their sd.
        seen_limit: Scalar, the distance (see `distance`) that one training decision in a thousand exceeded.
    """

    def __init__(self, width: int = 32, num_slots: int = 8) -> None:
        super().__init__()
        self.ordering = OrderingAgent(width, num_slots)
        self.placement = PlacementAgent(width)
        self.register_buffer("seen_mean", torch.zeros(len(CLUSTER_FEATURES)))
        self.register_buffer("seen_sd", torch.ones(len(CLUSTER_FEATURES)))
        self.register_buffer("seen_limit", torch.tensor(math.inf))
        self.seen_mean: Tensor
        self.seen_sd: Tensor
        self.seen_limit: Tensor

    def distance(self, cluster: Tensor) -> Tensor:
        """Root mean square of the cluster's features, each in sds from its mean in training; (..., F) -> (...)."""
        return ((cluster - self.seen_mean) / self.seen_sd).square().mean(-1).sqrt()

    @torch.no_grad()
    def remember(self, clusters: Tensor) -> None:
        """Takes down what training looks like, (N, F)."""
        self.seen_mean.copy_(clusters.mean(0))
        # A feature that never changed must not make the slightest change of it strange.
        self.seen_sd.copy_(clusters.std(0, correction=0).clamp_min(0.05))
        self.seen_limit.copy_(torch.quantile(self.distance(clusters), 0.999))


def _zero(width: int) -> nn.Linear:
    """A last layer that says nothing at first."""
    layer = nn.Linear(width, 1)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def log_choice(logits: Tensor, allowed: Tensor, chosen: int) -> Tensor:
    """Log probability of one choice among those allowed, (N,) and (N,) bool; scalar."""
    return functional.log_softmax(logits.masked_fill(~allowed, -math.inf), dim=0)[chosen]


def log_hold(logit: Tensor, declined: bool) -> Tensor:
    """Log probability of having a job wait, or of starting it; scalar."""
    return functional.logsigmoid(logit if declined else -logit)
