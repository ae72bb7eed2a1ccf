"""Programs that the tests of the standby start: standbys, and trainings that can be killed anywhere."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parents[2]


def until(condition: Callable[[], bool], deadline_s: float = 60.0) -> None:
    """Waits for something that another thread or process does."""
    end = time.monotonic() + deadline_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s:g} s"
        pause.wait(0.002)


def start_standby(
    *options: str, listen: str = "127.0.0.1:0", before: Sequence[str] = ()
) -> tuple[subprocess.Popen[str], str]:
    """Starts ``torchext standby``, with words before its command, and returns once it listens."""
    process = subprocess.Popen(
        [*before, sys.executable, "-m", "torchext", "standby", "--listen", listen, *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    said = process.stdout.readline()
    if not said:
        raise RuntimeError(process.communicate()[1])
    return process, said.split()[-1]


class Net(torch.nn.Module):
    """Small, with what makes resuming hard: dropout, buffers, a parameter without gradients."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(32, width),
            torch.nn.BatchNorm1d(width),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(width, 32),
        )
        self.frozen = torch.nn.Parameter(torch.randn(32, 32), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) + x @ self.frozen


def build(seed: int = 0) -> tuple[Net, torch.optim.Optimizer]:
    """A model and its optimizer, and all generators seeded."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """One step on random data of all generators."""
    x = torch.randn(16, 32) * random.random() + float(np.random.rand())
    loss = (model(x) - x.flip(0)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def undisturbed(num_steps: int, seed: int = 0) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights of a run without a standby."""
    model, optimizer = build(seed)
    losses = [step(model, optimizer) for _ in range(num_steps)]
    return losses, model.state_dict()
