"""Time collectives over dfccl and over gloo through torch.distributed, interleaved in the same run.

    python tests/benchmarks/collectives.py [--ranks 2 4] [--ops all_reduce barrier] [--sizes 4 65536] [--rounds 50]
    python tests/benchmarks/collectives.py --dtype bfloat16 --ops all_reduce all_gather reduce_scatter
    python tests/benchmarks/collectives.py --disorder
    python tests/benchmarks/collectives.py --ddp
    python tests/benchmarks/collectives.py --limit

Each call is timed by itself on rank 0, after an untimed dfccl barrier from which the ranks start nearly together.
The table gives the tenth percentile and the median in microseconds and the ratio of each (gloo/dfccl).
Machines are shared and ranks may outnumber cores: the tenth percentile says what the code costs, the median what the
machine made of it. With --disorder the ranks issue 16 asynchronous all_reduce in orders of their own, against the same
in one order (both over dfccl; gloo gives wrong values or hangs). With --ddp they train a small transformer with
DistributedDataParallel, one step over each backend in turn; the time is that of a whole step. With --limit the time of
all_reduce is set against that of copying: between two ranks, each has to copy half of its tensor to where the other can
read it, to reduce half and to copy half back, so no less than one and a half copies of the tensor, by both at once.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from rank_processes import percentile, run_on_ranks
from torch.nn.parallel import DistributedDataParallel

import torchext

OPS = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "barrier"]
# Their names until 2.12; from 2.13 on these warn.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
SIZES = [4, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]


def call(op: str, size: int, dtype: torch.dtype, world: int, group: Any) -> Callable[[], Any]:
    """The call to time: ``size`` bytes in all on each rank (for all_gather and reduce_scatter, the larger side)."""
    n = max(world, size // dtype.itemsize // world * world)
    if op == "all_reduce":
        x = torch.zeros(max(1, size // dtype.itemsize), dtype=dtype)
        return lambda: dist.all_reduce(x, group=group)
    whole, part = torch.zeros(n, dtype=dtype), torch.zeros(n // world, dtype=dtype)
    other = torch.zeros(n, dtype=dtype)
    return {
        "all_gather": lambda: all_gather_single(whole, part, group=group),
        "reduce_scatter": lambda: reduce_scatter_single(part, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "barrier": lambda: dist.barrier(group=group),
    }[op]


def compare(options: argparse.Namespace, world: int, rank: int, groups: dict[str, Any]) -> None:
    if rank == 0:
        print(f"\n{world} ranks, {options.dtype}; us: dfccl p10, median; gloo p10, median; ratio p10, median")
    for op in options.ops:
        for size in options.sizes if op != "barrier" else [0]:
            dtype = getattr(torch, options.dtype)
            calls = {name: call(op, size, dtype, world, group) for name, group in groups.items()}
            times: dict[str, list[float]] = {name: [] for name in groups}
            rounds = options.rounds if size < 4 << 20 else max(5, options.rounds // 5)
            for number in range(rounds + 2):
                for name in groups:
                    dist.barrier()
                    start = time.perf_counter()
                    calls[name]()
                    if number > 1:  # the first two touch memory for the first time
                        times[name].append(1e6 * (time.perf_counter() - start))
            if rank == 0:
                figures = [f(times[name]) for name in groups for f in (lambda t: percentile(t, 0.1), statistics.median)]
                ratios = f"{figures[2] / figures[0]:7.1f}x {figures[3] / figures[1]:7.1f}x"
                print(f"{op:<15}{size:>10} B " + "".join(f"{f:11.1f}" for f in figures) + f"  {ratios}", flush=True)


def disorder(options: argparse.Namespace, world: int, rank: int) -> None:
    for size in options.sizes:
        xs = [torch.zeros(max(1, size // 4)) for _ in range(16)]
        times: dict[bool, list[float]] = {False: [], True: []}
        for number in range(options.rounds + 2):
            for shuffled in times:
                order = list(range(16))
                if shuffled:
                    random.Random(f"{number}/{rank}").shuffle(order)
                dist.barrier()
                start = time.perf_counter()
                works = []
                for i in order:
                    with torchext.tag(str(i)):
                        works.append(dist.all_reduce(xs[i], async_op=True))
                for work in works:
                    work.wait()
                if number > 1:
                    times[shuffled].append(1e6 * (time.perf_counter() - start))
        if rank == 0:
            same, own = (percentile(times[key], 0.1) for key in (False, True))
            print(
                f"16 async all_reduce of {size} B, {world} ranks: one order {same:.0f} us, own orders {own:.0f} us p10 "
                f"({100 * (own / same - 1):+.0f} %)",
                flush=True,
            )


def limit(options: argparse.Namespace, world: int, rank: int) -> None:
    for size in options.sizes:
        x, y = torch.zeros(size // 4), torch.zeros(size // 4)
        half = x.numel() // 2

        def copy(x: torch.Tensor = x, y: torch.Tensor = y, half: int = half) -> None:
            y.copy_(x)
            x[:half].copy_(y[half:])

        calls: dict[str, Callable[[], Any]] = {"copy": copy, "all_reduce": lambda x=x: dist.all_reduce(x)}  # type: ignore[misc]
        times: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(options.rounds // 2 + 2):
            for name, run in calls.items():
                dist.barrier()
                start = time.perf_counter()
                run()
                if number > 1:
                    times[name].append(1e6 * (time.perf_counter() - start))
        if rank == 0:
            copied, reduced = (percentile(times[name], 0.1) for name in calls)
            print(
                f"all_reduce of {size} B, {world} ranks: {reduced:.0f} us p10; one and a half copies {copied:.0f} us: "
                f"{100 * copied / reduced:.0f} % of the limit",
                flush=True,
            )


def ddp(options: argparse.Namespace, world: int, rank: int, groups: dict[str, Any]) -> None:
    models, optimizers = {}, {}
    for name, group in groups.items():
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        models[name] = DistributedDataParallel(model, process_group=group, bucket_cap_mb=1)
        optimizers[name] = torch.optim.SGD(models[name].parameters(), lr=0.01)
    x = torch.randn(4, 32, 128, generator=torch.Generator().manual_seed(rank))
    times: dict[str, list[float]] = {name: [] for name in groups}
    for number in range(options.rounds + 3):
        for name, model in models.items():
            dist.barrier()
            start = time.perf_counter()
            optimizers[name].zero_grad()
            model(x).square().mean().backward()
            optimizers[name].step()
            if number > 2:  # the first ones make the buckets
                times[name].append(1e3 * (time.perf_counter() - start))
    if rank == 0:
        num = sum(p.numel() for p in models["dfccl"].parameters())
        figures = [f(times[name]) for name in groups for f in (lambda t: percentile(t, 0.1), statistics.median)]
        print(
            f"DDP step of a transformer of {num} parameters, {world} ranks, ms: dfccl {figures[0]:.1f} p10, "
            f"{figures[1]:.1f} median; gloo {figures[2]:.1f}, {figures[3]:.1f}; ratio {figures[2] / figures[0]:.2f}x, "
            f"{figures[3] / figures[1]:.2f}x",
            flush=True,
        )


def main_of_rank(rank: int, world: int, port: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("dfccl", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=600))
    groups = {"dfccl": dist.group.WORLD, "gloo": dist.new_group(backend="gloo", timeout=timedelta(seconds=600))}
    if options.disorder:
        disorder(options, world, rank)
    elif options.ddp:
        ddp(options, world, rank, groups)
    elif options.limit:
        limit(options, world, rank)
    else:
        compare(options, world, rank, groups)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--ops", nargs="+", choices=OPS, default=["all_reduce"])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=50, help="a fifth of it from 4 MiB on")
    parser.add_argument("--disorder", action="store_true")
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--limit", action="store_true")
    run_on_ranks(main_of_rank, parser.parse_args())


if __name__ == "__main__":
    main()
