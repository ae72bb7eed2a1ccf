"""Reported programs: gloo hangs on them, fails or gives wrong values; dfccl ends with the right ones."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import torchext  # noqa: F401  registers the backend
from tests.collectives.programs import FINE_ON_GLOO, PROGRAMS
from tests.ranks import Rank, run_ranks, start_ranks


def attempt(rank: Rank, name: str) -> bool:
    """Whether the program gave the right values on gloo; it may also raise, hang or die."""
    rank.announce("running")
    got, expected = PROGRAMS[name][0](rank.rank, "gloo")
    return all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))


def run_all(rank: Rank) -> list[str]:
    """Runs those of this world size one after the other; returns the names of those that gave wrong values."""
    wrong = []
    for name, (program, world_size) in PROGRAMS.items():
        if world_size == rank.world_size:
            got, expected = program(rank.rank, "dfccl")
            if not all(torch.equal(g, e) for g, e in zip(got, expected, strict=True)):
                wrong.append(name)
    assert dist.group.WORLD.stats()["queue_depth"] == 0  # type: ignore[union-attr]
    return wrong


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in FINE_ON_GLOO])
def test_gloo_does_not_give_the_right_values(name: str) -> None:
    world_size = PROGRAMS[name][1]
    with start_ranks(attempt, world_size, name, backend="gloo", deadline_s=60) as ranks:
        for rank in range(world_size):
            ranks.wait_for(rank, "running")
        outcomes = ranks.wait(timeout_s=4)  # a thousand times what it takes where it works
    assert not all(outcome.kind == "returned" and outcome.value for outcome in outcomes)


@pytest.mark.parametrize("world_size", sorted({world_size for _, world_size in PROGRAMS.values()}))
def test_dfccl_gives_the_right_values(world_size: int) -> None:
    assert run_ranks(run_all, world_size, backend="dfccl", deadline_s=60) == [[]] * world_size
