"""Programs from reports of users that hung, failed or went silently wrong, and what they must give.

Each is written against `torch.distributed` alone, so that it runs on any backend. A program returns what this rank got
and what it should have got.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import torchext

_TIMEOUT = timedelta(seconds=5)

Tensor = torch.Tensor
Result = tuple[list[Tensor], list[Tensor]]


def mesh_in_two_orders(rank: int, backend: str) -> Result:
    """Tensor- and data-parallel calls on a 2x2 mesh, which half of the ranks issue in the other order.

    After https://github.com/NVIDIA/Megatron-LM/issues/107.
    """
    tp = [dist.new_group(r, backend=backend, timeout=_TIMEOUT) for r in ([0, 1], [2, 3])][rank // 2]
    dp = [dist.new_group(r, backend=backend, timeout=_TIMEOUT) for r in ([0, 2], [1, 3])][rank % 2]
    activation, gradient = torch.full((4096,), float(rank)), torch.full((4096,), float(10 + rank))
    weight, shard = torch.empty(2048), torch.full((1024,), float(rank))
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(activation, group=tp, async_op=True),
        lambda: dist.all_gather_into_tensor(weight, shard, group=tp, async_op=True),
        lambda: dist.all_reduce(gradient, group=dp, async_op=True),
    ]
    if rank in (0, 3):
        calls.reverse()
    works = [call() for call in calls]
    for work in works:
        work.wait()
    first = 2 * (rank // 2)
    return [activation, gradient, weight], [
        torch.full((4096,), 2 * first + 1.0),
        torch.full((4096,), 22.0 + 2 * (rank % 2)),
        torch.cat([torch.full((1024,), float(r)) for r in (first, first + 1)]),
    ]


def two_all_to_all_swapped(rank: int, backend: str) -> Result:
    """Two asynchronous all_to_all of one group, swapped on one rank: token counts, then tokens.

    From https://github.com/NVIDIA/Megatron-LM/issues/1810.
    """
    world = dist.get_world_size()
    counts, tokens = torch.arange(world) + 100 * rank, torch.arange(8.0 * world) + 1000 * rank
    outs = [torch.empty_like(counts), torch.empty_like(tokens)]
    calls = list(zip(outs, [counts, tokens], strict=True))
    if rank == 1:
        calls.reverse()
    works = [dist.all_to_all_single(out, x, async_op=True) for out, x in calls]
    for work in works:
        work.wait()
    expected = [
        torch.tensor([rank + 100 * r for r in range(world)]),
        torch.cat([torch.arange(8.0 * rank, 8.0 * rank + 8) + 1000 * r for r in range(world)]),
    ]
    return outs, expected


def expert_and_data_parallel(rank: int, backend: str) -> Result:
    """All_to_all on expert groups and reduce_scatter on data groups, in a random order per rank, many steps.

    From https://github.com/NVIDIA/Megatron-LM/issues/5749.
    """
    expert = [dist.new_group(r, backend=backend, timeout=_TIMEOUT) for r in ([0, 1], [2, 3])][rank // 2]
    data = [dist.new_group(r, backend=backend, timeout=_TIMEOUT) for r in ([0, 2], [1, 3])][rank % 2]
    rng = random.Random(rank)
    got, expected = [], []
    for step in range(50):
        tokens, gradient = torch.full((64,), float(rank + step)), torch.full((20_000,), float(rank + step))
        routed, shard, norm = torch.empty(64), torch.empty(10_000), torch.tensor([float(rank)])
        calls: list[Callable[[], Any]] = [
            lambda out=routed, x=tokens: dist.all_to_all_single(out, x, group=expert, async_op=True),
            lambda out=shard, x=gradient: dist.reduce_scatter_tensor(out, x, group=data, async_op=True),
            lambda x=norm: dist.all_reduce(x, group=data, async_op=True),
        ]
        rng.shuffle(calls)
        works = [call() for call in calls]
        for work in works:
            work.wait()
        got += [routed, shard, norm]
        expected += [
            torch.cat([torch.full((32,), float(2 * (rank // 2) + i + step)) for i in range(2)]),
            torch.full((10_000,), float(2 * step + 2 * (rank % 2) + 2)),
            torch.tensor([2.0 * (rank % 2) + 2]),
        ]
    return got, expected


def two_threads(rank: int, backend: str) -> Result:
    """Two threads use one group, as a training loop and a logger do; which is first differs from rank to rank.

    After https://github.com/pytorch/pytorch/issues/175145.
    """
    world = dist.get_world_size()
    rounds = 20
    sums, gathered = torch.zeros(rounds), torch.zeros(rounds)
    turns = [threading.Semaphore(1), threading.Semaphore(0)]
    errors: list[BaseException] = []

    def take_turns(place: int, call: Callable[[int], None]) -> None:
        try:
            for i in range(rounds):
                assert turns[place].acquire(timeout=20)
                call(i)
        except BaseException as error:
            errors.append(error)
        finally:
            turns[1 - place].release()

    def reduce(i: int) -> None:
        x = torch.full((1000,), float(rank + i))
        work = dist.all_reduce(x, async_op=True)
        turns[1 - first].release()
        work.wait()
        sums[i] = x[0]

    def gather(i: int) -> None:
        x, out = torch.full((1000,), float(rank + i)), torch.empty(1000 * world)
        work = dist.all_gather_into_tensor(out, x, async_op=True)
        turns[first].release()
        work.wait()
        gathered[i] = out[-1]

    first = rank % 2  # the place of `reduce`
    threads = [
        threading.Thread(target=take_turns, args=(place, call))
        for place, call in ((first, reduce), (1 - first, gather))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    steps = torch.arange(float(rounds))
    return [sums, gathered], [world * steps + sum(range(world)), steps + world - 1]


def same_shape_by_tag(rank: int, backend: str) -> Result:
    """Gradients of equal shape become ready in another order on each rank, as hooks fire; each has its tag."""
    grads = [torch.full((512,), 100.0 * i + rank) for i in range(8)]
    order = list(range(8))
    random.Random(rank).shuffle(order)
    works = []
    for i in order:
        with torchext.tag(f"grad/{i}"):
            works.append(dist.all_reduce(grads[i], async_op=True))
    for work in works:
        work.wait()
    world = dist.get_world_size()
    return grads, [torch.full((512,), 100.0 * i * world + sum(range(world))) for i in range(8)]


def broadcasts_of_a_shuffled_dict(rank: int, backend: str) -> Result:
    """Parameters are broadcast in each rank's own order of a dict; shapes differ, names are tags.

    From https://github.com/NVIDIA/apex/issues/19.
    """
    shapes = {"weight": (32, 8), "bias": (32,), "scale": (32,), "embedding": (300, 200)}
    state = {name: torch.full(shape, float(rank + 1)) for name, shape in shapes.items()}
    names = list(state)
    random.Random(rank).shuffle(names)
    works = []
    for name in names:
        with torchext.tag(name):
            works.append(dist.broadcast(state[name], 0, async_op=True))
    for work in works:
        work.wait()
    return list(state.values()), [torch.ones(shape) for shape in shapes.values()]


def groups_made_in_two_orders(rank: int, backend: str) -> Result:
    """Each rank makes the groups in its own order."""
    sets = [[0, 1], [1, 2], [0, 2], [0, 1, 2]]
    random.Random(rank).shuffle(sets)
    groups = {tuple(s): dist.new_group(s, backend=backend, timeout=_TIMEOUT) for s in sets}
    got, expected = [], []
    for members in sorted(groups):
        if rank in members:
            x = torch.full((100,), float(rank))
            dist.all_reduce(x, group=groups[members])
            got.append(x)
            expected.append(torch.full((100,), float(sum(members))))
    return got, expected


def more_in_flight_than_staging(rank: int, backend: str) -> Result:
    """Many large collectives in opposite orders: together they want far more staging memory than there is.

    From https://github.com/ROCm/rccl/issues/2191, where the pool runs out into a deadlock.
    """
    world = dist.get_world_size()
    xs = [torch.full((100_000 + i,), float(rank + i)) for i in range(40)]
    order = list(range(40)) if rank % 2 == 0 else list(reversed(range(40)))
    works = [dist.all_reduce(xs[i], async_op=True) for i in order]
    for work in works:
        work.wait()
    return xs, [torch.full((100_000 + i,), float(world * i + sum(range(world)))) for i in range(40)]


def sharded_and_replicated(rank: int, backend: str) -> Result:
    """All_to_all within shards and coalesced all_reduce across replicas, issued in orders that diverge between ranks.

    From https://github.com/meta-pytorch/torchrec/pull/4149; with waits in between it is in blocking.py.
    """
    shard = [dist.new_group(r, backend=backend, timeout=_TIMEOUT) for r in ([0, 1], [2, 3])][rank // 2]
    replicate = [dist.new_group(r, backend=backend, timeout=_TIMEOUT) for r in ([0, 2], [1, 3])][rank % 2]
    late = random.Random(rank)
    got, expected = [], []
    for step in range(20):
        lookups = [torch.arange(6.0) + 100 * rank + step, torch.arange(40.0) + 1000 * rank + step]
        pooled = [torch.empty_like(x) for x in lookups]
        grads = [torch.full((n,), float(rank + step)) for n in (5, 30_000)]
        calls: list[Callable[[], Any]] = [
            lambda out=pooled[0], x=lookups[0]: dist.all_to_all_single(out, x, group=shard, async_op=True),
            lambda out=pooled[1], x=lookups[1]: dist.all_to_all_single(out, x, group=shard, async_op=True),
            lambda xs=grads: dist.all_reduce_coalesced(xs, group=replicate, async_op=True),
        ]
        late.shuffle(calls)
        works = [call() for call in calls]
        for work in works:
            work.wait()
        got += pooled + grads
        first, half = 2 * (rank // 2), rank % 2
        for scale, n in ((100, 3), (1000, 20)):
            parts = [torch.arange(float(n)) + n * half + scale * r + step for r in (first, first + 1)]
            expected.append(torch.cat(parts))
        expected += [torch.full((n,), 2.0 * step + 2 * half + 2) for n in (5, 30_000)]
    return got, expected


def ring_beside_all_reduce(rank: int, backend: str) -> Result:
    """One thread makes all_reduce, another passes messages around a ring, on the same group and out of step.

    From https://github.com/pytorch/pytorch/issues/175145, where it hangs over NCCL; gloo has no trouble with it.
    """
    world, rounds = dist.get_world_size(), 20
    sums, passed = torch.zeros(rounds), torch.zeros(rounds)
    errors: list[BaseException] = []

    def guarded(run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)

    def reduce() -> None:
        for i in range(rounds):
            x = torch.full((20_000 * (i % 2) + 10,), float(rank + i))
            dist.all_reduce(x)
            sums[i] = x[-1]

    def ring() -> None:
        for i in range(rounds):
            x, out = torch.full((20_000 * (i % 2) + 10,), float(rank + i)), torch.empty(20_000 * (i % 2) + 10)
            works = [dist.isend(x, (rank + 1) % world), dist.irecv(out, (rank - 1) % world)]
            for work in works:
                assert work is not None
                work.wait()
            passed[i] = out[-1]

    runs = [reduce, ring] if rank % 2 == 0 else [ring, reduce]
    threads = [threading.Thread(target=guarded, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    steps = torch.arange(float(rounds))
    return [sums, passed], [world * steps + sum(range(world)), steps + (rank - 1) % world]


# name -> (program, ranks)
PROGRAMS: dict[str, tuple[Callable[[int, str], Result], int]] = {
    "mesh_in_two_orders": (mesh_in_two_orders, 4),
    "two_all_to_all_swapped": (two_all_to_all_swapped, 2),
    "expert_and_data_parallel": (expert_and_data_parallel, 4),
    "two_threads": (two_threads, 2),
    "same_shape_by_tag": (same_shape_by_tag, 2),
    "broadcasts_of_a_shuffled_dict": (broadcasts_of_a_shuffled_dict, 2),
    "groups_made_in_two_orders": (groups_made_in_two_orders, 3),
    "more_in_flight_than_staging": (more_in_flight_than_staging, 2),
    "sharded_and_replicated": (sharded_and_replicated, 4),
    "ring_beside_all_reduce": (ring_beside_all_reduce, 3),
}
# What goes wrong over other backends only.
FINE_ON_GLOO = {"ring_beside_all_reduce"}
