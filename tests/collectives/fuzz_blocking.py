"""Random programs with blocking calls in disorder, some of them deadlocked, against a model that knows which.

    python -m tests.collectives.fuzz_blocking --programs 1000 --world-size 3 --on-deadlock raise

The model plays each program out: a call is made without waiting, a wait ends once all have made the call whom this rank
needs for it. With "raise", a program that the model ends must end with the right values and no deadlock claimed, and in
one that it does not end each rank that is stuck there must get an error at that very call. With "defer", only waits in
barriers count, and the others are those of the first use. Fails with the program's seed.
"""

from __future__ import annotations

import argparse
import itertools
import random
import threading
from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import torchext
from tests.collectives.fuzz import LARGE, Program, Step, all_groups, issue
from tests.ranks import Rank, run_ranks
from torchext.collectives import CollectiveError, CollectiveMismatchError, DeadlockError, Options, without_collectives

Action = tuple[str, Step]  # "call" makes it, "wait" waits for it, "block" does both


def actions(program: Program, rank: int) -> list[Action]:
    """What a rank does: the steps nearly in one order, some blocking, and the waits for the others at the end."""
    shared = random.Random(f"{program.seed}/disorder")
    rng = random.Random(f"{program.seed}/{rank}/blocking")
    steps = [step for step in program.steps if rank in step.ranks()]
    num_swaps = rng.randint(0, 3) if shared.random() < 0.7 else 0
    for _ in range(num_swaps if len(steps) > 1 else 0):
        i = rng.randrange(len(steps) - 1)
        if steps[i].key != steps[i + 1].key:  # nothing tells those apart
            steps[i], steps[i + 1] = steps[i + 1], steps[i]
    blocking = [rng.random() < 0.6 for _ in steps]
    waits: list[Action] = [("wait", step) for step, blocks in zip(steps, blocking, strict=True) if not blocks]
    rng.shuffle(waits)
    return [("block" if blocks else "call", step) for step, blocks in zip(steps, blocking, strict=True)] + waits


def needs(step: Step, rank: int, engine: str) -> set[int]:
    """Who must have made a call before this rank's own is over; small parts travel with the call, if unordered."""
    everyone = set(step.ranks()) - {rank}
    root, small = step.members[step.root], step.size < LARGE[0] and engine == "preemptive"
    if step.kind in ("broadcast", "scatter", "send") and small:
        return everyone & {root}
    if step.kind in ("reduce", "gather") and small and rank != root:
        return set()
    return everyone


def stuck_at(program: Program, *, defer: bool, engine: str) -> dict[int, int]:
    """The model: for each rank that cannot end, the number of the action where it is stuck."""
    todo = {rank: actions(program, rank) for rank in range(program.world_size)}
    made: set[tuple[int, int]] = set()  # step, rank
    place = dict.fromkeys(todo, 0)
    moved = True
    while moved:
        moved = False
        for rank, list_of in todo.items():
            while place[rank] < len(list_of):
                what, step = list_of[place[rank]]
                if what != "wait" and (step.number, rank) not in made:
                    made.add((step.number, rank))
                    moved = True
                waits = what != "call" and (not defer or step.kind == "barrier")
                if waits and not all((step.number, other) in made for other in needs(step, rank, engine)):
                    break
                place[rank] += 1
                moved = True
    return {rank: place[rank] for rank, list_of in todo.items() if place[rank] < len(list_of)}


def run_program(program: Program, rank: int, groups: dict[tuple[int, ...], Any]) -> tuple[int | None, str]:
    """Runs this rank's part; returns where it failed, if it did, and how."""
    works: dict[int, Any] = {}
    results: list[tuple[Step, list[torch.Tensor], list[torch.Tensor]]] = []
    failed: tuple[int | None, str] = None, ""
    for i, (what, step) in enumerate(actions(program, rank)):
        try:
            if what == "wait":
                works[step.number].wait()
                continue
            with torchext.tag(f"{program.seed}/{step.tag}"):  # what a failed program leaves meets no later one
                work, outs, expected = issue(step, rank, groups[step.members], blocking=what == "block")
            works[step.number] = work
            results.append((step, outs, expected))
        except (DeadlockError, CollectiveMismatchError) as error:
            failed = i, str(error)
            break
    if failed[0] is None:
        for step, outs, expected in results:
            for out, want in zip(outs, expected, strict=True):
                assert torch.equal(out, want), f"seed {program.seed}, rank {rank}, {step}: got {out[:3]}"
    return failed


def gather_all(program: Program, rank: Rank, end: Any) -> None:
    """Waits until every rank has ended the program, or failed in it.

    It waits in a barrier, so that who still waits for this rank in the program forms a circle with it. All in it are
    told, and meet in the next barrier; who comes later finds that those before have failed, and follows.
    """

    def count(name: str, add: int = 0) -> int:
        number: int = rank.store.add(f"{program.seed}/{name}", add)
        return number

    for attempt in itertools.count():
        try:
            with torchext.tag(f"{program.seed}/{attempt}"):
                dist.barrier(group=end)
        except (DeadlockError, CollectiveMismatchError):
            count(f"{attempt}/failed", 1)
            continue
        # All have come to it, but some may have been told of the circle just before the last came.
        count(f"{attempt}/passed", 1)
        while (num_failed := count(f"{attempt}/failed")) + count(f"{attempt}/passed") < rank.world_size:
            threading.Event().wait(0.001)
        if num_failed == 0:
            return


def run_programs(
    rank: Rank, seed: int, num_programs: int, on_deadlock: Any, engine: Any = "preemptive"
) -> dict[str, int]:
    """Runs on each rank; compares with the model."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            without_collectives(thread)  # the harness's
    timeout = timedelta(seconds=30)
    dist.init_process_group(
        "dfccl",
        store=rank.store,
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=timeout,
        pg_options=Options(on_deadlock=on_deadlock, engine=engine),
    )
    groups = {members: dist.new_group(members, timeout=timeout) for members in all_groups(rank.world_size)}
    end = dist.new_group(timeout=timeout)
    counts: Counter[str] = Counter()
    for i in range(num_programs):
        program = Program(seed + i, rank.world_size)
        before = dist.group.WORLD.stats()  # type: ignore[union-attr]
        stuck = stuck_at(program, defer=on_deadlock == "defer", engine=engine)
        try:
            place, text = run_program(program, rank.rank, groups)
            gather_all(program, rank, end)
        except CollectiveError as error:
            raise AssertionError(f"seed {program.seed}, rank {rank.rank}, stuck in the model: {stuck}") from error
        after = dist.group.WORLD.stats()  # type: ignore[union-attr]
        what = f"seed {program.seed}, rank {rank.rank}: {place}, in the model {stuck}: {text}"
        counts["stuck"] += bool(stuck)
        counts["deferred"] += after.get("deferred", 0) > before.get("deferred", 0)
        if not stuck:
            assert place is None, what
            if on_deadlock == "raise":
                assert after["deadlocks"] == before["deadlocks"], what
        elif rank.rank in stuck and on_deadlock == "raise":
            assert place == stuck[rank.rank], what
    dist.destroy_process_group()
    return dict(counts)


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs random programs of blocking calls on real ranks.")
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--world-size", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--on-deadlock", choices=["raise", "defer"], default="raise")
    parser.add_argument("--engine", choices=["preemptive", "ordered"], default="preemptive")
    parser.add_argument("--deadline-s", type=float, default=3600.0, help="of the whole run")
    args = parser.parse_args()
    results = run_ranks(
        run_programs,
        args.world_size,
        args.seed,
        args.programs,
        args.on_deadlock,
        args.engine,
        store="tcp",
        deadline_s=args.deadline_s,
    )
    print(f"{args.programs} programs, as the model has it; on rank 0: {results[0]}")


if __name__ == "__main__":
    from tests.collectives import fuzz_blocking  # under the name by which the ranks find its functions

    fuzz_blocking.main()
