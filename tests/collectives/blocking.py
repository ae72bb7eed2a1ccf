"""Programs whose blocking calls wait for each other in a circle, and what they give if the waits are put off.

Each is written against `torch.distributed` alone, so that it runs on any backend; on one that has no way out it hangs.
A program returns what this rank got and what it should have got.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

import torchext

Tensor = torch.Tensor
Result = tuple[list[Tensor], list[Tensor]]

TIMEOUT = timedelta(seconds=30)


def new_group(ranks: list[int]) -> dist.ProcessGroup:
    return dist.new_group(ranks, timeout=TIMEOUT)


def two_groups(rank: int, size: int = 1000) -> Result:
    """Tensor- and data-parallel groups of the same ranks, used in opposite orders."""
    groups = {"tp": new_group([0, 1]), "dp": new_group([0, 1])}
    xs = {"tp": torch.full((size,), 1.0 + rank), "dp": torch.full((size,), 10.0 + rank)}
    for name in ("tp", "dp") if rank == 0 else ("dp", "tp"):
        dist.all_reduce(xs[name], group=groups[name])
    return [xs["tp"] + 0, xs["dp"] + 0], [torch.full((size,), 3.0), torch.full((size,), 21.0)]


def two_groups_large(rank: int) -> Result:
    """The same through staging memory."""
    return two_groups(rank, 300_000)


def ring_of_groups(rank: int) -> Result:
    """Three ranks, three groups of two; each begins with the one that it shares with its right neighbour."""
    pairs = [[0, 1], [1, 2], [0, 2]]
    groups = [new_group(pair) for pair in pairs]
    right, left = rank, (rank + 2) % 3  # places in `pairs`
    out = []
    for place in (right, left):
        x = torch.full((64,), 2.0**rank)
        dist.all_reduce(x, group=groups[place])
        out.append(x)
    got = [x * 1 for x in out]
    return got, [torch.full((64,), float(sum(2**r for r in pairs[place]))) for place in (right, left)]


def tags_of_one_group(rank: int) -> Result:
    """Two gradients of one shape on one group, in opposite orders; each has its name."""
    xs = {"a": torch.full((16,), 1.0 + rank), "b": torch.full((16,), 10.0 + rank)}
    for name in ("a", "b") if rank == 0 else ("b", "a"):
        with torchext.tag(name):
            dist.all_reduce(xs[name])
    return [xs["a"].clone(), xs["b"].clone()], [torch.full((16,), 3.0), torch.full((16,), 21.0)]


def both_send_first(rank: int) -> Result:
    """Both ranks send 64 MiB and then receive; no memory in between holds so much.

    From https://github.com/NVIDIA/nccl/issues/479.
    """
    x, y = torch.full((1 << 24,), 5.0 + rank), torch.empty(1 << 24)
    dist.send(x, 1 - rank)
    dist.recv(y, 1 - rank)
    return [y[:: 1 << 20].clone(), x[:4].clone()], [torch.full((16,), 6.0 - rank), torch.full((4,), 5.0 + rank)]


def metrics_in_two_orders(rank: int) -> Result:
    """A scalar all_reduce for each metric, in the order of each rank's dict.

    From https://github.com/Lightning-AI/pytorch-lightning/issues/19106; the names are tags.
    """
    metrics = {"loss": 1.0 + rank, "accuracy": 3.0 + rank}
    sums = {}
    for name in sorted(metrics, reverse=rank == 1):
        sums[name] = torch.tensor(metrics[name])
        with torchext.tag(name):
            dist.all_reduce(sums[name])
    return [sums["loss"] / 1, sums["accuracy"] / 1], [torch.tensor(3.0), torch.tensor(7.0)]


def different_operations(rank: int) -> Result:
    """One group, one order on each rank: gather, then reduce, against reduce, then gather."""
    mine, out, total = torch.full((8,), float(rank)), torch.empty(16), torch.full((8,), 4.0 + rank)
    calls: list[Callable[[], object]] = [
        lambda: dist.all_gather(list(out.chunk(2)), mine),
        lambda: dist.reduce_scatter(total, [total.clone(), total.clone()]),
    ]
    for call in calls if rank == 0 else reversed(calls):
        call()
    return [out * 1, total * 1], [torch.cat([torch.zeros(8), torch.ones(8)]), torch.full((8,), 9.0)]


def sharded_and_replicated(rank: int) -> Result:
    """Two ranks wait for the all_to_all of their shard before they reduce across replicas, two do the opposite.

    From https://github.com/meta-pytorch/torchrec/pull/4149, where the host waits because it reads a value.
    """
    shards, replicas = [new_group(r) for r in ([0, 1], [2, 3])], [new_group(r) for r in ([0, 2], [1, 3])]
    shard, replicate = shards[rank // 2], replicas[rank % 2]
    lookups, pooled, gradient = torch.arange(4.0) + 10 * rank, torch.empty(4), torch.full((6,), float(rank))
    calls: list[Callable[[], object]] = [
        lambda: dist.all_to_all_single(pooled, lookups, group=shard),
        lambda: dist.all_reduce(gradient, group=replicate),
    ]
    for call in calls if rank in (0, 3) else reversed(calls):
        call()
    first, half = 2 * (rank // 2), rank % 2
    return [pooled * 1, gradient * 1], [
        torch.cat([torch.arange(2.0) + 2 * half + 10 * r for r in (first, first + 1)]),
        torch.full((6,), 2.0 + 2 * half),
    ]


def saves_in_background(rank: int) -> Result:
    """Two checkpoints are saved back to back by threads of their own while the main thread goes on to a barrier.

    After issue 104 of KempnerForge; which thread comes first differs from rank to rank.
    """
    world = dist.get_world_size()
    plans: dict[str, list[object]] = {"first": [None] * world, "second": [None] * world}
    errors: list[BaseException] = []
    started = threading.Event()

    def save(name: str) -> None:
        try:
            with torchext.tag(name):
                for step in range(3):
                    dist.all_gather_object(plans[name], f"{name} {step} of rank {rank}" + "." * 100 * step)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(name,)) for name in sorted(plans, reverse=rank == 1)]
    for thread in threads:
        thread.start()
        started.wait(0.05)
    dist.barrier()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    right = all(
        plans[name] == [f"{name} 2 of rank {r}" + "." * 200 for r in range(world)] for name in ("first", "second")
    )
    return [torch.tensor(float(right))], [torch.tensor(1.0)]


def uneven_steps(rank: int) -> None:
    """Rank 0 has one batch more than rank 1, which goes on to what comes after its epoch.

    From https://github.com/pytorch/pytorch/issues/33148.
    """
    gradient = torch.ones(100)
    for _ in range(3 - rank):
        dist.all_reduce(gradient)
    dist.barrier()


def metric_of_one_rank(rank: int) -> None:
    """Rank 1 has logged one metric less.

    From https://github.com/Lightning-AI/pytorch-lightning/issues/7129.
    """
    for _ in ("loss", "accuracy")[: 2 - rank]:
        dist.all_reduce(torch.ones(()))
    dist.broadcast(torch.ones(7), 0)
    dist.barrier()


def reduce_against_all_gather(rank: int) -> None:
    """A branch on the rank leads to two operations of one group.

    From https://github.com/pytorch/pytorch/issues/77030.
    """
    if rank == 0:
        dist.reduce(torch.ones(16), 0)
    else:
        dist.all_gather([torch.empty(16), torch.empty(16)], torch.ones(16))


# Programs that no order of execution saves: each rank must be told.
HOPELESS: dict[str, Callable[[int], None]] = {
    "uneven_steps": uneven_steps,
    "metric_of_one_rank": metric_of_one_rank,
    "reduce_against_all_gather": reduce_against_all_gather,
}

# name -> (program, ranks)
PROGRAMS: dict[str, tuple[Callable[[int], Result], int]] = {
    "two_groups": (two_groups, 2),
    "two_groups_large": (two_groups_large, 2),
    "ring_of_groups": (ring_of_groups, 3),
    "tags_of_one_group": (tags_of_one_group, 2),
    "both_send_first": (both_send_first, 2),
    "metrics_in_two_orders": (metrics_in_two_orders, 2),
    "different_operations": (different_operations, 2),
    "sharded_and_replicated": (sharded_and_replicated, 4),
}

# Blocking calls of several threads, which need no deferral: each thread goes on by itself.
THREADED: dict[str, tuple[Callable[[int], Result], int]] = {"saves_in_background": (saves_in_background, 2)}
