"""What the standby does over RDMA, between two hosts with software RDMA devices: run in a guest of the lab.

``lab-net up 2 && python -m tests.standby.rdma_guest``: the standby is on host h1, the trainings are on h2. Torch is
loaded once; all else is forked.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import signal
import subprocess
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.standby.processes import build, step, undisturbed, until
from tests.standby.training import die_after, train
from torchext.standby import CorruptStateError, Replicator, StandbyError, StandbyLostError, StandbyLostWarning, wire
from torchext.standby.daemon import Daemon
from torchext.standby.link import fetch, status

NUM_STEPS = 6


def fork(host: str, function: Callable[..., None], *arguments: Any) -> int:
    """Calls the function in a process of its own on a host; returns the process."""
    pid = os.fork()
    if pid:
        return pid
    try:
        with open(f"/run/netns/{host}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), f"setns to {host}")
        function(*arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def is_so(function: Callable[..., None], *arguments: Any) -> bool:
    """Calls it on h2 and waits for its end."""
    start = time.monotonic()
    status = os.waitpid(fork("h2", function, *arguments), 0)[1]
    print(f"{function.__name__}: {'no' if status else 'yes'}, {time.monotonic() - start:.1f} s", flush=True)
    return status == 0


def serve(told: int, host: str) -> None:
    wire.boot_id = lambda: "another kernel"  # the hosts of a guest share theirs, and so would read each other's memory
    with Daemon(f"{host}:0", max_jobs=100) as daemon:
        os.write(told, f"{daemon.address}\n".encode())
        daemon.serve()


def assert_held(address: str, job: str, at: int, model: torch.nn.Module) -> None:
    until(lambda: status(address)["jobs"][job]["step"] == at)
    state = fetch(address, job)
    for left, right in zip(state.tree["models"]["model"].values(), model.state_dict().values(), strict=True):
        assert torch.equal(left, right)


def transport_of(address: str, job: str) -> Any:
    return status(address)["jobs"][job]["ranks"][0]["transport"]


# --- what is tried ---


def steps_are_read_by_rdma_where_both_hosts_can(address: str) -> None:
    model, optimizer = build()
    with Replicator(model, optimizer, standby=address, job="auto") as replicator:
        for i in range(3):
            step(model, optimizer)
            replicator.commit(i)
        replicator.gate()
        assert transport_of(address, "auto") == "rdma"
        assert replicator.stats["bytes_pulled"] > 3 * sum(p.nbytes for p in model.parameters() if p.requires_grad)
        assert_held(address, "auto", 2, model)


def rows_of_an_embedding_are_read_alone(address: str) -> None:
    model = torch.nn.Embedding(4096, 16, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    options: dict[str, Any] = {"standby": address, "job": "rows", "transport": "rdma", "mode": "rpo0"}
    with Replicator(model, optimizer, **options) as replicator:
        for i in range(4):
            before = replicator.stats["bytes_pulled"]
            optimizer.zero_grad()
            model(torch.randint(0, 4096, (150,))).square().sum().backward()
            optimizer.step()
            replicator.commit(i)
        # The rows of the weight and of both moments; the state of the generators comes on top of that.
        assert replicator.stats["bytes_pulled"] - before <= 3 * 150 * 16 * 4 + 10_000
        assert_held(address, "rows", 3, model)


def more_than_the_staging_buffer_is_read_in_parts(address: str) -> None:
    model = torch.nn.Linear(1, 5_000_000, bias=False)  # 20 MB
    optimizer = torch.optim.SGD(model.parameters())
    with Replicator(model, optimizer, standby=address, job="large", transport="rdma", mode="rpo0") as replicator:
        replicator.commit(0)
        assert_held(address, "large", 0, model)


def a_killed_training_goes_on_with_equal_losses(address: str, mode: str, places: list[str]) -> None:
    losses, weights = undisturbed(NUM_STEPS)
    numbers = random.Random(mode)
    log = Path(tempfile.mkdtemp()) / "log"

    def training(lines: int, place: str) -> None:
        if lines:
            die_after(lines, place)
        random.seed(0)
        train(str(log), NUM_STEPS, standby=address, job=mode, mode=mode, transport="rdma")

    for place in places:
        ended = os.waitstatus_to_exitcode(os.waitpid(fork("h2", training, numbers.randrange(500, 4000), place), 0)[1])
        assert ended in (-signal.SIGKILL, 0), ended
    assert os.waitpid(fork("h2", training, 0, ""), 0)[1] == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["start"] for line in lines if "start" in line][-1] > 0  # it did go on
    done = -1
    for line in lines:
        if "start" in line:
            assert line["start"] >= done + (1 if mode == "rpo0" else 0), "more was done again than is allowed"
        elif "step" in line:
            assert line["loss"] == losses[line["step"]]
            done = line["step"]
    assert lines[-1]["weights"] == {name: tensor.tolist() for name, tensor in weights.items()}


def bytes_that_differ_from_their_checksum_do_not_count(address: str) -> None:
    from torchext.standby import source

    model, optimizer = build()
    options: dict[str, Any] = {"standby": address, "job": "corrupt", "transport": "rdma", "on_standby_loss": "raise"}
    with Replicator(model, optimizer, **options) as replicator, pytest.MonkeyPatch.context() as patch:
        replicator.commit(0)
        replicator.gate()
        checksum = source.native.checksum
        patch.setattr(source.native, "checksum", lambda *where: checksum(*where) ^ 1)
        step(model, optimizer)
        with pytest.raises(StandbyLostError, match="arrived with another checksum") as caught:
            replicator.commit(1), replicator.gate()
        assert isinstance(caught.value.__cause__, CorruptStateError)
    assert fetch(address, "corrupt").step == 0


@contextlib.contextmanager
def rdma_cut() -> Any:
    """Packets of RDMA are dropped on the way to h2, those of TCP are not."""
    rules = "add table ip cut; add chain ip cut in { type filter hook input priority 0; }; "
    subprocess.run(["nft", rules + "add rule ip cut in udp dport 4791 drop"], check=True)
    yield
    subprocess.run(["nft", "delete table ip cut"], check=True)


def a_cut_link_is_told_and_caught_up_with(address: str) -> None:
    model, optimizer = build()
    with Replicator(model, optimizer, standby=address, job="cut", transport="rdma") as replicator:
        replicator.commit(0)
        replicator.gate()
        with rdma_cut():
            step(model, optimizer)
            with pytest.warns(StandbyLostWarning, match=r"RDMA READ from .* failed with status 12 .*RETRY_EXC_ERR"):
                replicator.commit(1), replicator.gate()
        i, end = 2, time.monotonic() + 60
        while not replicator.stats["connected"]:
            assert time.monotonic() < end
            step(model, optimizer)
            replicator.commit(i)
            i += 1
        replicator.gate()
        assert transport_of(address, "cut") == "rdma"
        assert_held(address, "cut", i - 1, model)


def without_the_address_on_a_device_rdma_is_refused_and_auto_takes_tcp() -> None:
    here, there = os.pipe()
    pid = fork("h2", serve, there, "127.0.0.1")
    address = os.read(here, 100).decode().strip()
    model, optimizer = build()
    try:
        options: dict[str, Any] = {"standby": address, "on_standby_loss": "raise"}
        with Replicator(model, optimizer, job="a", transport="rdma", **options) as replicator:
            missing = r"the standby's host: no RDMA device of this host \(rxe1, rxe2\) has the address 127.0.0.1"
            with pytest.raises(StandbyError, match=missing):
                replicator.commit(0)
        with Replicator(model, optimizer, job="b", **options) as replicator:
            replicator.commit(0)
            replicator.gate()
            assert transport_of(address, "b") == "tcp"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def main() -> None:
    os.environ["TORCHEXT_STANDBY_TOKEN"] = "a secret of the tests"
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    build()  # imports all that an optimizer needs
    here, there = os.pipe()
    standby = fork("h1", serve, there, "10.77.0.1")
    try:
        address = os.read(here, 100).decode().strip()
        everything = [
            is_so(steps_are_read_by_rdma_where_both_hosts_can, address),
            is_so(rows_of_an_embedding_are_read_alone, address),
            is_so(more_than_the_staging_buffer_is_read_in_parts, address),
            is_so(a_killed_training_goes_on_with_equal_losses, address, "lag1", ["commit", "copy", "anywhere"]),
            is_so(a_killed_training_goes_on_with_equal_losses, address, "rpo0", ["commit"]),
            is_so(bytes_that_differ_from_their_checksum_do_not_count, address),
            is_so(a_cut_link_is_told_and_caught_up_with, address),
            is_so(without_the_address_on_a_device_rdma_is_refused_and_auto_takes_tcp),
        ]
    finally:
        os.kill(standby, signal.SIGKILL)
        os.waitpid(standby, 0)
    assert all(everything)


if __name__ == "__main__":
    main()
