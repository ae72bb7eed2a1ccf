"""DDP on two ranks takes the step of one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import Rank, run_ranks
from torchext.losses import FreDFLoss

BASES = ["rfft", "dct", "pca"]
NUM_SAMPLES, HISTORY, HORIZON = 8, 5, 7


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    history = torch.randn(NUM_SAMPLES, 3, HISTORY, generator=generator, dtype=torch.float64)
    return history, torch.randn(NUM_SAMPLES, 3, HORIZON, generator=generator, dtype=torch.float64)


class Training(nn.Module):
    """A model that holds its loss, as Lightning modules do."""

    def __init__(self, basis: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = nn.Linear(HISTORY, HORIZON, dtype=torch.float64)
        self.criterion = FreDFLoss(basis=basis, dim=-1)
        if basis == "pca":
            self.criterion.fit(data()[1])

    def forward(self, history: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.criterion(self.model(history), target)
        return loss


def gradients(training: nn.Module, history: torch.Tensor, target: torch.Tensor) -> list[Any]:
    for _ in range(2):
        training.zero_grad()
        training(history, target).backward()
    return [p.grad.tolist() for p in training.parameters() if p.grad is not None]


def program(rank: Rank) -> dict[str, list[Any]]:
    history, target = data()
    mine = slice(rank.rank, None, rank.world_size)
    return {basis: gradients(DistributedDataParallel(Training(basis)), history[mine], target[mine]) for basis in BASES}


def test_two_ranks_have_the_gradient_of_one_process() -> None:
    ranks = run_ranks(program, 2, backend="gloo")
    for basis in BASES:
        for wanted, *got in zip(gradients(Training(basis), *data()), *(rank[basis] for rank in ranks), strict=True):
            for values in got:
                torch.testing.assert_close(torch.tensor(values), torch.tensor(wanted), msg=basis)
