"""Policies by name; those that learn are imported when they are asked for, as they need torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torchext.scheduling.placements import Rule
from torchext.scheduling.policies.easy_backfill import EasyBackfill
from torchext.scheduling.policies.fifo import FIFO
from torchext.scheduling.policies.fifo_firstfit import FIFOFirstFit
from torchext.scheduling.policies.gavel import Gavel
from torchext.scheduling.policies.las import LAS
from torchext.scheduling.policies.qssf import QSSF
from torchext.scheduling.policies.sjf import SJF
from torchext.scheduling.policies.srsf import SRSF
from torchext.scheduling.types import Policy, SchedulingError

__all__ = [
    "FIFO",
    "LAS",
    "LEARNED",
    "ORACLES",
    "POLICIES",
    "QSSF",
    "SJF",
    "SRSF",
    "EasyBackfill",
    "FIFOFirstFit",
    "Gavel",
    "make_policy",
]


def _machine_mean() -> Policy:
    from torchext.scheduling.dual.heuristic import SpeedLearner, by_machine_mean

    return SpeedLearner(by_machine_mean)


def _rwgp() -> Policy:
    from torchext.scheduling.dual.heuristic import SpeedLearner, by_rwgp

    return SpeedLearner(by_rwgp)


# Decide by what has been seen; can run a real queue.
POLICIES: Mapping[str, Callable[..., Policy]] = {
    "fifo": FIFO,
    "fifo-firstfit": FIFOFirstFit,
    "easy-backfill": EasyBackfill,
    "qssf": QSSF,
    "las": LAS,
    "gavel": Gavel,
    "machine-mean": _machine_mean,
    "rwgp": _rwgp,
}
# Decide by trained agents.
LEARNED = ("dual", "dual-preemptive")
# Choose machines by what they have learned, not by a rule.
_OWN_PLACEMENT = ("machine-mean", "rwgp", *LEARNED)
# Are told the true durations; for comparison only.
ORACLES: Mapping[str, Callable[..., Policy]] = {
    "sjf": SJF,
    "srsf": SRSF,
    "easy-oracle": EasyBackfill,
}


def make_policy(
    name: str,
    *,
    durations_s: Mapping[str, float] | None = None,
    placement: Rule | None = None,
    policy_file: str | Path | None = None,
    budget_s: float = 0.25,
) -> Policy:
    """Makes a new policy, which has seen no jobs yet.

    Args:
        name: One of `POLICIES` or `ORACLES`, ``dual``, or ``dual-preemptive``.
        durations_s: True duration of each job, by id; given to oracles only, who need it.
        placement: Where jobs go; None leaves it to the policy.
        policy_file: Trained agents, for the dual ones; None: those that come with torchext.
        budget_s: How long a decision of the dual ones may take before it falls back to qssf; inf makes it reproducible.

    Raises:
        SchedulingError: There is no such policy, it is an oracle and the durations are missing, or it learns where jobs
            go and a placement is given, or the trained agents cannot be used.
    """
    if placement is not None and name in _OWN_PLACEMENT:
        raise SchedulingError(f"policy {name!r} learns where jobs go; leave the placement out")
    if name in LEARNED:
        from torchext.scheduling.dual.policy import Dual, PreemptiveDual
        from torchext.scheduling.dual.policy_file import load_policy

        return (Dual if name == "dual" else PreemptiveDual)(load_policy(policy_file), budget_s=budget_s)
    options = {} if placement is None else {"placement": placement}
    if name in POLICIES:
        return POLICIES[name](**options)
    if name not in ORACLES:
        raise SchedulingError(f"there is no policy {name!r}; choose from {', '.join([*POLICIES, *LEARNED, *ORACLES])}")
    if durations_s is None:
        raise SchedulingError(f"policy {name!r} is told the true durations, so it works on recorded jobs only")
    return ORACLES[name](durations_s=durations_s, **options)
