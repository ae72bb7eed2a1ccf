"""Threads that wait for the future of a collective in C++, as DDP does in its backward pass."""

from __future__ import annotations

import signal
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import Rank, start_ranks
from torchext.collectives import without_collectives


def step(model: DistributedDataParallel) -> None:
    model(torch.ones(3, 50)).sum().backward()


def made() -> DistributedDataParallel:
    for thread in threading.enumerate():
        if thread.name == "rank-link":
            without_collectives(thread)  # the harness's
    return DistributedDataParallel(torch.nn.Linear(50, 50))


def dies_in_training(rank: Rank) -> str:
    model = made()
    step(model)
    if rank.rank == 1:
        rank.announce("stepped")
        rank.wait_for("never", 60)
    rank.announce("stepped")
    try:
        step(model)
    except RuntimeError as error:
        return str(error)
    raise AssertionError("no error")


def test_a_killed_peer_of_ddp_is_an_error_in_backward_that_names_it() -> None:
    with start_ranks(dies_in_training, 2, backend="dfccl") as ranks:
        for rank in range(2):
            ranks.wait_for(rank, "stepped")
        ranks.kill(1, signal.SIGKILL)
        outcomes = ranks.wait()
    assert outcomes[0].kind == "returned", str(outcomes[0])
    assert "PeerLostError" in outcomes[0].value
    assert "rank 1 died" in outcomes[0].value


def skewed(rank: Rank) -> bool:
    model = made()
    step(model)
    rank.announce("running")
    for number in range(4):
        if number % 2 == rank.rank:
            threading.Event().wait(0.8)  # one is slower than the other
        step(model)
        rank.announce(f"step {number}")
    stats: Any = dist.group.WORLD
    return bool(stats.stats()["deadlocks"] == 0)


def test_a_slow_or_stopped_rank_of_ddp_is_no_deadlock() -> None:
    with start_ranks(skewed, 2, backend="dfccl") as ranks:
        ranks.wait_for(1, "running")
        ranks.kill(1, signal.SIGSTOP)
        threading.Event().wait(1.0)
        ranks.kill(1, signal.SIGCONT)
        assert ranks.values() == [True, True]
