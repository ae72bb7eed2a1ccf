"""The transport "rdma": refused where there is no device, tried in a virtual machine with software RDMA devices."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.standby.processes import ROOT
from torchext.standby import Replicator, StandbyError, wire
from torchext.standby.daemon import Daemon

# Makes the virtual machine: ``lab.sh build uml`` once, ``lab.sh run -- COMMAND``.
LAB = Path(os.environ.get("TORCHEXT_LAB", ROOT.parent / "shared" / "lab"), "lab.sh")
CACHE = Path(os.environ.get("LAB_CACHE", Path.home() / ".cache" / "lab"))


@pytest.fixture
def guest() -> list[str]:
    """What runs a command in a guest."""
    if not LAB.exists():
        pytest.skip(f"needs a virtual machine with software RDMA devices: there is no {LAB}")
    if not (CACHE / "linux.uml").exists():
        pytest.skip(f"needs a virtual machine with software RDMA devices: it was not built ({LAB} build uml)")
    if not list(CACHE.glob(f"py/pyverbs/*.{sys.implementation.cache_tag}-*.so")):
        pytest.skip(f"{CACHE}/py has no pyverbs for this Python, {sys.implementation.cache_tag}")
    command = [str(LAB), "run", "-t"]
    started = subprocess.run([*command, "60", "--", "true"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if started.returncode != 0:
        pytest.skip(f"a guest does not start on this machine: {started.stderr.strip().splitlines()[-1:]}")
    return [*command, "300"]


@pytest.mark.skipif(any(Path("/sys/class/infiniband").glob("*")), reason="this host has an RDMA device")
def test_without_a_device_rdma_is_refused_saying_what_is_missing() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(StandbyError, match=r"transport='rdma' is not possible: this host has no RDMA device"):
        Replicator(model, torch.optim.SGD(model.parameters()), standby="127.0.0.1:1", job="job", transport="rdma")


def test_a_process_with_a_limit_on_locked_memory_does_not_take_rdma_unasked() -> None:
    program = """
import os, resource
from torchext.standby import rdma
assert rdma.may_pin_all() == (os.geteuid() == 0)
if os.geteuid() == 0:
    os.setuid(65534)
    assert not rdma.may_pin_all()
"""
    limits = (1 << 20, 1 << 20)
    subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_MEMLOCK, limits),
    )


@pytest.mark.skipif(any(Path("/sys/class/infiniband").glob("*")), reason="this host has an RDMA device")
def test_a_process_that_the_standby_cannot_read_takes_over_from_nobody(daemon: Daemon) -> None:
    model = torch.nn.Linear(2, 2)
    options: dict[str, Any] = {"standby": daemon.address, "job": "job", "on_standby_loss": "raise"}
    with Replicator(model, torch.optim.SGD(model.parameters()), **options) as replicator:
        replicator.commit(0)
        hello = {"job": "job", "rank": 0, "world_size": 1, "run": "other", "pid": 1, "host": "other", "boot_id": ""}
        with wire.connect(daemon.address, 60) as sock:
            wire.greet(sock, {"role": "primary", **hello, "rdma": False, "probe": None}, 60)
            wire.send(sock, {"op": "claim", "take_over": True, "transport": "rdma", "endpoint": {}, "persist": None})
            with pytest.raises(StandbyError, match="this host has no RDMA device"):
                wire.raised(wire.receive(sock)[0])
        replicator.commit(1)
        replicator._publisher.settle()
        assert replicator.stats["committed"] == 1


@pytest.mark.timeout(350)
def test_in_a_guest_state_is_read_by_rdma_and_training_goes_on_after_kill_9(guest: list[str]) -> None:
    """See rdma_guest.py for all that is tried there."""
    program = f"lab-net up 2 && exec {sys.executable} -m tests.standby.rdma_guest"
    done = subprocess.run(
        [*guest, "--", "bash", "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{CACHE}/py", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": yes,") == 8
