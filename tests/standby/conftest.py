from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

pytest.importorskip("torchext._native", reason="the native core was not built")
if sys.platform != "linux":
    pytest.skip("torchext.standby needs Linux", allow_module_level=True)

from tests.standby.processes import start_standby
from torchext.standby.daemon import Daemon


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHEXT_STANDBY_TOKEN", "a secret of the tests")


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A standby in a thread of the test process, for what has nothing to do with processes."""
    with Daemon("127.0.0.1:0") as daemon:
        thread = threading.Thread(target=daemon.serve)
        thread.start()
        yield daemon
        daemon.stop()
        thread.join()


@pytest.fixture(scope="module")
def running() -> Iterator[str]:
    """The address of a standby process that no test harms."""
    os.environ["TORCHEXT_STANDBY_TOKEN"] = "a secret of the tests"
    process, address = start_standby("--jobs", "1000")
    del os.environ["TORCHEXT_STANDBY_TOKEN"]
    yield address
    process.kill()
    process.communicate()


@pytest.fixture
def standby() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A standby process and its address."""
    process, address = start_standby()
    yield process, address
    process.kill()
    process.communicate()
