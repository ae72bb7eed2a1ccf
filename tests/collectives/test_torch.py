"""The backend in the hands of torch: DDP, object and functional collectives, coalescing, groups of all kinds."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

import torchext
from tests.ranks import Rank, run_ranks
from torchext.collectives import CollectiveTimeoutError, merge_traces, name_tensors, trace

Tensor = torch.Tensor


def train(group: Any, rank: int, *, find_unused: bool) -> list[Tensor]:
    """A few DDP steps; several buckets, so that they overlap with the backward pass."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict(
        {
            "a": torch.nn.Linear(64, 300),
            "b": torch.nn.Linear(300, 300),
            "unused": torch.nn.Linear(8, 8),
            "c": torch.nn.Linear(300, 4),
        }
    )
    if not find_unused:
        del model["unused"]

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: Tensor) -> Tensor:
            return self.layers["c"](torch.relu(self.layers["b"](torch.relu(self.layers["a"](x)))))

    net = DistributedDataParallel(
        Net(), process_group=group, find_unused_parameters=find_unused, bucket_cap_mb=0.05, broadcast_buffers=False
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(5):
        optimizer.zero_grad()
        net(torch.randn(16, 64, generator=generator)).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


def ddp(rank: Rank) -> None:
    gloo = dist.new_group(backend="gloo")
    for find_unused in (False, True):
        got = train(dist.group.WORLD, rank.rank, find_unused=find_unused)
        expected = train(gloo, rank.rank, find_unused=find_unused)
        for g, e in zip(got, expected, strict=True):
            torch.testing.assert_close(g, e, rtol=1e-6, atol=1e-7)
        hashes = [torch.empty_like(got[0]) for _ in range(rank.world_size)]
        dist.all_gather(hashes, got[0])
        assert all(torch.equal(h, got[0]) for h in hashes)  # and the same bits on each rank


@pytest.mark.filterwarnings("ignore:.*find_unused_parameters:UserWarning")
def test_ddp_trains_as_over_gloo() -> None:
    run_ranks(ddp, 2, backend="dfccl", deadline_s=200)


def objects(rank: Rank) -> None:
    me, world = rank.rank, rank.world_size
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, {"rank": me, "text": "x" * (10 + 1000 * me)})
    assert [(o["rank"], len(o["text"])) for o in gathered] == [(r, 10 + 1000 * r) for r in range(world)]
    shared: list[Any] = [("from", me), me]
    dist.broadcast_object_list(shared, src=1)
    assert shared == [("from", 1), 1]
    out: list[Any] = [None]
    dist.scatter_object_list(out, [f"for {r}" for r in range(world)] if me == 0 else None, src=0)
    assert out == [f"for {me}"]
    at_root: list[Any] | None = [None] * world if me == 0 else None
    dist.gather_object(me, at_root, dst=0)
    assert at_root == (list(range(world)) if me == 0 else None)


def coalesced(rank: Rank) -> None:
    xs = [torch.full((n,), float(rank.rank)) for n in (3, 70_000)]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for x in xs:
            dist.all_reduce(x)
    manager.wait()
    assert all(bool((x == 1).all()) for x in xs)
    outs = [torch.empty(2 * n) for n in (3, 70_000)]
    with dist.distributed_c10d._coalescing_manager(device=torch.device("cpu")):
        for out, x in zip(outs, xs, strict=True):
            dist.all_gather_into_tensor(out, x + rank.rank)
        dist.broadcast(xs[0], 1)
    for out in outs:
        assert torch.equal(out, torch.cat([torch.full((len(out) // 2,), 1.0 + r) for r in range(2)]))
    lists = [[torch.empty(n) for n in (3, 5)] for _ in range(2)]  # of each rank, its two tensors
    group: Any = dist.group.WORLD
    group.allgather_coalesced(lists, [torch.full((n,), float(n + rank.rank)) for n in (3, 5)]).wait()
    assert [[float(t[-1]) for t in tensors] for tensors in lists] == [[3.0, 5.0], [4.0, 6.0]]


def batches(rank: Rank) -> None:
    other = 1 - rank.rank
    xs = [torch.full((n,), float(rank.rank)) for n in (5, 100_000)]
    ys = [torch.empty_like(x) for x in xs]
    operations = [dist.P2POp(dist.isend, x, other) for x in xs] + [dist.P2POp(dist.irecv, y, other) for y in ys]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert all(bool((y == other).all()) for y in ys)


def not_contiguous(rank: Rank) -> None:
    for n in (4, 300):
        base = torch.arange(float(n * n)).reshape(n, n) + rank.rank
        x = base.clone().t()
        dist.all_reduce(x)
        assert torch.equal(x, 2 * base.t() - 2 * rank.rank + 1)
        x = base.clone().t()
        work = dist.all_reduce(x, async_op=True)
        (value,) = work.get_future().wait()
        assert value is x
        assert torch.equal(x, 2 * base.t() - 2 * rank.rank + 1)
        columns = base.clone()
        dist.broadcast(columns[:, 1], 0)
        assert torch.equal(columns[:, 1], base[:, 1] - rank.rank)
        assert torch.equal(columns[:, 0], base[:, 0])
        outs = list(torch.empty(n, 2).unbind(1))
        dist.all_gather(outs, base[:, 2])
        assert torch.equal(torch.stack(outs, 1), torch.stack([base[:, 2] - rank.rank + r for r in range(2)], 1))


def futures(rank: Rank) -> None:
    x = torch.full((100_000,), float(rank.rank))
    work = dist.all_reduce(x, async_op=True)
    doubled = work.get_future().then(lambda f: 2 * f.value()[0])
    assert bool((doubled.wait() == 2).all())
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    # The handle may be dropped at once; the tensor stays until the engine is done with it.
    for _ in range(10):
        dist.all_reduce(torch.ones(50_000), async_op=True)
    dist.barrier()


def from_cpp(rank: Rank) -> None:
    x = functional.all_reduce(torch.full((7,), float(rank.rank)), "sum", dist.group.WORLD)
    assert torch.equal(torch.as_tensor(x), torch.ones(7))
    x = functional.all_gather_tensor(torch.full((7,), float(rank.rank)), 0, dist.group.WORLD)
    assert torch.equal(torch.as_tensor(x), torch.cat([torch.zeros(7), torch.ones(7)]))
    x = functional.reduce_scatter_tensor(torch.ones(8), "avg", 0, dist.group.WORLD)
    assert torch.equal(torch.as_tensor(x), torch.ones(4))
    x = functional.all_to_all_single(torch.arange(4.0) + 10 * rank.rank, [2, 2], [2, 2], dist.group.WORLD)
    assert torch.equal(torch.as_tensor(x), torch.tensor([0.0, 1, 10, 11]) + 2 * rank.rank)


def attributes(rank: Rank) -> None:
    group = dist.new_group([1, 0], group_desc="pair", timeout=timedelta(seconds=1))
    assert group.name() == "dfccl"
    assert group.group_desc == "pair"
    assert dist.get_rank(group) == rank.rank
    assert dist.get_process_group_ranks(group) == [0, 1]
    dist.barrier(group, timeout=timedelta(seconds=30))
    if rank.rank == 0:  # calls that the other never makes
        with pytest.raises(CollectiveTimeoutError, match=r"\(pair\).*timeout 1 s"):
            dist.all_reduce(torch.ones(1), group=group)
        work = dist.all_reduce(torch.ones(1), async_op=True)
        with pytest.raises(CollectiveTimeoutError, match="wait"):
            work.wait(timedelta(seconds=0.2))
        with pytest.raises(CollectiveTimeoutError, match=r"timeout 0.3 s"):
            dist.barrier(timeout=timedelta(seconds=0.3))
        with pytest.raises(CollectiveTimeoutError, match=r"barrier .*rank 1 has not joined.*") as caught:
            dist.group.WORLD.monitored_barrier(timedelta(seconds=0.2))  # type: ignore[union-attr]
        assert caught.value.ranks == (1,)
    dist.all_reduce(torch.ones(3))
    stats = dist.group.WORLD.stats()  # type: ignore[union-attr]
    assert stats["issued"] == stats["completed"] + stats["failed"]


def from_any_source(rank: Rank) -> None:
    for n in (4, 200_000):
        if rank.rank == 0:
            x = torch.empty(2, n).t()[:, 0]  # not contiguous
            assert dist.recv(x) == 1  # before, while or after it is sent
            assert torch.equal(x, torch.full((n,), 1.0))
            works = [dist.irecv(y := torch.empty(n), tag=3), dist.irecv(z := torch.empty(n))]
            dist.barrier()
            for work in works:
                work.wait()
            assert (y[0], z[0]) == (3.0, 2.0)  # told apart by tag
        else:
            dist.send(torch.full((n,), 1.0), 0)
            dist.barrier()
            for work in [dist.isend(torch.full((n,), 2.0), 0), dist.isend(torch.full((n,), 3.0), 0, tag=3)]:
                work.wait()


def premultiplied(rank: Rank) -> None:
    for n in (5, 70_000):
        half = dist._make_nccl_premul_sum(0.5)
        x = torch.full((n,), 2.0 + rank.rank)
        dist.all_reduce(x, half)
        assert torch.equal(x, torch.full((n,), 2.5))
        x = torch.full((n,), 2.0 + rank.rank)
        dist.all_reduce(x, dist._make_nccl_premul_sum(torch.tensor([1.0 + rank.rank])), async_op=True).wait()
        assert torch.equal(x, torch.full((n,), 8.0))  # each rank has its own factor: 1 * 2 + 2 * 3
        out = torch.empty(n)
        dist.reduce_scatter(out, [torch.full((n,), 4.0), torch.full((n,), 8.0)], half)
        assert torch.equal(out, torch.full((n,), 4.0 + 4 * rank.rank))
    with pytest.raises(ValueError, match="floating-point"):
        dist.all_reduce(torch.ones(2, dtype=torch.int64), half)


def split(rank: Rank) -> None:
    group = dist.group.WORLD.split_group([1, 0], group_desc="turned")  # type: ignore[union-attr]
    assert group.rank() == 1 - rank.rank
    x = torch.full((3,), float(rank.rank))
    group.broadcast([x], root=0).wait()
    assert x[0] == 1
    alone = dist.group.WORLD.split_group([1])  # type: ignore[union-attr]
    assert (alone is None) == (rank.rank == 0)
    with pytest.raises(RuntimeError, match="split"):  # torch refuses CPU groups before it asks
        dist.split_group(split_ranks=[[0, 1]])


def named(rank: Rank) -> None:
    """Hooks fire in another order on each rank; the names of gradients of one shape keep them apart."""
    torch.manual_seed(0)
    model = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(3))
    name_tensors(model)
    works = []

    def reduce(parameter: Tensor) -> None:
        works.append(dist.all_reduce(parameter.grad, async_op=True))

    for layer in model:
        layer.weight.register_post_accumulate_grad_hook(reduce)
    x = torch.ones(1, 4)
    order = [0, 1, 2] if rank.rank == 0 else [1, 2, 0]
    for i in order:  # backward of one branch after the other
        (model[i](x).sum() * (i + 1) * (rank.rank + 1)).backward()
    for work in works:
        work.wait()
    for i, layer in enumerate(model):
        assert torch.equal(layer.weight.grad, torch.full((4, 4), 3.0 * (i + 1)))


PROGRAMS: list[Callable[[Rank], None]] = [
    objects,
    coalesced,
    batches,
    not_contiguous,
    futures,
    from_cpp,
    from_any_source,
    premultiplied,
    split,
    named,
]


def run_programs(rank: Rank, backend: str) -> None:
    timeout = timedelta(seconds=30)
    dist.init_process_group(backend, store=rank.store, rank=rank.rank, world_size=2, timeout=timeout)
    for program in PROGRAMS:
        program(rank)
        dist.barrier()
    attributes(rank)
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["dfccl", "cpu:dfccl"])
def test_torch_uses_it_as_any_backend(backend: str) -> None:
    run_ranks(run_programs, 2, backend, store="tcp", deadline_s=200)


def beside_gloo(rank: Rank) -> None:
    groups = [dist.new_group(ranks, backend="dfccl") for ranks in ([0, 1], [1, 2], [0, 1, 2])]
    for group, ranks in zip(groups, ([0, 1], [1, 2], [0, 1, 2]), strict=True):
        if rank.rank in ranks:
            x = torch.full((50_000,), float(rank.rank))
            dist.all_reduce(x, group=group)
            assert x[0] == sum(ranks)
    for group in groups:
        dist.destroy_process_group(group)


def test_groups_beside_a_default_group_of_another_backend() -> None:
    run_ranks(beside_gloo, 3, backend="gloo", deadline_s=60)


def all_to_one(rank: Rank) -> set[int]:
    senders = set()
    if rank.rank == 0:
        for _ in range(2):
            x = torch.empty(3)
            senders.add(dist.recv(x))
            assert int(x[0]) in senders
    else:
        dist.send(torch.full((3,), float(rank.rank)), 0)
    return senders


@pytest.mark.parametrize("engine", ["preemptive", "ordered"])
def test_a_receive_from_any_rank_says_who_it_was(engine: str) -> None:
    assert run_ranks(all_to_one, 3, backend="dfccl", env={"TORCHEXT_DFCCL_ENGINE": engine}) == [{1, 2}, set(), set()]


def traced(rank: Rank, folder: str) -> None:
    with trace(f"{folder}/{{rank}}.json"):
        works = []
        for i in [0, 1, 2] if rank.rank == 0 else [2, 0, 1]:
            with torchext.tag(f"t{i}"):
                works.append(dist.all_reduce(torch.ones(200_000), async_op=True))
        for work in works:
            work.wait()
        dist.barrier()
    dist.all_reduce(torch.ones(3))  # no longer noted


def test_a_trace_has_each_call_and_what_the_engine_ran(tmp_path: Path) -> None:
    run_ranks(traced, 2, str(tmp_path), backend="dfccl")
    merge_traces([tmp_path / "0.json", tmp_path / "1.json"], tmp_path / "all.json")
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    for rank in range(2):
        own = [event for event in events if event["pid"] == rank]
        begun = {event["id"]: event for event in own if event["ph"] == "b"}
        ended = {event["id"]: event for event in own if event["ph"] == "e"}
        assert sorted(event["name"].split("(")[0] for event in begun.values()) == ["all_reduce"] * 3 + ["barrier"]
        assert all(ended[i]["ts"] >= event["ts"] for i, event in begun.items())
        assert any(event["ph"] == "X" and event["cat"] == "run" and "tagged 't1'" in event["name"] for event in own)
        assert {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}} in own
