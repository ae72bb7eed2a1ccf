"""A standby behind a network that is cut, carries nothing or is slow: a relay process between both."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.standby.processes import build, step, undisturbed, until
from tests.standby.relay import Relay
from torchext.standby import Replicator, StandbyLostError, StandbyLostWarning
from torchext.standby.link import fetch, status

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def relay(running: str) -> Iterator[Relay]:
    """In front of the standby."""
    with Relay(running) as relay:
        yield relay


def _assert_held(address: str, job: str, at: int, model: torch.nn.Module) -> None:
    state = fetch(address, job)
    assert state.step == at
    for left, right in zip(state.tree["models"]["model"].values(), model.state_dict().values(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("fault", ["cut", "freeze"])
def test_training_goes_on_while_the_network_is_away_and_catches_up(
    relay: Relay, running: str, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr("torchext.standby.connect._RETRY_S", 0.01)
    losses, _ = undisturbed(5)
    model, optimizer = build()
    with Replicator(model, optimizer, standby=relay.address, job=fault) as replicator:
        for i in range(3):
            assert step(model, optimizer) == losses[i]
            replicator.commit(i)
        replicator.gate()
        until(lambda: status(running)["jobs"][fault]["step"] == 2)  # sealed without waiting
        relay.order(fault)
        link = replicator._publisher._link
        assert link is not None
        link._timeout_s = 0.5  # by it alone a frozen network is noticed
        with pytest.warns(
            StandbyLostWarning, match=f"rank 0 of job '{fault}' has lost its standby at .* training goes on"
        ):
            _ = replicator.commit(3), replicator.gate()  # within one step
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # once is enough
            assert step(model, optimizer) == losses[3]
            replicator.commit(4)
        assert fetch(running, fault).step == 2  # whole, as it was
        relay.order("heal")
        i, end = 5, time.monotonic() + 60
        while not replicator.stats["connected"]:
            assert time.monotonic() < end
            step(model, optimizer)
            replicator.commit(i)
            i += 1
        step(model, optimizer)
        replicator.commit(i)
    _assert_held(running, fault, i, model)


def test_a_network_that_is_away_raises_if_asked_to(relay: Relay) -> None:
    model, optimizer = build()
    with Replicator(model, optimizer, standby=relay.address, job="raise", on_standby_loss="raise") as replicator:
        replicator.commit(0)
        replicator.gate()
        relay.order("cut")
        with pytest.raises(StandbyLostError, match=r"rank 0 of job 'raise' has lost its standby at .* at step"):
            _ = replicator.commit(1), replicator.gate()


@pytest.mark.parametrize("mode", ["lag1", "rpo0"])
def test_behind_a_slow_network_the_standby_lags_by_a_step_and_lacks_nothing(
    relay: Relay, running: str, mode: Any
) -> None:
    losses, weights = undisturbed(4)
    model, optimizer = build()
    options: dict[str, Any] = {"transport": "tcp", "on_standby_loss": "raise"}
    with Replicator(model, optimizer, standby=relay.address, job=mode, mode=mode, **options) as replicator:
        relay.order("slow 200000")
        for i in range(4):
            assert step(model, optimizer) == losses[i]
            replicator.commit(i)
            held = status(running)["jobs"][mode]["step"]
            # In lag1 the seal of the step before may be under way.
            assert held == i if mode == "rpo0" else held in {None, i - 1, i - 2}
    _assert_held(running, mode, 3, model)
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
