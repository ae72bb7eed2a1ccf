"""Engines of queues; and the launcher looks after processes in ways that only Linux has."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.launch import slurm
from tests.launch.queues import Engine


@pytest.fixture(autouse=True)
def _linux() -> None:
    if sys.platform != "linux":
        pytest.skip(f"needs Linux, this is {sys.platform}")


@pytest.fixture(scope="module", params=["local", "slurm"])
def any_engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    if request.param == "local":
        yield Engine(None)
        return
    with slurm.running(tmp_path_factory.mktemp("slurm")) as made:
        yield Engine(made)


@pytest.fixture
def engine(any_engine: Engine) -> Iterator[Engine]:
    """Each of the engines in turn; nothing of a test is left in it."""
    yield any_engine
    if any_engine.slurm is not None:
        any_engine.slurm.wait_until_idle()
