"""What training makes small, for many decisions at a time.

Shapes: B decisions, Q jobs waiting at most, N machines to choose from at most, O choices of a job, P of a machine, H of
whether to wait. Shorter ones are padded, and masks say with what.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from torchext.scheduling.dual.networks import Agents, Ordered
from torchext.scheduling.dual.rollout import Decision


@dataclass
class Learned:
    """A decision with what it was worth.

    Args:
        decision: As noted.
        advantage: How much better than expected it went.
        target: What the critic should have said.
    """

    decision: Decision
    advantage: float
    target: float


def losses_of(agents: Agents, entries: Sequence[Learned], advantages: np.ndarray, clip: float) -> dict[str, Tensor]:
    """Computes the mean losses of some decisions, scalars.

    They are each agent's clipped objective (the placement agent has two kinds of choices), the errors of the critic and
    of the forecast, and the entropy. The forecast's is Huber's, of logs, so it is least near the typical running time,
    which the heuristic orders by. All choices of one kind of a decision count as much as one.

    Args:
        agents: As they are now.
        entries: B decisions.
        advantages: (B,), in sds.
        clip: Of the ratio of probabilities.
    """
    decisions = [entry.decision for entry in entries]
    jobs, present = _padded([decision.jobs for decision in decisions])
    said = agents.ordering(jobs, torch.stack([decision.cluster for decision in decisions]), present=present)
    worth = torch.tensor(advantages, dtype=torch.float32)
    order_loss, order_entropy, order_clipped = _orders(said, decisions, present, worth, clip)
    hold_loss, hold_entropy, hold_clipped = _holds(agents, said, decisions, worth, clip)
    truth, _ = _padded([decision.truth[:, None] for decision in decisions])
    surprise = functional.smooth_l1_loss(said.forecast, truth[..., 0], reduction="none").masked_fill(~present, 0.0)
    targets = torch.tensor([entry.target for entry in entries], dtype=torch.float32)
    return {
        "order_loss": order_loss,
        "place_loss": _places(agents, said, decisions, worth, clip),
        "hold_loss": hold_loss,
        "forecast_loss": (surprise.sum(1) / present.sum(1)).mean(),
        "value_loss": functional.smooth_l1_loss(said.value, targets),
        "entropy": order_entropy + hold_entropy,
        "clipped": (order_clipped + hold_clipped) / 2,
    }


def _orders(
    said: Ordered, decisions: Sequence[Decision], present: Tensor, worth: Tensor, clip: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, entropy and share clipped, of the choices of jobs."""
    of = torch.tensor([b for b, decision in enumerate(decisions) for _ in decision.orders])
    if not len(of):
        return (said.value.new_zeros(()),) * 3
    most = present.shape[1]
    every = torch.cat([said.logits, said.wait[:, None]], dim=1)[of]  # (O, Q + 1), to wait is last
    allowed = torch.zeros(len(of), most + 1, dtype=torch.bool)
    chosen, log_then = [], []
    for row, (may, choice, log_p) in enumerate(order for decision in decisions for order in decision.orders):
        num = len(may) - 1
        allowed[row, :num], allowed[row, -1] = may[:-1], may[-1]
        chosen.append(most if choice == num else choice)
        log_then.append(log_p)
    log_now = torch.log_softmax(every.masked_fill(~allowed, -math.inf), dim=1)
    taken = log_now[torch.arange(len(of)), torch.tensor(chosen)]
    entropy = -(log_now.exp() * log_now.masked_fill(~allowed, 0.0)).sum(1)
    loss, clipped = _clipped(taken, torch.tensor(log_then), worth[of], clip)
    return _mean(loss, of, len(decisions)), _mean(entropy, of, len(decisions)), _mean(clipped, of, len(decisions))


def _places(agents: Agents, said: Ordered, decisions: Sequence[Decision], worth: Tensor, clip: float) -> Tensor:
    """Loss of the choices of machines."""
    choices = [choice for decision in decisions for choice in decision.places]
    if not choices:
        return said.value.new_zeros(())
    of = torch.tensor([b for b, decision in enumerate(decisions) for _ in decision.places])
    machines, present = _padded([choice.machines for choice in choices])
    logits = agents.placement(machines, torch.stack([choice.job for choice in choices]), said.token[of], present)
    chosen = torch.tensor([choice.chosen for choice in choices])
    taken = torch.log_softmax(logits, dim=1)[torch.arange(len(of)), chosen]
    loss, _ = _clipped(taken, torch.tensor([choice.log_p for choice in choices]), worth[of], clip)
    return _mean(loss, of, len(decisions))


def _holds(
    agents: Agents, said: Ordered, decisions: Sequence[Decision], worth: Tensor, clip: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, entropy and share clipped, of the choices to wait."""
    holds = [hold for decision in decisions for hold in decision.holds]
    if not holds:
        return (said.value.new_zeros(()),) * 3
    of = torch.tensor([b for b, decision in enumerate(decisions) for _ in decision.holds])
    features, jobs = torch.stack([hold.features for hold in holds]), torch.stack([hold.job for hold in holds])
    logits = agents.placement.decline(features, jobs, said.token[of])
    declined = torch.tensor([hold.declined for hold in holds])
    taken = functional.logsigmoid(torch.where(declined, logits, -logits))
    entropy = functional.softplus(logits) - torch.sigmoid(logits) * logits
    loss, clipped = _clipped(taken, torch.tensor([hold.log_p for hold in holds]), worth[of], clip)
    return _mean(loss, of, len(decisions)), _mean(entropy, of, len(decisions)), _mean(clipped, of, len(decisions))


def _clipped(log_now: Tensor, log_then: Tensor, worth: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """PPO's loss of each choice, and 1 where its clip bites."""
    ratio = torch.exp(log_now - log_then)
    bounded = ratio.clamp(1 - clip, 1 + clip)
    return -torch.minimum(ratio * worth, bounded * worth), (ratio.detach() != bounded.detach()).to(ratio.dtype)


def _mean(values: Tensor, of: Tensor, num: int) -> Tensor:
    """Mean over decisions of the mean over each one's choices; 0 for those without."""
    count = torch.bincount(of, minlength=num).to(values.dtype)
    mean: Tensor = (values / count[of]).sum() / num
    return mean


def _padded(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Puts matrices of differing numbers of rows, (n_i, F), into one, (B, n, F), and says which rows are theirs."""
    padded = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    lengths = torch.tensor([len(part) for part in rows])
    return padded, torch.arange(padded.shape[1]) < lengths[:, None]
