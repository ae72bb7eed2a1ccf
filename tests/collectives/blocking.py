"""Programs whose blocking calls wait for each other in a circle, and what they give if the waits are put off.

Each is written against `torch.distributed` alone, so that it runs on any backend; on one that has no way out it hangs.
A program returns what this rank got and what it should have got.
"""

from __future__ import annotations

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


# name -> (program, ranks)
PROGRAMS: dict[str, tuple[Callable[[int], Result], int]] = {
    "two_groups": (two_groups, 2),
    "two_groups_large": (two_groups_large, 2),
    "ring_of_groups": (ring_of_groups, 3),
    "tags_of_one_group": (tags_of_one_group, 2),
    "both_send_first": (both_send_first, 2),
    "metrics_in_two_orders": (metrics_in_two_orders, 2),
    "different_operations": (different_operations, 2),
}
