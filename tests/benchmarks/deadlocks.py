"""How often programs deadlock whose ranks issue collectives in slightly different orders; simulated, nothing runs.

    python tests/benchmarks/deadlocks.py [--tp 4 --dp 2 --pp 2] [--disorder 0 0.01] [--syncs 0 0.01]

After the simulation in "Comprehensive Deadlock Prevention for GPU Collective Communication" (EuroSys 2025). Ranks form
tensor-, data- and pipeline-parallel groups as in Megatron. A program is one sequence of collectives on these groups, of
which each rank issues its own, asynchronously; with probability ``disorder`` it swaps one with its next, and with
probability ``syncs`` it waits for all it has issued so far. The columns are ways to execute them:

    fifo             one after the other in the order of issue, as on one stream
    ready, locally   those that all members have issued, one after the other, in the order in which the rank heard of it
    ordered at issue in an order agreed on from proposals that the members make when they issue (Skeen)
    ready, ordered   those that all members have issued, in one order on all ranks: torchext's ordered engine
    preemptive       all that are issued, side by side: torchext's preemptive engine

and the figures per cent of programs that deadlock. Where the last two are not 0, ranks wait for each other in a circle,
and no order could help.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SYNC = -1  # in a rank's sequence: wait for all that it has issued


@dataclass(frozen=True)
class Program:
    """Collectives by number: who takes part in each, and what each rank does in its order."""

    members: tuple[tuple[int, ...], ...]
    orders: tuple[tuple[int, ...], ...]


def megatron_groups(tp: int, dp: int, pp: int) -> list[tuple[int, ...]]:
    """The groups of more than one rank; ranks count through tp first, then dp, then pp."""

    def rank(t: int, d: int, p: int) -> int:
        return t + tp * (d + dp * p)

    lines = (
        [tuple(rank(t, d, p) for t in range(tp)) for d in range(dp) for p in range(pp)]
        + [tuple(rank(t, d, p) for d in range(dp)) for t in range(tp) for p in range(pp)]
        + [tuple(rank(t, d, p) for p in range(pp)) for t in range(tp) for d in range(dp)]
    )
    return [line for line in lines if len(line) > 1]


def random_program(
    groups: Sequence[tuple[int, ...]], num_ranks: int, num_each: int, disorder: float, syncs: float, rng: random.Random
) -> Program:
    """``num_each`` collectives on each group in one random sequence, with each rank's deviations from it."""
    members = [group for group in groups for _ in range(num_each)]
    rng.shuffle(members)
    orders = []
    for rank in range(num_ranks):
        order = [number for number, group in enumerate(members) if rank in group]
        for i in range(len(order) - 1):
            if rng.random() < disorder:
                order[i], order[i + 1] = order[i + 1], order[i]
        orders.append(tuple(itertools.chain(*((c, SYNC) if rng.random() < syncs else (c,) for c in order))))
    return Program(tuple(members), tuple(orders))


class Execution:
    """What has happened so far. Each way to execute says what a rank may launch next."""

    def __init__(self, program: Program, rng: random.Random) -> None:
        self.program = program
        self.rng = rng
        num_ranks = len(program.orders)
        self.position = [0] * num_ranks
        self.issued: list[list[int]] = [[] for _ in range(num_ranks)]  # by each rank, in its order
        self.launched: list[list[int]] = [[] for _ in range(num_ranks)]
        self.heard: list[list[int]] = [[] for _ in range(num_ranks)]  # of what is ready, in the order of hearing it
        self.num_issued = [0] * len(program.members)
        self.num_launched = [0] * len(program.members)
        self.ready: list[int] = []  # issued by all members, in the order of becoming so
        self.clock = [0] * num_ranks
        self.proposals: list[dict[int, int]] = [{} for _ in program.members]

    def done(self, collective: int) -> bool:
        return self.num_launched[collective] == len(self.program.members[collective])

    def issue(self, rank: int) -> bool:
        """Goes on in the rank's program as far as it does not wait."""
        order = self.program.orders[rank]
        moved = False
        while self.position[rank] < len(order):
            what = order[self.position[rank]]
            if what == SYNC:
                if not all(self.done(c) for c in self.issued[rank]):
                    break
            else:
                self.issued[rank].append(what)
                self.num_issued[what] += 1
                self.clock[rank] = max(self.clock[rank], max(self.proposals[what].values(), default=0)) + 1
                self.proposals[what][rank] = self.clock[rank]
                if self.num_issued[what] == len(self.program.members[what]):
                    self.ready.append(what)
                    for member in self.program.members[what]:
                        # News of it travels: it may come before or after that of others.
                        heard = self.heard[member]
                        heard.insert(self.rng.randint(max(0, len(heard) - 2), len(heard)), what)
            self.position[rank] += 1
            moved = True
        return moved

    def launch(self, rank: int, collective: int) -> None:
        self.launched[rank].append(collective)
        self.num_launched[collective] += 1

    def idle(self, rank: int) -> bool:
        """Whether what the rank has launched is done: the next cannot start before."""
        return not self.launched[rank] or self.done(self.launched[rank][-1])


def fifo(run: Execution, rank: int) -> list[int]:
    return run.issued[rank][len(run.launched[rank]) :][:1] if run.idle(rank) else []


def ready_locally(run: Execution, rank: int) -> list[int]:
    return [c for c in run.heard[rank] if c not in run.launched[rank]][:1] if run.idle(rank) else []


def ordered_at_issue(run: Execution, rank: int) -> list[int]:
    """The first by place, which is known once all members have proposed; until then it may still be the first."""
    if not run.idle(rank):
        return []
    waiting = [c for c in run.issued[rank] if c not in run.launched[rank]]
    first = min(waiting, key=lambda c: (max(run.proposals[c].values()), c), default=None)
    return [] if first is None or first not in run.ready else [first]


def ready_ordered(run: Execution, rank: int) -> list[int]:
    own = (c for c in run.ready if rank in run.program.members[c])
    return [c for c in own if c not in run.launched[rank]][:1] if run.idle(rank) else []


def preemptive(run: Execution, rank: int) -> list[int]:
    return [c for c in run.issued[rank] if c not in run.launched[rank]]


WAYS: dict[str, Callable[[Execution, int], list[int]]] = {
    "fifo": fifo,
    "ready, locally": ready_locally,
    "ordered at issue": ordered_at_issue,
    "ready, ordered": ready_ordered,
    "preemptive": preemptive,
}


def deadlocks(program: Program, way: Callable[[Execution, int], list[int]], rng: random.Random) -> bool:
    """Executes the program, ranks taking turns at random; whether it stops before its end."""
    run = Execution(program, rng)
    ranks = list(range(len(program.orders)))
    moved = True
    while moved:
        moved = False
        rng.shuffle(ranks)
        for rank in ranks:
            moved |= run.issue(rank)
            for collective in way(run, rank):
                run.launch(rank, collective)
                moved = True
    return not all(map(run.done, range(len(program.members))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--each", type=int, default=10, help="collectives on each group")
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--disorder", type=float, nargs="+", default=[0.0, 0.001, 0.01, 0.1])
    parser.add_argument("--syncs", type=float, nargs="+", default=[0.0, 0.01])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    num_ranks = options.tp * options.dp * options.pp
    groups = megatron_groups(options.tp, options.dp, options.pp)
    print(
        f"{num_ranks} ranks, {len(groups)} groups, {options.each} collectives on each, {options.programs} programs; %"
    )
    print(f"{'disorder':>8} {'syncs':>6}  " + "  ".join(WAYS))
    for syncs, disorder in itertools.product(options.syncs, options.disorder):
        count = dict.fromkeys(WAYS, 0)
        for number in range(options.programs):
            rng = random.Random(f"{options.seed}/{syncs}/{disorder}/{number}")
            program = random_program(groups, num_ranks, options.each, disorder, syncs, rng)
            for name, way in WAYS.items():
                count[name] += deadlocks(program, way, rng)
        cells = (f"{100 * n / options.programs:{len(name)}.1f}" for name, n in count.items())
        print(f"{disorder:8g} {syncs:6g}  " + "  ".join(cells), flush=True)


if __name__ == "__main__":
    main()
