"""The simulated ways to execute deadlock exactly where graphs of what waits for what, and all schedules, say so."""

from __future__ import annotations

import importlib.util
import itertools
import random
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("deadlocks", Path(__file__).with_name("deadlocks.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


simulation = _load()
SYNC = simulation.SYNC
GROUPS = [(0, 1), (1, 2), (0, 2), (0, 1, 2)]


def programs(syncs: float, num: int = 300) -> list[Any]:
    rng = random.Random(7)
    return [
        simulation.random_program(rng.sample(GROUPS, rng.randint(1, 4)), 3, rng.randint(1, 2), 0.3, syncs, rng)
        for _ in range(num)
    ]


def waits_in_a_circle(program: Any, *, one_by_one: bool) -> bool:
    """Whether what must come before what has a cycle; ``one_by_one``: ranks launch in the order in which they issue."""
    before: dict[Any, set[Any]] = {}
    for rank, order in enumerate(program.orders):
        issued: list[int] = []
        last: Any = ("start", rank)
        for place, what in enumerate(order):
            step = ("step", rank, place)
            before[step] = {last} | ({("done", c) for c in issued} if what == SYNC else set())
            if what != SYNC:
                start = ("launch", rank, what)
                before[start] = {step} | ({("done", issued[-1])} if one_by_one and issued else set())
                before.setdefault(("done", what), set()).add(start)
                issued.append(what)
            last = step
    try:
        TopologicalSorter(before).prepare()
    except CycleError:
        return True
    return False


@pytest.mark.parametrize("syncs", [0.0, 0.4])
def test_it_finds_the_deadlocks_that_the_graph_has(syncs: float) -> None:
    found = dict.fromkeys(("fifo", "preemptive"), 0)
    for number, program in enumerate(programs(syncs)):
        for name, one_by_one in (("fifo", True), ("preemptive", False), ("ready, ordered", False)):
            got = simulation.deadlocks(program, simulation.WAYS[name], random.Random(number))
            assert got == waits_in_a_circle(program, one_by_one=one_by_one), (name, program)
            found[name] = found.get(name, 0) + got
    assert 0 < found["fifo"] < 300
    assert (found["preemptive"] > 0) == (syncs > 0)


def all_schedules(program: Any) -> set[bool]:
    """Whether the program can end, and whether it can stop before, if ready collectives are launched in one order."""
    num_ranks, num = len(program.orders), len(program.members)
    outcomes = set()
    # How far each rank is in its program; the ready ones in order; how many of its own each rank has launched.
    start: Any = ((0,) * num_ranks, (), (0,) * num_ranks)
    seen, todo = {start}, [start]
    while todo:
        positions, ready, launched = todo.pop()
        queues = [[c for c in ready if rank in program.members[c]] for rank in range(num_ranks)]
        done = {c for c in ready if all(queues[rank].index(c) < launched[rank] for rank in program.members[c])}
        nexts = []
        for rank, order in enumerate(program.orders):
            place = positions[rank]
            if place < len(order):
                before = [c for c in order[:place] if c != SYNC]
                if order[place] != SYNC or done.issuperset(before):
                    moved = (*positions[:rank], place + 1, *positions[rank + 1 :])
                    what = order[place]
                    became = what != SYNC and all(what in program.orders[r][: moved[r]] for r in program.members[what])
                    nexts.append((moved, (*ready, what) if became else ready, launched))
            taken = launched[rank]
            if taken < len(queues[rank]) and (taken == 0 or queues[rank][taken - 1] in done):
                nexts.append((positions, ready, (*launched[:rank], taken + 1, *launched[rank + 1 :])))
        if not nexts:
            outcomes.add(len(done) == num)
        for state in nexts:
            if state not in seen:
                seen.add(state)
                todo.append(state)
    return outcomes


@pytest.mark.parametrize("syncs", [0.0, 0.4])
def test_no_schedule_of_ready_collectives_in_one_order_deadlocks_unless_all_do(syncs: float) -> None:
    small = [program for program in programs(syncs, 120) if len(program.members) <= 4]
    assert len(small) > 40
    for program in small:
        assert all_schedules(program) == {not waits_in_a_circle(program, one_by_one=False)}, program


def test_some_orders_are_worse_than_none() -> None:
    """Orders found when collectives are issued, or by each rank for itself, deadlock where none need be."""
    for name in ("ready, locally", "ordered at issue"):
        lost = [
            program
            for number, program in enumerate(programs(0.4))
            if simulation.deadlocks(program, simulation.WAYS[name], random.Random(number))
            and not waits_in_a_circle(program, one_by_one=False)
        ]
        assert lost, name


def test_groups_are_those_of_megatron() -> None:
    groups = simulation.megatron_groups(tp=2, dp=3, pp=2)
    assert len(groups) == 6 + 4 + 6
    assert {(0, 1), (0, 2, 4), (0, 6), (7, 9, 11)} <= set(groups)
    for rank, size in itertools.product(range(12), (2, 3)):
        assert sum(rank in group for group in groups if len(group) == size) == (2 if size == 2 else 1)


def test_the_command_reports_each_way() -> None:
    command = [sys.executable, str(Path(__file__).with_name("deadlocks.py")), "--programs", "2", "--each", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert all(way in done.stdout for way in simulation.WAYS)
    assert len(done.stdout.splitlines()) == 2 + 8
