"""What every test gets: a seed, a watch over what it leaves behind, and a skip where its hardware is missing."""

from __future__ import annotations

import os
import random
import uuid
from collections.abc import Iterator
from pathlib import Path

# One process compiles: torch.compile's own pool would be several processes that outlive the test that needed them.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import hypothesis
import numpy as np
import pytest
import torch

from tests import leaks

os.environ[leaks.MARKER] = f"{os.getpid()}-{uuid.uuid4().hex}"

# Machines are shared and slow at times: the time of one example says nothing. A failure prints how to replay it.
hypothesis.settings.register_profile("torchext", deadline=None, print_blob=True)
hypothesis.settings.load_profile("torchext")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="seed of random, numpy and torch before each test")
    parser.addoption("--settle-s", type=float, default=15.0, help="how long what a test leaves has to end, in seconds")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "allow_leaks(*kinds, reason): what this test may leave behind, and why it must")


def pytest_report_header(config: pytest.Config) -> str:
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads, seed {config.getoption('--seed')} (--seed=N)"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device: torch.cuda.is_available() is false")
    if item.get_closest_marker("rdma") and not any(Path("/sys/class/infiniband").glob("*")):
        pytest.skip("needs an RDMA device: /sys/class/infiniband has none")


@pytest.fixture(autouse=True)
def _no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves behind what tests/leaks.py can see. Set up first, so it looks last."""
    allowed = {kind for mark in request.node.iter_markers("allow_leaks") for kind in mark.args}
    unknown = allowed - leaks.DETECTORS.keys()
    if unknown:
        raise pytest.UsageError(f"allow_leaks takes kinds out of {list(leaks.DETECTORS)}, got {sorted(unknown)}")
    before = leaks.take()
    # A fixture of the whole module may have called seed_everything too.
    environment = {name: each for name, each in os.environ.items() if name not in leaks.VARIABLES_OF_A_TEST}
    yield
    found = leaks.find(before, ignore=allowed, settle_s=request.config.getoption("--settle-s"))
    _restore(environment)  # so the next test starts from the same one, whatever became of this
    if found:
        lines = [f"  {kind}: {word}" for kind, words in found.items() for word in words]
        pytest.fail("the test left behind\n" + "\n".join(lines), pytrace=False)


def _restore(environment: dict[str, str]) -> None:
    for name in set(os.environ) | set(environment):
        if name in leaks.LASTING_VARIABLES or name == "PYTEST_CURRENT_TEST":
            continue
        if name not in environment:
            del os.environ[name]
        elif os.environ.get(name) != environment[name]:
            os.environ[name] = environment[name]


@pytest.fixture(autouse=True)
def _seeded(_no_leaks: None, request: pytest.FixtureRequest) -> None:
    seed = request.config.getoption("--seed")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tiny models, where more threads only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
