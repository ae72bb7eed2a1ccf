from __future__ import annotations

import math

import numpy as np
import pytest

from torchext.scheduling import Cluster, ClusterState, Job, Placement, RecordedJob, synthetic

_START_S = 1.5e9


def _world(seed: int = 0, num_machines: int = 30) -> synthetic.SyntheticWorld:
    return synthetic.SyntheticWorld(synthetic.make_cluster(num_machines), seed, _START_S)


def test_the_same_seed_gives_the_same_world_in_whatever_order_it_is_asked() -> None:
    questions = [("a3c", machine, _START_S + 3600.0 * hour) for machine in (0, 7, 29) for hour in (0, 400, 3, 80)]
    one, other = _world(3), _world(3)
    forwards = {q: one.machine_speed(*q) for q in questions}
    backwards = {q: other.machine_speed(*q) for q in reversed(questions)}
    assert forwards == backwards
    assert forwards != {q: _world(4).machine_speed(*q) for q in questions}


def test_speeds_change_at_the_moments_announced_and_at_no_other() -> None:
    world = _world()
    for machine in range(5):
        now_s = _START_S
        for _ in range(50):
            next_s = world.next_change_s(machine, now_s)
            assert now_s < next_s <= now_s + synthetic.STEP_S + 1e-6
            before = world.machine_speed("lm-10", machine, now_s)
            assert world.machine_speed("lm-10", machine, math.nextafter(next_s, 0)) == before
            assert world.machine_speed("lm-10", machine, next_s) != before
            now_s = next_s


def test_spread_drift_and_stragglers_have_the_sizes_stated() -> None:
    world = _world(num_machines=90)
    times_s = _START_S + 86400.0 * np.arange(0, 200, 4)
    logs = np.array(
        [
            [
                math.log(world.machine_speed("a3c", machine, float(now_s)) / synthetic.SPEEDS["a3c"][spec.type])
                for now_s in times_s
            ]
            for machine, spec in enumerate(world.cluster.machines)
        ]
    )
    straggling = logs < math.log(synthetic.STRAGGLER_SPEEDS[1]) - 0.1
    # Slow ones that are but little slow hide among the others, so a bit less than all are found.
    assert 0.05 < straggling.mean() < 0.12
    sd = math.sqrt(
        synthetic.RACK_SD**2 + synthetic.MACHINE_SD**2 + synthetic.MACHINE_CLASS_SD**2 + synthetic.DRIFT_SD**2
    )
    middle = np.percentile(logs, 75) - np.percentile(logs, 25)
    assert middle / 1.349 == pytest.approx(sd, rel=0.25)


def test_neighbours_and_the_slowest_machine_decide() -> None:
    world = _world()
    state = ClusterState(world.cluster)
    state.now_s = _START_S
    gang, neighbour = Job("gang", 0.0, 12, job_class="a3c"), Job("other", 0.0, 4)
    placement = Placement(((0, 8), (29, 4)))
    state.start(gang, placement)
    alone = world.speed(gang, placement, state)
    own = alone / min(world.machine_speed("a3c", machine, _START_S) for machine in (0, 29))
    assert abs(math.log(own)) < 5 * synthetic.JOB_SD
    state.start(neighbour, Placement(((29, 4),)))
    crowded = world.machine_speed("a3c", 29, _START_S) * (1 - synthetic.CONTENTION["a3c"])
    slowest = min(world.machine_speed("a3c", 0, _START_S), crowded)
    assert world.speed(gang, placement, state) == pytest.approx(own * slowest)


def test_tenants_have_favourite_classes_and_given_ones_stay() -> None:
    jobs = [RecordedJob(Job(f"j{i}", 0.0, 1, f"t{i % 4}"), 1.0) for i in range(400)]
    jobs.append(RecordedJob(Job("own", 0.0, 1, "t0", "mine"), 1.0))
    classified = synthetic.classify(jobs, 0)
    assert classified[-1].job.job_class == "mine"
    assert [r.job.job_class for r in synthetic.classify(jobs, 0)] == [r.job.job_class for r in classified]
    kinds = [r.job.job_class for r in classified[:400:4]]
    assert set(kinds) <= set(synthetic.SPEEDS)
    assert max(kinds.count(kind) for kind in set(kinds)) > 2 * len(kinds) / len(synthetic.SPEEDS)


def test_the_cluster_tells_prices_and_contention_but_no_speeds() -> None:
    cluster = synthetic.make_cluster(9)
    assert [machine.type for machine in cluster.machines] == ["k80"] * 3 + ["p100"] * 3 + ["v100"] * 3
    assert cluster.speed("a3c", "k80") == 1.0
    assert cluster.contention_of("a3c") == synthetic.CONTENTION["a3c"]
    expected = np.mean([speed for table in synthetic.SPEEDS.values() for speed in table.values()])
    assert synthetic.mean_speed(cluster) == pytest.approx(expected)
    assert synthetic.mean_speed(Cluster.uniform(2, 8)) == 1.0
