from __future__ import annotations

import math

import pytest

from torchext.scheduling import Cluster, Job, Machine, SchedulingError


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("num_gpus must be at least 1, got 0", {"num_gpus": 0}),
        ("submit_s must be finite", {"submit_s": math.nan}),
        ("estimate_s must be finite and not negative", {"estimate_s": -1.0}),
        ("deadline_s must be finite", {"deadline_s": math.inf}),
        ("gpus_per_node must divide num_gpus=4, got 3", {"gpus_per_node": 3}),
    ],
)
def test_a_job_that_makes_no_sense_is_refused(words: str, options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=words):
        Job(**{"id": "a", "submit_s": 0.0, "num_gpus": 4, **options})


def test_jobs_of_one_shape_ask_for_the_same() -> None:
    job = Job("a", 0.0, 4, "me", "resnet", gpus_per_node=2)
    assert job.shape == Job("b", 9.0, 4, "you", "resnet", gpus_per_node=2).shape
    assert job.shape != Job("c", 0.0, 4, "me", "bert", gpus_per_node=2).shape
    assert job.shape != Job("d", 0.0, 4, "me", "resnet").shape


@pytest.mark.parametrize(
    ("words", "machines", "tables"),
    [
        ("at least one machine", (), {}),
        ("two machines are named 'a'", (Machine("a", 1), Machine("a", 2)), {}),
        ("num_gpus must be at least 1", (Machine("a", 0),), {}),
        ("price must be finite", (Machine("a", 1, price_per_gpu_hour=-1.0),), {}),
        ("speed of 'x' on 'v100' must be finite and > 0, got 0", (Machine("a", 1),), {"speeds": {"v100": {"x": 0}}}),
        (r"contention of 'x' must be in \[0, 1\), got 1", (Machine("a", 1),), {"contention": {"x": 1}}),
    ],
)
def test_a_cluster_that_makes_no_sense_is_refused(
    words: str, machines: tuple[Machine, ...], tables: dict[str, dict[str, dict[str, float]]]
) -> None:
    with pytest.raises(SchedulingError, match=words):
        Cluster(machines, **tables)


def test_speeds_fall_back_to_the_default_of_the_type_and_then_to_one() -> None:
    cluster = Cluster((Machine("a", 1, "v100"),), {"v100": {"default": 2.0, "x": 3.0}, "k80": {"x": 0.5}}, {"x": 0.25})
    assert [cluster.speed(c, "v100") for c in ("x", "y")] == [3.0, 2.0]
    assert [cluster.speed(c, "k80") for c in ("x", "y")] == [0.5, 1.0]
    assert cluster.speed("x", "not listed") == 1.0
    assert (cluster.contention_of("x"), cluster.contention_of("y")) == (0.25, 0.0)
