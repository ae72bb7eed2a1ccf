"""What the benchmarks of collectives share: ranks in processes of their own, and a percentile."""

from __future__ import annotations

import argparse
import multiprocessing
import platform
from collections.abc import Callable

import torch
import torch.distributed as dist

import torchext


def percentile(values: list[float], fraction: float) -> float:
    return sorted(values)[int(fraction * len(values))]


def run_on_ranks(fn: Callable[[int, int, int, argparse.Namespace], None], options: argparse.Namespace) -> None:
    """Runs ``fn(rank, world_size, port of the store, options)`` for each number of ranks in ``options.ranks``."""
    print(f"torch {torch.__version__}, torchext {torchext.__version__}, {platform.platform()}")
    context = multiprocessing.get_context("spawn")
    for world in options.ranks:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks = [context.Process(target=fn, args=(r, world, store.port, options)) for r in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit("a rank failed")
