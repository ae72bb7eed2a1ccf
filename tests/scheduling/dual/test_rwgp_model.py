from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from torchext.scheduling import Cluster, Job, Machine, Observation, Placement
from torchext.scheduling.dual import rwgp_model
from torchext.scheduling.dual.rwgp import Observations, Posterior, WalkKernel, aggregate, cliques, walks
from torchext.scheduling.dual.rwgp_model import RWGP

_DAY_S = 86400.0


def _cluster(num_machines: int = 12) -> Cluster:
    machines = tuple(
        Machine(f"m{i}", 8, "old" if i < num_machines // 2 else "new", f"r{i // 3}") for i in range(num_machines)
    )
    return Cluster(machines, speeds={"new": {"x": 2.0}})


def _seen(job_class: str, machine: int, speed: float, end_s: float = 1000.0) -> Observation:
    job = Job("j", 0.0, 1, job_class=job_class)
    return Observation(job, Placement(((machine, 1),)), speed, (0.0,), end_s - 500.0, end_s)


def _random_observations(num: int, seed: int = 0, every_s: float = 0.0) -> list[Observation]:
    random = np.random.default_rng(seed)
    return [
        _seen(
            "xyz"[random.integers(3)], int(random.integers(12)), math.exp(random.normal(0, 0.3)), 1000.0 + i * every_s
        )
        for i in range(num)
    ]


def _from_scratch(observations: list[Observation], now_s: float) -> Posterior:
    """The model before its first fit, written out."""
    machines = _cluster().machines
    by_type = walks(cliques([machine.type for machine in machines]), 2)
    everywhere, by_rack = walks(cliques([0] * 12), 2), walks(cliques([machine.rack for machine in machines]), 2)
    classes = list(dict.fromkeys(o.job.job_class for o in observations))
    kernel = WalkKernel(torch.stack([everywhere, by_type, by_rack]), 0)
    for _ in classes:
        kernel = kernel.with_class()
    machine = [o.placement.gpus[0][0] for o in observations]
    tables = [2.0 if o.job.job_class == "x" and m >= 6 else 1.0 for o, m in zip(observations, machine, strict=True)]
    seen = Observations(
        torch.tensor(machine),
        torch.tensor([classes.index(o.job.job_class) for o in observations]),
        torch.tensor([math.log(o.speed / t) for o, t in zip(observations, tables, strict=True)], dtype=torch.float64),
        torch.tensor([o.end_s for o in observations], dtype=torch.float64),
    )
    return Posterior(kernel, aggregate(kernel, seen, now_s))


@pytest.mark.parametrize("num", [1, 20, 99])
def test_online_is_the_same_as_from_scratch(num: int) -> None:
    observations = _random_observations(num)
    model = RWGP(_cluster())
    for observation in observations:
        model.observe(observation)
    expected = _from_scratch(observations, 1000.0)
    for number, job_class in enumerate(dict.fromkeys(o.job.job_class for o in observations)):
        table = np.log([2.0 if job_class == "x" and i >= 6 else 1.0 for i in range(12)])
        mean, sd = model.predict(job_class, 1000.0)
        assert mean == pytest.approx(expected.mean[:, number].numpy() + table, abs=1e-8)
        assert sd == pytest.approx(expected.variance[:, number].sqrt().numpy(), abs=1e-8)


def test_repeated_cells_are_added_up_now_and_then_without_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    observations = _random_observations(90)
    means = []
    for spare in (0, 1000):
        monkeypatch.setattr(rwgp_model, "_SPARE_ROWS", spare)
        model = RWGP(_cluster())
        for observation in observations:
            model.observe(observation)
        means.append(model.predict("x", 1000.0).mean)
    assert means[0] == pytest.approx(means[1], abs=1e-8)


def test_ages_of_running_sums_stay_close_to_the_truth() -> None:
    observations = _random_observations(99, every_s=3600.0)
    model = RWGP(_cluster())
    for observation in observations:
        model.observe(observation)
    now_s = observations[-1].end_s
    expected = _from_scratch(observations, now_s)
    number = list(dict.fromkeys(o.job.job_class for o in observations)).index("y")
    # Ages may be old by a twentieth of the kernel's memory of ten days.
    assert model.predict("y", now_s).mean == pytest.approx(expected.mean[:, number].numpy(), abs=0.02)


def test_what_was_seen_long_ago_is_forgotten() -> None:
    model = RWGP(_cluster())
    for _ in range(50):
        model.observe(_seen("x", 0, 0.3))
    near = model.predict("x", 1000.0)
    far = model.predict("x", 1000.0 + 400 * _DAY_S)
    assert near.mean[0] == pytest.approx(math.log(0.3), abs=0.1)
    assert far.mean[0] == pytest.approx(0.0, abs=1e-3)
    assert far.sd[0] > 3 * near.sd[0]


def test_a_slow_machine_casts_doubt_on_its_rack_first() -> None:
    model = RWGP(_cluster())
    for _ in range(20):
        model.observe(_seen("x", 0, 0.5))
    mean, sd = model.predict("x", 1000.0)
    assert mean[0] < mean[1] < mean[4] < mean[9] - math.log(2)
    assert sd[0] < sd[1] < sd[4]
    assert model.predict("never seen", 1000.0).mean[0] < -0.1


@pytest.mark.parametrize("alike", [False, True])
def test_the_kernel_is_fitted_to_what_has_been_seen(alike: bool) -> None:
    random = np.random.default_rng(0)
    own = random.normal(0, 0.3, 12)
    model = RWGP(_cluster(), alike=alike)
    errors = []
    for i in range(320):
        machine = int(random.integers(12))
        value = own[machine] + random.normal(0, 0.02)
        if i in (99, 319):
            errors.append(float(np.abs(model.predict("y", 1000.0).mean - own).mean()))
        model.observe(_seen("y", machine, math.exp(value)))
    mean, sd = model.predict("y", 1000.0)
    assert errors[1] < errors[0]
    assert np.abs(mean - own).max() < 0.02
    assert sd.max() < 0.02  # it has learned that there is little noise


@pytest.mark.parametrize("speed", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_speed_is_refused(speed: float) -> None:
    with pytest.raises(ValueError, match="must be finite and > 0"):
        RWGP(_cluster()).observe(_seen("x", 0, speed))


def test_one_machine_and_one_absurd_measurement_do_no_harm() -> None:
    model = RWGP(Cluster((Machine("only", 1),)))
    model.observe(_seen("x", 0, 1e-300))
    for _ in range(60):
        model.observe(_seen("x", 0, 1.0))
    mean, sd = model.predict("x", 1000.0)
    assert -0.3 < mean[0] < 0.1
    assert 0 < sd[0] < 0.1


def test_a_thousand_machines_are_no_approximation() -> None:
    """Against the closed form on cliques of equal sizes n, where walks of any length are the same up to their scale."""
    num, num_seen = 1000, 90
    machines = tuple(Machine(f"m{i}", 8, "old" if i < 500 else "new", f"r{i // 10}") for i in range(num))
    model = RWGP(Cluster(machines))
    random = np.random.default_rng(0)
    of = random.integers(0, 40, num_seen)  # some come again
    classes = random.integers(0, 2, num_seen)
    values = random.normal(0, 0.3, num_seen)
    for machine, job_class, value in zip(of, classes, values, strict=True):
        model.observe(_seen("xy"[job_class], int(machine), math.exp(value)))
    near, longer = 0.02, 0.22  # beta_0, and beta_1 + beta_2: of the kernel before its first fit
    order = list(dict.fromkeys(classes))  # classes are numbered as they come
    weight = np.stack([np.full(2, math.sqrt(0.5)), 0.05 * np.cos(np.zeros(2))], axis=1)
    with_class = model._kernel.class_covariance()[0].detach().numpy()
    assert with_class == pytest.approx(weight @ weight.T + 0.5 * np.eye(2))

    def covariance(one: np.ndarray, other: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        total = 0.0
        for group, size in ((lambda i: i * 0, 1000), (lambda i: i // 500, 500), (lambda i: i // 10, 10)):
            together = group(one)[:, None] == group(other)[None, :]
            total += together * (2 * near * longer / math.sqrt(size) + longer**2)
            total += near**2 * (one[:, None] == other[None, :])
        return total * with_class[a[:, None], b[None, :]]

    numbers = np.array([order.index(job_class) for job_class in classes])
    everywhere, first = np.arange(num), np.zeros(num, dtype=int)
    gram = covariance(of, of, numbers, numbers) + 0.15**2 * np.eye(num_seen)
    across = covariance(everywhere, of, first, numbers)
    mean = across @ np.linalg.solve(gram, values)
    variance = covariance(everywhere[:1], everywhere[:1], first[:1], first[:1])[0, 0]
    variance = variance - np.einsum("ij,ji->i", across, np.linalg.solve(gram, across.T))
    said = model.predict("xy"[order[0]], 1000.0)
    assert said.mean == pytest.approx(mean, abs=1e-9)
    assert said.sd**2 == pytest.approx(variance, abs=1e-9)
