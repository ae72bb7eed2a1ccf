"""Time what the ordered engine costs: its agreement alone, and gloo in order against gloo as it is.

    python tests/benchmarks/ordering.py [--ranks 2 4] [--sizes 1048576 16777216] [--rounds 50]

Agreement: from the call on a rank to the moment when it knows the place of the collective, with nothing to launch, call
after call, so that it includes waiting for the slower rank's call. Over shared memory, and over sockets as between
hosts (on loopback). Overhead: blocking all_reduce of float32, interleaved with plain gloo, each round timed on rank 0
after an untimed dfccl barrier; then the same call taken apart: to issue it, to wait for its turn (which may come while
it is being issued) and to launch it, and to wait for gloo. Tenth percentile and median in microseconds. Ranks should
each have a core.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from rank_processes import percentile, run_on_ranks

from torchext.collectives import mesh, order, wrap
from torchext.collectives.work import DoneWork

AGREEMENTS = 3000
BARRIER, NO_REDUCE = 9, 255  # the orderer's numbers
LIMIT = timedelta(seconds=600)


class Nothing:
    """A group that launches nothing."""

    def where(self) -> str:
        return "no group"

    def on_fallen(self, rank: int) -> None:
        raise RuntimeError(f"rank {rank} has fallen")

    def leave(self, reason: str, *, aborted: bool) -> None:
        pass


def agreement(store: Any, world: int, rank: int, kind: str) -> None:
    sequencer = order.join_sequencer()
    host_of = mesh._host
    if kind == "sockets":
        mesh._host = lambda: f"host {rank}"
    links = mesh.connect(dist.PrefixStore(kind, store), rank, list(range(world)), LIMIT, sequencer.native.doorbell)
    mesh._host = host_of
    sequencer.add(links, Nothing(), rank)
    everyone, done = list(range(world)), DoneWork()
    times = []
    for number in range(AGREEMENTS + 100):
        work = order.OrderedWork(sequencer, lambda: done, [], None, lambda work, error: RuntimeError(str(error)))  # type: ignore[arg-type,return-value]
        issued = (BARRIER, NO_REDUCE, 0, -1, -1, (), None, "", everyone, [], [], LIMIT.total_seconds(), True)
        work.handle = sequencer.native.issue(links, *issued, work)
        sequencer.launch_ready()
        work.wait()
        if number >= 100:
            times.append(1e6 * work.handle.agreed_s)
    if rank == 0:
        p10, median = percentile(times, 0.1), statistics.median(times)
        print(f"agreement of {world} ranks over {kind}: {p10:.1f} us p10, {median:.1f} us median", flush=True)
    sequencer.leave(links, "done", aborted=False)
    order.leave_sequencer(sequencer)


def overhead(options: argparse.Namespace, world: int, rank: int) -> None:
    groups = {"gloo": dist.group.WORLD, "ordered": wrap(timeout=LIMIT)}
    start_together = dist.new_group(backend="dfccl", timeout=LIMIT)
    for size in options.sizes:
        x = torch.zeros(size // 4)
        times: dict[str, list[float]] = {name: [] for name in groups}
        parts: list[list[float]] = []
        for number in range(options.rounds + 2):
            for name, group in groups.items():
                dist.barrier(start_together)
                start = time.perf_counter()
                dist.all_reduce(x, group=group)
                if number > 1:
                    times[name].append(1e6 * (time.perf_counter() - start))
            dist.barrier(start_together)
            moments = [time.perf_counter()]
            work: Any = dist.all_reduce(x, group=groups["ordered"], async_op=True)
            moments.append(time.perf_counter())
            work.wait_for_turn()
            moments.append(time.perf_counter())
            work.wait()
            moments.append(time.perf_counter())
            parts.append([1e6 * (end - begin) for begin, end in itertools.pairwise(moments)])
        if rank == 0:
            figures = [f(times[name]) for name in groups for f in (lambda t: percentile(t, 0.1), statistics.median)]
            more = [100 * (figures[2 + i] / figures[i] - 1) for i in range(2)]
            print(
                f"all_reduce of {size:>9} B, {world} ranks, us: gloo {figures[0]:.0f} p10, {figures[1]:.0f} median; in "
                f"order {figures[2]:.0f}, {figures[3]:.0f} ({more[0]:+.1f} % p10, {more[1]:+.1f} % median)",
                flush=True,
            )
            issued, turn, inner = (statistics.median(part) for part in zip(*parts[2:], strict=True))
            print(
                f"  taken apart, median: issue {issued:.0f}, turn and launch {turn:.0f}, gloo {inner:.0f}", flush=True
            )


def main_of_rank(rank: int, world: int, port: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    for kind in ("memory", "sockets"):
        agreement(store, world, rank, kind)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=LIMIT)
    overhead(options, world, rank)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1 << 20, 4 << 20, 16 << 20], help="bytes")
    parser.add_argument("--rounds", type=int, default=50)
    run_on_ranks(main_of_rank, parser.parse_args())


if __name__ == "__main__":
    main()
