from __future__ import annotations

import pytest

from torchext.scheduling import (
    Cluster,
    ClusterState,
    Job,
    Machine,
    Placement,
    TypeAware,
    comparative_advantage,
    fastest_type,
    packed,
    spread,
)


def _state(*free: int, size: int = 8) -> ClusterState:
    state = ClusterState(Cluster.uniform(len(free), size))
    for machine, left in enumerate(free):
        if left < size:
            state.start(Job(f"fill{machine}", 0.0, size - left), Placement(((machine, size - left),)))
    return state


def _gpus(placement: Placement | None) -> tuple[tuple[int, int], ...] | None:
    return None if placement is None else placement.gpus


@pytest.mark.parametrize(
    ("num_gpus", "per_node", "with_packed", "with_spread"),
    [
        (1, None, ((1, 1),), ((0, 1),)),
        (3, None, ((2, 3),), ((0, 3),)),
        (5, None, ((0, 5),), ((0, 5),)),
        (16, None, ((0, 8), (3, 8)), ((0, 8), (3, 8))),
        (19, None, ((0, 8), (3, 8), (2, 3)), ((0, 8), (3, 8), (2, 3))),
        (20, None, None, None),  # 21 are free, but never 4 beside two whole machines
        (2, 1, ((1, 1), (2, 1)), ((0, 1), (3, 1))),
        (6, 3, ((2, 3), (0, 3)), ((0, 3), (3, 3))),
        (8, 8, ((0, 8),), ((0, 8),)),
        (24, 8, None, None),
        (22, None, None, None),
    ],
)
def test_packed_takes_the_fullest_and_spread_the_emptiest(
    num_gpus: int,
    per_node: int | None,
    with_packed: tuple[tuple[int, int], ...] | None,
    with_spread: tuple[tuple[int, int], ...] | None,
) -> None:
    state = _state(8, 2, 3, 8)
    job = Job("a", 0.0, num_gpus, gpus_per_node=per_node)
    assert _gpus(packed(job, state)) == with_packed
    assert _gpus(spread(job, state)) == with_spread


def test_a_gang_falls_back_to_smaller_machines_when_the_large_ones_are_taken() -> None:
    state = ClusterState(Cluster((Machine("a", 8), Machine("b", 4), Machine("c", 4), Machine("d", 4))))
    state.start(Job("fill", 0.0, 1), Placement(((0, 1),)))
    assert _gpus(packed(Job("a", 0.0, 12), state)) == ((1, 4), (2, 4), (3, 4))


def _mixed() -> ClusterState:
    """Class x gains 5 times from the new type, class y hardly anything."""
    machines = (Machine("old0", 4, "old"), Machine("old1", 4, "old"), Machine("new0", 4, "new"))
    speeds = {"old": {"x": 1.0, "y": 1.0}, "new": {"x": 5.0, "y": 1.2}}
    return ClusterState(Cluster(machines, speeds))


def test_fastest_type_is_taken_first_and_the_next_when_it_is_full() -> None:
    rule, state = TypeAware(fastest_type), _mixed()
    assert _gpus(rule(Job("a", 0.0, 4, job_class="y"), state)) == ((2, 4),)
    state.start(Job("fill", 0.0, 1), Placement(((2, 1),)))
    assert _gpus(rule(Job("b", 0.0, 4, job_class="x"), state)) == ((0, 4),)


def test_comparative_advantage_leaves_fast_machines_to_those_who_gain() -> None:
    rule, state = TypeAware(comparative_advantage), _mixed()
    assert _gpus(rule(Job("a", 0.0, 4, job_class="x"), state)) == ((2, 4),)
    assert _gpus(rule(Job("b", 0.0, 4, job_class="y"), state)) == ((0, 4),)


def test_the_rule_within_a_type_is_free_and_several_types_serve_what_fits_in_none() -> None:
    state = _mixed()
    state.start(Job("fill", 0.0, 1), Placement(((0, 1),)))
    small, large = Job("a", 0.0, 1, job_class="y"), Job("b", 0.0, 8, job_class="x")
    assert _gpus(TypeAware(comparative_advantage, packed)(small, state)) == ((0, 1),)
    assert _gpus(TypeAware(comparative_advantage, spread)(small, state)) == ((1, 1),)
    assert _gpus(TypeAware(fastest_type)(large, state)) == ((1, 4), (2, 4))
