"""What makes no sense is refused before anything is sent, by its name, and harms nothing."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.collectives.test_faults import init
from tests.ranks import Rank, run_ranks
from torchext.collectives import CollectiveError, Options, mesh, trace, world, wrap


def refuse(rank: Rank) -> None:
    with pytest.raises(RuntimeError, match='this process is in no "dfccl" group'), trace("never.json"):
        pass
    with pytest.raises(TypeError, match=r"takes torchext.collectives.Options as pg_options, got 7"):
        dist.init_process_group("dfccl", store=rank.store, rank=rank.rank, world_size=2, pg_options=7)
    init(rank, prefix="good")
    group: Any = dist.group.WORLD
    other = 1 - rank.rank
    pair, doubles = [torch.ones(2), torch.ones(2)], [torch.ones(2, dtype=torch.float64)] * 2
    with pytest.raises(ValueError, match="'avg' is not defined"):
        dist.all_reduce(torch.ones(3, dtype=torch.bool), dist.ReduceOp.AVG)
    with pytest.raises(ValueError, match="'band' is not defined"):
        dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND)
    with pytest.raises(ValueError, match="can be summed and averaged only"):
        group.reduce(torch.ones(3, dtype=torch.complex64), op=dist.ReduceOp.PRODUCT, root=0)
    with pytest.raises(ValueError, match="add up to its first dimension"):
        dist.all_to_all_single(torch.empty(4), torch.empty(4), [1, 1], [2, 2])
    with pytest.raises(ValueError, match=r"does not divide into 2 equal parts; give its split sizes"):
        dist.all_to_all_single(torch.empty(3), torch.empty(3), [1, 2])
    with pytest.raises(ValueError, match="2 times"):
        dist.all_gather_into_tensor(torch.empty(5), torch.empty(2))
    with pytest.raises(ValueError, match="expected 2 output tensors, one for each member, got 1"):
        group.allgather([pair[:1]], [torch.ones(2)])
    with pytest.raises(ValueError, match=r"expected 2 input and output tensors, .* got 1 and 2"):
        group.alltoall(pair, pair[:1])
    with pytest.raises(ValueError, match="each part of the input must be as large as the output"):
        group.reduce_scatter([torch.empty(3)], [pair])
    with pytest.raises(TypeError, match=r"must have one dtype, got torch.float32 and torch.float64"):
        group.allgather([doubles], [torch.ones(2)])
    with pytest.raises(CollectiveError, match="CPU tensors"):
        dist.all_reduce(torch.empty(3, device="meta"))
    with pytest.raises(ValueError, match="cannot send to itself"):
        group.send([torch.ones(2)], rank.rank)
    with pytest.raises(ValueError, match="options of a group within a dfccl group are those of the outer one"):
        dist.new_group([0, 1], pg_options=Options(patience=7))
    alone = group.split_group([rank.rank])
    with pytest.raises(ValueError, match="there is no other rank in the group to receive from"):
        alone.recv_anysource([torch.ones(2)])
    with pytest.raises(ValueError, match="wrap: this rank is not a member"):
        wrap(dist.GroupMember.NON_GROUP_MEMBER)  # type: ignore[arg-type]
    works = [dist.isend(torch.ones(2), other), dist.irecv(pair[0], other)]  # and none of it has harmed the group
    for work in works:
        work.wait()
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x[0] == 2
    dist.destroy_process_group()
    world._host = lambda: f"host {rank.rank}"
    with pytest.raises(CollectiveError, match=r"does not share a host \(or container\) with the first rank"):
        dist.init_process_group(
            "dfccl",
            store=dist.PrefixStore("far", rank.store),
            rank=rank.rank,
            world_size=2,
            timeout=timedelta(seconds=30),
            pg_options=Options(engine="preemptive"),
        )


def test_what_makes_no_sense_is_refused_before_anything_is_sent() -> None:
    run_ranks(refuse, 2, store="tcp")


def test_an_interface_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(CollectiveError, match="GLOO_SOCKET_IFNAME: 'nowhere0' has no IPv4 address"):
        mesh._own_address(dist.HashStore())
