"""How long a rank polls before it sleeps depends on the cores that all ranks have, not on its own alone."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.ranks import Rank, run_ranks
from torchext.collectives import Options


def spin_limit(rank: Rank, cores: list[int]) -> int:
    """Binds the rank to its core before it joins the others."""
    os.sched_setaffinity(0, {cores[rank.rank]})
    dist.init_process_group(
        "dfccl",
        store=rank.store,
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=timedelta(seconds=60),
        pg_options=Options(engine="preemptive"),
    )
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [rank.world_size] * 3
    found: int = dist.group.WORLD.stats()["spin_limit"]  # type: ignore[union-attr]
    dist.destroy_process_group()
    return found


def test_ranks_that_are_bound_to_a_core_each_poll_longer_than_ranks_that_share_one() -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs two cores")
    apart = run_ranks(spin_limit, 2, cores[:2], store="tcp")
    together = run_ranks(spin_limit, 2, [cores[0]] * 2, store="tcp")
    assert len(set(apart)) == len(set(together)) == 1
    assert apart[0] > 10 * together[0]
