"""Four ranks on a 2x2 mesh issue the same collectives in two orders: gloo hangs, dfccl ends with the right values.

    python examples/deadlock.py [--deadline-s 10] [--trace deadlock.json]

Each rank reduces activations and gathers weights in its row (tensor parallelism) and averages gradients in its column
(data parallelism). Ranks 0 and 3 happen to issue them in reverse, as hooks, threads and data-dependent branches do. The
output, but for the times:

    gloo:  no rank has finished after 10 s: they wait for each other
    dfccl: 4 of 4 ranks finished with the right values; a step takes 120 us

With --trace, the last steps over dfccl are written for ui.perfetto.dev: who issued what when, what ran, what waited.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import queue
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import torchext  # registers the backend "dfccl"

WORLD_SIZE = 4
STEPS = 200


def step(rank: int, tp: dist.ProcessGroup, dp: dist.ProcessGroup) -> bool:
    """One step of training, as far as communication goes; returns whether all values are right."""
    row, column = rank // 2, rank % 2
    activation = torch.full((1024,), float(rank))
    weights, shard = [torch.empty(1024), torch.empty(1024)], torch.full((1024,), float(rank))
    gradient = torch.full((1024,), float(rank))
    calls = [
        lambda: dist.all_reduce(activation, group=tp, async_op=True),
        lambda: dist.all_gather(weights, shard, group=tp, async_op=True),
        lambda: dist.all_reduce(gradient, group=dp, async_op=True),
    ]
    if rank in (0, 3):
        calls.reverse()
    for work in [call() for call in calls]:
        work.wait()
    return (
        bool((activation == 4 * row + 1).all())
        and bool((gradient == 2 * column + 2).all())
        and all(bool((weight == 2 * row + i).all()) for i, weight in enumerate(weights))
    )


def run(rank: int, backend: str, port: int, trace: str, results: multiprocessing.Queue) -> None:
    """One rank: reports whether it got the right values and how long a step took."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=WORLD_SIZE, timeout=timedelta(minutes=5))
    tp = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    dp = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    results.put("ready")
    right = step(rank, tp, dp)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(STEPS):
        right = step(rank, tp, dp) and right
    seconds = (time.perf_counter() - start) / STEPS
    if trace and backend == "dfccl":
        with torchext.collectives.trace(f"{trace}.{rank}"):
            for _ in range(10):
                step(rank, tp, dp)
    results.put((right, seconds))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deadline-s", type=float, default=10.0, help="from when all ranks are ready")
    parser.add_argument("--trace", default="", metavar="FILE", help="write a Chrome trace of ten steps over dfccl")
    options = parser.parse_args()
    deadline_s: float = options.deadline_s
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("spawn")
    for backend in ("gloo", "dfccl"):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        results = context.Queue()
        ranks = [
            context.Process(target=run, args=(r, backend, store.port, options.trace, results))
            for r in range(WORLD_SIZE)
        ]
        for process in ranks:
            process.start()
        for _ in ranks:
            assert results.get(timeout=120) == "ready"
        done: list[tuple[bool, float]] = []
        deadline = time.monotonic() + deadline_s
        with contextlib.suppress(queue.Empty):
            while len(done) < WORLD_SIZE:
                done.append(results.get(timeout=max(0.0, deadline - time.monotonic())))
        if len(done) < WORLD_SIZE:
            for process in ranks:
                process.kill()
        for process in ranks:
            process.join()
        name = f"{backend}:".ljust(6)
        if not done:
            print(f"{name} no rank has finished after {deadline_s:g} s: they wait for each other")
        else:
            right = sum(ok for ok, _ in done)
            time_us = 1e6 * max(seconds for _, seconds in done)
            print(f"{name} {right} of {WORLD_SIZE} ranks finished with the right values; a step takes {time_us:.0f} us")
    if options.trace:
        parts = [f"{options.trace}.{rank}" for rank in range(WORLD_SIZE)]
        torchext.collectives.merge_traces(parts, options.trace)
        for part in parts:
            os.remove(part)


if __name__ == "__main__":
    main()
