"""Random programs in which each rank issues its collectives in an order of its own, with what they must give.

As a command it runs many of them, on real processes:

    python -m tests.collectives.fuzz --programs 10000 --world-size 4 --seed 0

It prints how many programs and collectives ran and how often the engine preempted, and fails with the program's seed at
the first wrong value, error or hang.
"""

from __future__ import annotations

import argparse
import itertools
import random
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import torchext
from tests.ranks import Rank, run_ranks

Tensor = torch.Tensor

KINDS = [
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "send",
    "barrier",
]
# int64 sums are exact in any order, so the model below need not know the engine's.
DTYPE = torch.int64
# Elements; large ones go through staging memory, but the smaller of them between two ranks, through the rings.
SMALL, LARGE = [1, 2, 7, 100], [20_011, 70_001]


@dataclass(frozen=True)
class Step:
    """One collective of a program, as every rank knows it."""

    number: int
    members: tuple[int, ...]  # the group
    kind: str
    size: int
    root: int  # place among the members; for send, the sender
    peer: int  # for send, the receiver
    tag: str

    @property
    def key(self) -> tuple[Any, ...]:
        """Steps with equal keys are the same to the engine: each rank issues them in the order of their numbers."""
        if self.kind == "send":
            return self.members, self.kind, self.root, self.peer, self.tag
        root = self.root if self.kind in ("reduce", "broadcast", "gather", "scatter") else -1
        return self.members, self.kind, 0 if self.kind == "barrier" else self.size, root, self.tag

    def ranks(self) -> tuple[int, ...]:
        """Who takes part."""
        return (self.members[self.root], self.members[self.peer]) if self.kind == "send" else self.members


@dataclass
class Program:
    """A random program; the same on all ranks for one seed."""

    seed: int
    world_size: int
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        groups = all_groups(self.world_size)
        large = rng.random() < 0.3  # most programs stress matching, some the data path
        for number in range(rng.randint(3, 24)):
            members = rng.choice(groups)
            root, peer = rng.sample(range(len(members)), 2)
            size = rng.choice(LARGE if large and rng.random() < 0.4 else SMALL)
            tag = f"t{number}" if rng.random() < 0.2 else ""
            self.steps.append(Step(number, members, rng.choice(KINDS), size, root, peer, tag))

    def order(self, rank: int) -> list[Step]:
        """The order of this rank: random, but for steps that nothing tells apart."""
        rng = random.Random(f"{self.seed}/{rank}")
        steps = [step for step in self.steps if rank in step.ranks()]
        rng.shuffle(steps)
        places: dict[Any, list[int]] = {}
        for i, step in enumerate(steps):
            places.setdefault(step.key, []).append(i)
        for same in places.values():
            for i, step in zip(same, sorted((steps[i] for i in same), key=lambda step: step.number), strict=True):
                steps[i] = step
        return steps


def all_groups(world_size: int) -> list[tuple[int, ...]]:
    """All sets of two or more ranks, overlapping ones included."""
    return [c for n in range(2, world_size + 1) for c in itertools.combinations(range(world_size), n)]


def data(step: Step, member: int, part: int = 0) -> Tensor:
    """What a member puts into a step; any rank can compute it."""
    start = 7919 * step.number + 104_729 * member + 1_299_709 * part
    return torch.arange(start, start + step.size, dtype=DTYPE) % 10_007


def issue(step: Step, rank: int, group: Any, *, blocking: bool = False) -> tuple[Any, list[Tensor], list[Tensor]]:
    """Issues a step; returns the work (None if blocking), where its results will be and what they must be."""
    n, me = len(step.members), step.members.index(rank)
    mine, root = data(step, me), step.members[step.root]
    everyone = [data(step, m) for m in range(n)]
    total = torch.stack(everyone).sum(0)
    options: dict[str, Any] = {"group": group, "async_op": not blocking}
    if step.kind == "all_reduce":
        return dist.all_reduce(mine, **options), [mine], [total]
    if step.kind == "reduce":
        work = dist.reduce(mine, root, **options)
        return work, [mine] if me == step.root else [], [total] if me == step.root else []
    if step.kind == "broadcast":
        return dist.broadcast(mine, root, **options), [mine], [data(step, step.root)]
    if step.kind == "all_gather":
        outs = [torch.full_like(mine, -1) for _ in range(n)]
        return dist.all_gather(outs, mine, **options), outs, everyone
    if step.kind == "gather":
        outs = [torch.full_like(mine, -1) for _ in range(n)] if me == step.root else []
        work = dist.gather(mine, outs or None, root, **options)
        return work, outs, everyone if me == step.root else []
    if step.kind == "scatter":
        parts = [data(step, step.root, c) for c in range(n)] if me == step.root else None
        return (
            dist.scatter(out := torch.full_like(mine, -1), parts, root, **options),
            [out],
            [data(step, step.root, me)],
        )
    if step.kind == "reduce_scatter":
        out = torch.full_like(mine, -1)
        work = dist.reduce_scatter(out, [data(step, me, c) for c in range(n)], **options)
        return work, [out], [torch.stack([data(step, m, me) for m in range(n)]).sum(0)]
    if step.kind == "all_to_all":
        out = torch.full((n * step.size,), -1, dtype=DTYPE)
        work = dist.all_to_all_single(out, torch.cat([data(step, me, c) for c in range(n)]), **options)
        return work, [out], [torch.cat([data(step, m, me) for m in range(n)])]
    if step.kind == "send":
        peer, out = step.members[step.peer], torch.full_like(mine, -1)
        if me == step.root:
            return (dist.send(mine, peer, group) if blocking else dist.isend(mine, peer, group)), [], []
        work = dist.recv(out, root, group) if blocking else dist.irecv(out, root, group)
        return work, [out], [data(step, step.root)]
    return dist.barrier(**options), [], []


def run_program(program: Program, rank: int, groups: dict[tuple[int, ...], Any]) -> int:
    """Runs this rank's part, waits in yet another random order and compares; returns the number of collectives."""
    rng = random.Random(f"{program.seed}/{rank}/waits")
    running = []
    for step in program.order(rank):
        with torchext.tag(step.tag) if step.tag else torchext.tag("untagged"):
            running.append((step, *issue(step, rank, groups[step.members])))
    rng.shuffle(running)
    for step, work, outs, expected in running:
        try:
            work.wait()
        except Exception as error:
            raise AssertionError(f"seed {program.seed}, rank {rank}, {step}") from error
        for out, want in zip(outs, expected, strict=True):
            assert torch.equal(out, want), f"seed {program.seed}, rank {rank}, {step}: got {out[:3]}, not {want[:3]}"
    return len(running)


def run_programs(rank: Rank, seed: int, num_programs: int, timeout_s: float) -> dict[str, int]:
    """Runs on each rank; ranks do not wait for each other between programs."""
    groups = {
        members: dist.new_group(members, timeout=timedelta(seconds=timeout_s))
        for members in all_groups(rank.world_size)
    }
    issued = 0
    for i in range(num_programs):
        issued += run_program(Program(seed + i, rank.world_size), rank.rank, groups)
    stats: dict[str, int] = dist.group.WORLD.stats()  # type: ignore[union-attr]
    assert stats["queue_depth"] == 0
    assert stats.get("failed", 0) == 0
    assert stats.get("completed", issued) == issued
    return stats


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs random programs in disorder on real ranks.")
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=["preemptive", "ordered"], default="preemptive")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="of each collective")
    parser.add_argument("--deadline-s", type=float, default=3600.0, help="of the whole run")
    args = parser.parse_args()
    results = run_ranks(
        run_programs,
        args.world_size,
        args.seed,
        args.programs,
        args.timeout_s,
        backend="dfccl",
        env={"TORCHEXT_DFCCL_ENGINE": args.engine},
        deadline_s=args.deadline_s,
    )
    issued, preempted = (sum(stats.get(name, 0) for stats in results) for name in ("issued", "preemptions"))
    print(f"{args.programs} programs, {issued} calls, {preempted} preemptions: all values right")


if __name__ == "__main__":
    from tests.collectives import fuzz  # under the name by which the ranks find its functions

    fuzz.main()
