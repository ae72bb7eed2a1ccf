"""Two ranks that train together: a step counts once both have committed it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fork_server import ENVIRONMENT  # loopback only, whatever this host's name stands for at the moment
from tests.launch.programs import TORCHEXT, TORCHRUN, Program
from tests.ranks import Rank, run_ranks, start_ranks
from tests.standby import launched, sharded
from tests.standby.processes import build, undisturbed
from tests.standby.sharded import be_killed, train
from torchext.standby import Replicator, StateMismatchError
from torchext.standby.link import fetch, status

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_STEPS = 10


def _train(rank: Rank, address: str | None, mode: Any, die_at: int | None) -> tuple[int, list[float], list[Any]]:
    model, optimizer = build()
    torch.manual_seed(rank.rank)  # each rank has its own dropout and data
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    replicator = None
    start = 0
    if address is not None:
        replicator = Replicator(model, optimizer, standby=address, job="job", mode=mode, timeout=10)
        found = replicator.restore()
        start = 0 if found is None else found.step + 1
    losses = []
    for i in range(start, NUM_STEPS):
        x = torch.randn(8, 32)
        loss = (wrapped(x) - x.flip(0)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if die_at == i and rank.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        losses.append(loss.item())
        if replicator is not None:
            replicator.commit(i)
    if replicator is not None:
        replicator.close()
    return start, losses, [tensor.tolist() for tensor in model.state_dict().values()]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["lag1", "rpo0"])
def test_both_go_on_from_the_step_that_both_have(standby: Any, mode: str) -> None:
    _, address = standby
    with start_ranks(_train, 2, None, mode, None, backend="gloo", deadline_s=200) as ranks:
        reference = ranks.values()
    with start_ranks(_train, 2, address, mode, 6, backend="gloo", deadline_s=200) as ranks:
        outcomes = ranks.wait()
    assert outcomes[1].signal == signal.SIGKILL
    assert outcomes[0].kind == "raised"  # gloo: the peer is gone
    latest = status(address)["jobs"]["job"]["step"]
    assert latest == 5 if mode == "rpo0" else latest in (4, 5)
    assert {fetch(address, "job", rank=rank).step for rank in range(2)} == {latest}
    with start_ranks(_train, 2, address, mode, None, backend="gloo", deadline_s=200) as ranks:
        resumed = ranks.values()
    for (_, losses, weights), (start, resumed_losses, resumed_weights) in zip(reference, resumed, strict=True):
        assert start == latest + 1
        assert resumed_losses == losses[start:]
        assert resumed_weights == weights
    assert status(address)["jobs"]["job"]["step"] == NUM_STEPS - 1


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_killed_at_random_points_end_as_if_undisturbed(running: str, tmp_path: Path, kind: str) -> None:
    """pytorch/pytorch#136336, Lightning-AI/pytorch-lightning#18853, #17702: shards of FSDP2."""
    run_ranks(be_killed, 1, str(tmp_path), train, kind, "lag1", running, 2, 0, deadline_s=240)


def _shard_and_restore(rank: Rank, address: str) -> None:
    _, model, optimizer = sharded.build("fsdp", 0)
    with Replicator(model, optimizer, standby=address, job="job", mode="rpo0") as replicator:
        model(torch.randn(8, 32)).sum().backward()
        optimizer.step()
        replicator.commit(0)
        shards = {name: getattr(t, "_local_tensor", t).clone() for name, t in model.state_dict().items()}
    seen = fetch(address, "job").tree["models"]["model"]  # by one who has no mesh
    assert all(type(seen[name]) is torch.Tensor and torch.equal(seen[name], shards[name]) for name in shards)
    model, optimizer = build()
    with (
        Replicator(model, optimizer, standby=address, job="job") as replicator,
        pytest.raises(StateMismatchError, match=r"mesh of ranks \[0\] with dimensions \('shard',\), .* no DTensors"),
    ):
        replicator.restore()


def test_shards_need_the_mesh_that_they_are_of(running: str) -> None:
    run_ranks(_shard_and_restore, 1, running, backend="gloo", deadline_s=90)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "launcher",
    [pytest.param(TORCHEXT, id="torchext run"), pytest.param(TORCHRUN, id="torchrun", marks=pytest.mark.slow)],
)
def test_workers_that_a_launcher_restarts_find_the_standby(running: str, tmp_path: Path, launcher: Any) -> None:
    script = str(Path(__file__).with_name("launched.py"))
    words = [*launcher, "--standalone", "--nproc-per-node=2", "--max-restarts=1", script, str(tmp_path), running]
    with Program(words, environment=ENVIRONMENT) as program:
        assert program.wait(200) == 0, program.output
    assert (tmp_path / "died").exists()
    for rank in range(2):
        losses, _ = undisturbed(launched.NUM_STEPS, seed=rank)
        lines = [line.split() for line in (tmp_path / f"log{rank}").read_text().splitlines()]
        assert all(float(loss) == losses[int(step)] for step, loss in lines)
        assert [int(step) for step, _ in lines][-3:] == [5, 6, 7]
        assert len(lines) <= launched.NUM_STEPS + 2  # rank 0 may have been a step ahead


@pytest.mark.slow  # a hundred of each: python -m tests.standby.sharded
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_killed_at_random_points_do_nothing_again_in_rpo0(running: str, tmp_path: Path, kind: str) -> None:
    run_ranks(be_killed, 1, str(tmp_path), train, kind, "rpo0", running, 5, 1, deadline_s=240)
