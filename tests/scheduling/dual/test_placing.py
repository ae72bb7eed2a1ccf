from __future__ import annotations

import math

import numpy as np
import pytest

from torchext.scheduling import (
    Cluster,
    ClusterState,
    Job,
    Machine,
    Observation,
    Placement,
    RecordedJob,
    packed,
    simulate,
    summarize,
    synthetic,
)
from torchext.scheduling.dual.heuristic import Placing, SpeedLearner, by_machine_mean, by_type_mean
from torchext.scheduling.dual.placing import Advantage
from torchext.scheduling.dual.speeds import MeanModel, Prediction


def _cluster(num_machines: int = 4, num_gpus: int = 4, **options: object) -> Cluster:
    machines = tuple(Machine(f"m{i}", num_gpus, "old" if i < num_machines / 2 else "new") for i in range(num_machines))
    return Cluster(machines, **options)  # type: ignore[arg-type]


def _seen(job_class: str, machine: int, speed: float, crowding: float = 0.0) -> Observation:
    placement = Placement(((machine, 1),))
    return Observation(Job("j", 0.0, 1, job_class=job_class), placement, speed, (crowding,), 0.0, 100.0)


class _Told:
    """A model that is told log speeds: class -> (M,)."""

    def __init__(self, means: dict[str, list[float]], sd: list[float] | None = None) -> None:
        self._means = means
        self._sd = sd

    def observe(self, observation: Observation) -> None:
        raise AssertionError("nothing to learn")

    def predict(self, job_class: str, now_s: float) -> Prediction:
        mean = np.array(self._means[job_class])
        return Prediction(mean, np.zeros(len(mean)) if self._sd is None else np.array(self._sd))


def test_means_approach_what_is_observed_and_start_from_the_tables() -> None:
    cluster = _cluster(speeds={"new": {"x": 2.0}})
    model = MeanModel(cluster, per_machine=True)
    assert model.predict("x", 0.0).mean.tolist() == pytest.approx([0.0, 0.0, math.log(2), math.log(2)])
    for _ in range(300):
        model.observe(_seen("x", 3, 1.0))
        model.observe(_seen("x", 2, 3.0))
    mean, sd = model.predict("x", 0.0)
    assert mean[2:].tolist() == pytest.approx([math.log(3), 0.0], abs=0.02)
    assert mean[:2].tolist() == [0.0, 0.0]
    assert sd[3] < 0.02 < sd[0]


def test_type_means_do_not_tell_machines_of_a_type_apart_and_teach_other_classes() -> None:
    model = MeanModel(_cluster(), per_machine=False)
    for _ in range(100):
        model.observe(_seen("x", 0, 0.5))
    assert model.predict("x", 0.0).mean[1] == pytest.approx(math.log(0.5), abs=0.05)
    assert model.predict("unseen", 0.0).mean[:2].tolist() == pytest.approx([math.log(0.5)] * 2, abs=0.05)
    assert model.predict("unseen", 0.0).mean[2:].tolist() == [0.0, 0.0]


def test_what_neighbours_cost_is_not_held_against_the_machine() -> None:
    model = MeanModel(_cluster(contention={"x": 0.5}), per_machine=True)
    for _ in range(200):
        model.observe(_seen("x", 0, 0.75, crowding=0.5))
    assert model.predict("x", 0.0).mean[0] == pytest.approx(0.0, abs=0.01)


def test_a_gang_tells_about_the_machine_that_is_expected_to_be_slowest() -> None:
    model = MeanModel(_cluster(), per_machine=True)
    for _ in range(50):
        model.observe(_seen("x", 1, 0.5))
        model.observe(_seen("x", 3, 1.0))
    before = model.predict("x", 0.0).mean.copy()
    gang = Job("gang", 0.0, 8, job_class="x")
    model.observe(Observation(gang, Placement(((1, 4), (3, 4))), 0.25, (0.0, 0.0), 0.0, 100.0))
    after = model.predict("x", 0.0).mean
    assert after[1] < before[1]
    assert after[3] == pytest.approx(before[3])


def test_the_fast_machine_is_left_to_the_class_that_gains_most_from_it() -> None:
    cluster = _cluster(2, 1)
    model = _Told({"steady": [0.0, 0.1], "eager": [-1.0, 1.0]})
    greedy, fair = Advantage(model, comparative=0.0), Advantage(model, comparative=1.0)
    steady = Job("s", 0.0, 1, job_class="steady")
    for advantage in (greedy, fair):
        for job_class in ("steady", "eager"):
            advantage.finished(Job("f", 0.0, 1, job_class=job_class))
    assert greedy(steady, ClusterState(cluster)).gpus == ((1, 1),)  # type: ignore[union-attr]
    assert fair(steady, ClusterState(cluster)).gpus == ((0, 1),)  # type: ignore[union-attr]
    placement = fair(Job("e", 0.0, 1, job_class="eager"), ClusterState(cluster))
    assert placement is not None
    assert placement.gpus == ((1, 1),)
    assert placement.speed == pytest.approx(math.e)


def test_thrift_prefers_speed_per_money() -> None:
    cluster = Cluster((Machine("dear", 1, price_per_gpu_hour=3.0), Machine("cheap", 1, price_per_gpu_hour=1.0)))
    job, state = Job("j", 0.0, 1, job_class="x"), ClusterState(cluster)
    for fast, chosen in ((2.0, 1), (4.0, 0)):
        advantage = Advantage(_Told({"x": [math.log(fast), 0.0]}), thrift=1.0)
        advantage.finished(job)
        placement = advantage(job, state)
        assert placement is not None
        assert placement.gpus == ((chosen, 1),)


def test_optimism_tries_the_unknown_and_caution_avoids_it() -> None:
    model = _Told({"x": [0.0, -0.1]}, sd=[0.0, 0.3])
    job = Job("j", 0.0, 1, job_class="x")
    chosen = {
        optimism: Advantage(model, optimism=optimism)(job, ClusterState(_cluster(2, 1)))
        for optimism in (-1.0, 0.0, 1.0)
    }
    assert [placement.gpus[0][0] for placement in chosen.values() if placement] == [0, 0, 1]
    assert chosen[1.0] is not None
    assert chosen[1.0].speed_sd == pytest.approx(0.3 * math.exp(-0.1))


@pytest.mark.parametrize("num_gpus", [1, 4, 6, 8, 16, 17])
def test_fits_exactly_when_packed_does(num_gpus: int) -> None:
    cluster = _cluster()
    state = ClusterState(cluster)
    state.start(Job("there", 0.0, 3), Placement(((2, 3),)))
    advantage = by_machine_mean(cluster)
    job = Job("j", 0.0, num_gpus, job_class="x")
    ours, theirs = advantage(job, state), packed(job, state)
    assert (ours is None) == (theirs is None)
    if ours is not None and theirs is not None:
        assert [gpus for _, gpus in ours.gpus] == [gpus for _, gpus in theirs.gpus]
        assert len({index for index, _ in ours.gpus}) == len(ours.gpus)
        assert all(gpus <= state.free[index] for index, gpus in ours.gpus)


def test_learning_machines_beats_learning_types_beats_knowing_nothing() -> None:
    random = np.random.default_rng(5)
    submit_s = np.cumsum(random.exponential(250.0, 1500))
    trace = synthetic.classify(
        [
            RecordedJob(Job(f"j{i}", float(s), 1, f"t{i % 7}"), float(d))
            for i, (s, d) in enumerate(zip(submit_s, random.gamma(2.0, 5000.0, 1500), strict=True))
        ],
        seed=5,
    )
    cluster = synthetic.make_cluster(9)

    def jct(placing: Placing) -> float:
        policy = SpeedLearner(placing)
        world = synthetic.SyntheticWorld(cluster, 5)
        return float(summarize(simulate(trace, cluster, policy, world=world))["jct_s"]["mean"])

    nothing = jct(lambda cluster: Advantage(_Silent(cluster, per_machine=False)))
    kinds, machines = jct(by_type_mean), jct(by_machine_mean)
    assert machines < kinds < nothing


class _Silent(MeanModel):
    """Learns nothing."""

    def observe(self, observation: Observation) -> None:
        pass


def test_what_is_lost_by_starting_now_is_told_against_what_may_be_hoped_for() -> None:
    model = _Told({"x": [-2.0, -1.0, 0.0, 0.5]})
    state = ClusterState(_cluster())
    state.now_s = 1800.0
    advantage = Advantage(model)
    job = Job("j", 0.0, 4, job_class="x")
    # The three quarter quantile of four machines, rounded down, is the third from below.
    assert advantage.lost(job, state) == 0.0
    state.start(Job("a", 0.0, 1), Placement(((3, 1),)))
    state.start(Job("b", 0.0, 1), Placement(((2, 1),)))
    assert advantage.lost(job, state) == pytest.approx(1.0)
    assert advantage.lost(Job("gang", 0.0, 8, job_class="x"), state) == pytest.approx(2.0)  # its slowest machine
    assert advantage.lost(Job("too large", 0.0, 12, job_class="x"), state) == 0.0
    assert advantage.lost(Job("small", 0.0, 3, job_class="x"), state) == 0.0
    features = advantage.hold_features(job, state, forecast_h=2.0)
    assert features is not None
    cost_h = 2.0 * (math.e - 1.0)
    waited_h = 0.5 + 300 / 3600
    urge = min(1.0 + math.log(0.4), math.log(3.0 * cost_h / waited_h))
    assert features.tolist() == pytest.approx([urge, 1.0, math.log(cost_h), math.log(waited_h)], rel=1e-6)
    # It has waited for three times as long as it would lose: enough.
    state.now_s = 3600.0 * (3 * cost_h + 0.01)
    late = advantage.hold_features(job, state, forecast_h=2.0)
    assert late is not None
    assert late[0] < 0
    assert advantage.hold_features(Job("small", 0.0, 3, job_class="x"), state, forecast_h=2.0) is None


def test_nobody_waits_for_a_machine_beyond_its_price() -> None:
    machines = (
        Machine("slow", 1, price_per_gpu_hour=1.0),
        Machine("fast", 1, price_per_gpu_hour=9.0),
        Machine("other", 1, price_per_gpu_hour=9.0),
    )
    state = ClusterState(Cluster(machines))
    for index in (1, 2):
        state.start(Job(f"r{index}", 0.0, 1), Placement(((index, 1),)))
    advantage = Advantage(_Told({"x": [0.0, 3.0, 3.0]}))
    assert advantage.lost(Job("j", 0.0, 1, job_class="x"), state) == pytest.approx(3.0)
    assert advantage.lost(Job("j", 0.0, 1, job_class="x", max_price_per_gpu_hour=2.0), state) == 0.0
