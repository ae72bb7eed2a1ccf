"""Versions of weights: whole, never older than seen, and nobody waits who need not."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from tests.channels.processes import DEADLINE_S, die, ends, process
from torchext.channels import ChannelClosed, ChannelError, ChannelTimeout, PeerDied, WeightBroadcast, connect_weights


def model(value: float = 0.0) -> torch.nn.Module:
    made = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 3))
    with torch.no_grad():
        for tensor in made.state_dict().values():
            tensor.fill_(value)
    return made


def values(module: torch.nn.Module) -> set[float]:
    return {float(v) for tensor in module.state_dict().values() for v in tensor.flatten().unique()}


def test_parameters_and_buffers_of_the_latest_version_are_loaded() -> None:
    source, target = model(1), model()
    with WeightBroadcast(source) as weights:
        assert weights.version == 0
        with pytest.raises(ChannelError, match=r"no version has been published yet; call wait\(\) first"):
            weights.load_into(target)
        assert weights.publish() == 1
        with torch.no_grad():
            source[0].weight.fill_(5)  # type: ignore[index]
        assert weights.load_into(target) == 1
        assert values(target) == {1}
        assert weights.publish() == 2
        assert weights.wait(newer_than=1, timeout=0) == 2
        assert weights.load_into(target) == weights.loaded == 2
        assert torch.equal(target[0].weight, source[0].weight)  # type: ignore[index]
        assert weights.state_dict().keys() == source.state_dict().keys()


def test_waiting_for_a_newer_version_times_out() -> None:
    with WeightBroadcast(model()) as weights:
        weights.publish()
        match = "no version newer than 1 was published within 0.01 s; the latest is 1"
        with pytest.raises(ChannelTimeout, match=match):
            weights.wait(newer_than=1, timeout=0.01)


def test_a_module_of_another_layout_is_refused_and_named() -> None:
    with WeightBroadcast(model()) as weights:
        weights.publish()
        with pytest.raises(ValueError, match=r"'0.bias' is missing there and \(\(64,\), torch.float32\) here"):
            weights.load_into({"weight": torch.zeros(2, 2)})


def load_for_ever(weights: WeightBroadcast) -> None:
    """Ends with 0 once version 300 is there; with 1 if any version was torn or older than one before."""
    module = model()
    seen = 0
    while seen < 300:
        weights.wait(newer_than=seen, timeout=DEADLINE_S)
        version = weights.load_into(module)
        if version <= seen or values(module) != {float(version)}:
            os._exit(1)
        seen = version
    os._exit(0)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_readers_never_see_a_torn_or_older_version(method: str) -> None:
    # Also the fault of XingTian's own code, which loaded the oldest of the waiting versions.
    source = model()
    with (
        WeightBroadcast(source) as weights,
        process(load_for_ever, weights) as first,
        process(load_for_ever, weights, method=method) as second,
    ):
        for version in range(1, 301):
            with torch.no_grad():
                for tensor in source.state_dict().values():
                    tensor.fill_(version)
            assert weights.publish() == version
        assert [ends(first), ends(second)] == [0, 0]


def publish_and_die(weights: WeightBroadcast) -> None:
    weights.publish(model(1))
    reader = weights._join()
    reader.begin()  # half-written
    die()


def test_what_a_dead_publisher_was_writing_never_shows() -> None:
    target = model()
    with WeightBroadcast(model()) as weights, process(publish_and_die, weights) as child:
        assert weights.wait(timeout=DEADLINE_S) == 1
        assert ends(child) == -9
        assert weights.load_into(target) == 1
        assert values(target) == {1}
        for version in range(2, 10):
            assert weights.publish(model(version)) == version
        assert weights.load_into(target) == 9
        assert values(target) == {9}


def pin_and_die(weights: WeightBroadcast) -> None:
    weights.wait(timeout=DEADLINE_S)
    weights._join().pin()
    die()


def test_what_a_dead_reader_was_reading_is_used_again() -> None:
    with WeightBroadcast(model()) as weights:
        weights.publish()
        for _ in range(3):
            with process(pin_and_die, weights) as child:
                ends(child)
        deadline = time.monotonic() + DEADLINE_S
        used: list[int] = []
        while used[-2:] not in ([0, 1], [1, 0]) and time.monotonic() < deadline:  # two are enough without readers
            weights.publish()
            used.append(weights._join().pin()[1])
            weights._join().unpin()
        assert sorted(used[-2:]) == [0, 1]


def make_and_die() -> None:
    weights = WeightBroadcast(model(), name="policy")
    weights.publish()
    die()


def test_a_named_broadcast_serves_unrelated_processes_and_its_death_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with WeightBroadcast(model(4), name="policy") as weights:
        weights.publish()
        other = connect_weights("policy")
        target = model()
        assert other.load_into(target) == 1
        assert values(target) == {4}
        weights.close()
        with pytest.raises(ChannelClosed, match="closed by the process that made them"):
            other.wait(newer_than=1, timeout=DEADLINE_S)
        other.close()
    assert list((tmp_path / "torchext").iterdir()) == []


def hand_over(weights: WeightBroadcast) -> None:
    weights.publish(model(2))
    weights.wait(newer_than=1, timeout=DEADLINE_S)
    die()


def test_who_waits_learns_that_the_publisher_died() -> None:
    with WeightBroadcast(model()) as weights, process(hand_over, weights):
        assert weights.wait(timeout=DEADLINE_S) == 1
        weights.publish()
        with pytest.raises(PeerDied, match=r"hand_over-\d+ \(process \d+\) died with exit code -9"):
            weights.wait(newer_than=2, timeout=DEADLINE_S)
