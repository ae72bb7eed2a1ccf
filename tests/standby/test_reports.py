"""What users of other checkpointing have reported, each as a test of ours; the reports are named."""

from __future__ import annotations

import copy
import os
import random
import signal
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.standby.processes import Net, build, start_standby, step, undisturbed, until
from torchext.standby import Replicator, StandbyLostWarning, wire
from torchext.standby.daemon import Daemon
from torchext.standby.link import fetch, status

pytestmark = pytest.mark.usefixtures("one_thread")


def _replicator(address: str, model: Any, optimizer: Any, **options: Any) -> Replicator:
    return Replicator(model, optimizer, standby=address, job="job", **options)


def _assert_equal(left: Any, right: dict[str, torch.Tensor]) -> None:
    for name, tensor in right.items():
        assert torch.equal(left[name], tensor), name


def test_state_that_is_changed_right_after_commit_is_kept_as_it_was(daemon: Daemon) -> None:
    """Lightning-AI/pytorch-lightning#20953, pytorch/pytorch#144657."""
    model, optimizer = build()
    state = {"losses": [1.0], "table": torch.ones(5000)}
    average = copy.deepcopy(model)
    with _replicator(daemon.address, model, optimizer, extra={"average": average}) as replicator:
        step(model, optimizer)
        replicator.commit(0, state=state)
        expected = copy.deepcopy(model.state_dict())
        state["losses"].append(2.0)  # type: ignore[attr-defined]
        state["table"].zero_()  # type: ignore[attr-defined]
        averaged = copy.deepcopy(average.state_dict())
        for parameter in average.parameters():
            parameter.data.zero_()
        for buffer in model.buffers():  # as the next forward does
            buffer.fill_(7)
        replicator.gate()
        until(lambda: status(daemon.address)["jobs"]["job"]["step"] == 0)
        tree = fetch(daemon.address, "job").tree
        assert tree["state"]["losses"] == [1.0]
        assert torch.equal(tree["state"]["table"], torch.ones(5000))
        _assert_equal(tree["models"]["model"], expected)
        _assert_equal(tree["extra"]["average"], averaged)


def _resident_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


@pytest.mark.parametrize("transport", ["local", pytest.param("tcp", marks=pytest.mark.slow)])
def test_memory_is_flat_over_a_thousand_commits(standby: Any, transport: Any) -> None:
    """pytorch/pytorch#170163: resident memory grew over 500 commits."""
    process, address = standby
    model, optimizer = build()
    with _replicator(address, model, optimizer, transport=transport, audit_every_n_steps=50) as replicator:
        before: dict[str, tuple[int, int]] = {}
        for i in range(1000):
            step(model, optimizer)
            replicator.commit(i, state={"table": torch.full((20_000,), float(i))})
            if i in (200, 999):
                before[str(i)] = (_resident_kib(process.pid), _resident_kib(os.getpid()))
                used = status(address)["memory"]["used_bytes"], replicator.stats["arena_bytes"]
                before[f"used {i}"] = used
    assert before["used 200"] == before["used 999"]
    # 800 commits of 80 KB at least: what leaks one of them in ten would show.
    assert before["999"][0] - before["200"][0] < 6_000
    assert before["999"][1] - before["200"][1] < 6_000


def test_memory_is_not_written_before_the_standby_has_read_it(standby: Any) -> None:
    """NVIDIA/Megatron-LM#2288: staging memory was used again before it was read."""
    process, address = standby
    model, optimizer = build()
    with _replicator(address, model, optimizer, timeout=2) as replicator:
        step(model, optimizer)
        replicator.commit(0)
        replicator.gate()
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        replicator.commit(1)
        before = copy.deepcopy(model.state_dict())
        gate = replicator._publisher.gate
        seen: list[dict[str, torch.Tensor]] = []

        def waits(*arguments: Any) -> bool:
            done = gate(*arguments)
            seen.append(copy.deepcopy(model.state_dict()))
            return done

        replicator._publisher.gate = waits  # type: ignore[method-assign]
        with pytest.warns(StandbyLostWarning, match="no answer"):
            optimizer.step()
        _assert_equal(seen[0], before)  # nothing had changed when the wait was over
        process.send_signal(signal.SIGCONT)


def test_a_death_between_data_and_commit_record_leaves_the_step_before(daemon: Daemon) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#3267."""
    model, optimizer = build()
    replicator = _replicator(daemon.address, model, optimizer)
    step(model, optimizer)
    replicator.commit(0)
    step(model, optimizer)
    expected = copy.deepcopy(model.state_dict())
    replicator.commit(1)
    step(model, optimizer)  # seals 1
    replicator.commit(2)
    until(lambda: status(daemon.address)["jobs"]["job"]["ranks"][0]["commits"] == 3)  # all data of 2 is there
    replicator._publisher._unlink()  # and the process is gone
    replicator.close()
    state = fetch(daemon.address, "job")
    assert state.step == 1
    _assert_equal(state.tree["models"]["model"], expected)


def test_a_rank_that_stops_holds_up_the_others_for_one_timeout(daemon: Daemon) -> None:
    """pytorch/torchtitan#3065."""
    parts = [build(seed=rank) for rank in range(2)]
    first = _replicator(daemon.address, *parts[0], rank=0, world_size=2, timeout=1)
    second = _replicator(daemon.address, *parts[1], rank=1, world_size=2)
    with first, second:
        for replicator in (first, second):
            replicator.commit(0)
        for replicator in (first, second):
            replicator.gate()
        first.commit(1)  # the other one stops here
        first.gate()
        first.commit(2)
        with pytest.warns(StandbyLostWarning, match=r"no answer \(pulled of step 2\) within 1 s"):
            step(*parts[0])
        first.commit(3)  # goes on
        assert fetch(daemon.address, "job", rank=1).step == 0


def test_a_reader_that_dies_in_the_middle_holds_no_lock(daemon: Daemon) -> None:
    """intelligent-machine-learning/dlrover#872, #1066, #1079: the holder of a lock died."""
    model, optimizer = build()
    with _replicator(daemon.address, model, optimizer, mode="rpo0") as replicator:
        for i in range(3):
            replicator.commit(i, state=torch.zeros(1 << 24, dtype=torch.uint8))
            sock = wire.connect(daemon.address, 30)
            wire.greet(sock, {"role": "reader"}, 30)
            wire.send(sock, {"op": "fetch", "job": "job", "rank": 0, "step": None})
            assert wire.receive(sock)[0]["step"] == i
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            sock.close()  # as the kernel does for a process that is killed
        assert replicator.stats["connected"]
    assert fetch(daemon.address, "job").step == 2


def test_a_standby_that_comes_back_again_and_again_is_joined_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytorch/torchft#329, pytorch/torchtitan#4209."""
    monkeypatch.setattr("torchext.standby.connect._RETRY_S", 0.01)
    losses, _ = undisturbed(400)
    model, optimizer = build()
    process, address = start_standby()
    i = 0
    try:
        with _replicator(address, model, optimizer, mode="rpo0") as replicator:
            for _ in range(2):
                process.kill()
                process.communicate()
                with pytest.warns(StandbyLostWarning):  # noqa: PT031
                    assert step(model, optimizer) == losses[i]
                    replicator.commit(i)
                i += 1
                process, _ = start_standby(listen=address)
                until(lambda: replicator._publisher._reconnect._link is not None)  # type: ignore[union-attr]
                assert step(model, optimizer) == losses[i]
                replicator.commit(i)
                _assert_equal(fetch(address, "job").tree["models"]["model"], model.state_dict())
                i += 1
    finally:
        process.kill()
        process.communicate()


def test_a_compiled_model_is_replicated_and_resumed(daemon: Daemon) -> None:
    losses, _ = undisturbed(8)
    start = 0
    for end in (4, 8):
        model, optimizer = build()
        compiled = torch.compile(model, backend="eager")
        with _replicator(daemon.address, compiled, optimizer) as replicator:
            found = replicator.restore()
            assert (0 if found is None else found.step + 1) == start
            for i in range(start, end):
                assert step(compiled, optimizer) == losses[i]
                replicator.commit(i)
        start = end


def test_other_optimizers_take_the_place_of_the_first_ones(daemon: Daemon) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with _replicator(daemon.address, model, optimizer, mode="rpo0", audit_every_n_steps=1) as replicator:
        step(model, optimizer)
        replicator.commit(0)
        optimizer = torch.optim.AdamW(model.parameters())
        replicator.use_optimizers(optimizer)
        for i in range(1, 4):
            step(model, optimizer)
            replicator.commit(i)
            tree = fetch(daemon.address, "job").tree
            _assert_equal(tree["models"]["model"], model.state_dict())
            held = tree["optimizers"][0]["state"]
            for key, moments in optimizer.state_dict()["state"].items():
                _assert_equal(held[key], moments)


@pytest.mark.filterwarnings("ignore:The `srun` command is available")  # on machines of a Slurm cluster
def test_fabric(daemon: Daemon) -> None:
    fabric_module = pytest.importorskip("lightning.fabric", reason="Lightning is not installed")
    losses, _ = undisturbed(8)
    start = 0
    for end in (4, 8):
        fabric = fabric_module.Fabric(accelerator="cpu", devices=1)
        model, optimizer = fabric.setup(*build())
        with _replicator(daemon.address, model, optimizer, audit_every_n_steps=1) as replicator:
            found = replicator.restore()
            assert (0 if found is None else found.step + 1) == start
            for i in range(start, end):
                x = torch.randn(16, 32) * random.random() + float(np.random.rand())
                loss = (model(x) - x.flip(0)).square().mean()
                optimizer.zero_grad()
                fabric.backward(loss)
                optimizer.step()
                assert loss.item() == losses[i]
                replicator.commit(i)
        start = end
