"""Trainings on two ranks that die in random places: a model that is replicated by DDP or sharded by FSDP2.

``python -m tests.standby.sharded {ddp,fsdp,lightning} {lag1,rpo0} [--deaths 100] [--seed 1]`` lets them die
so often, beside one that is left in peace.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import signal
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import Rank
from tests.standby.processes import Net, start_standby
from tests.standby.training import die_after
from torchext.standby import Replicator

NUM_STEPS = 12


def build(kind: str, rank: int) -> tuple[torch.nn.Module, torch.nn.Module, torch.optim.Optimizer]:
    """The wrapped model, the one within, and its optimizer; 63 wide, so that no shard is as large as the other."""
    torch.manual_seed(0)
    model = Net(width=63)
    wrapped: torch.nn.Module
    if kind == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
        for layer in (model.layers[0], model.layers[4]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        wrapped = model
    torch.manual_seed(rank)  # each rank has its own dropout and data
    return wrapped, model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def weights(model: torch.nn.Module) -> dict[str, list[Any]]:
    """Of this rank."""
    return {
        name: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).tolist()
        for name, tensor in model.state_dict().items()
    }


def train(rank: int, store: Path, log: Path, *, kind: str, address: str | None, mode: Any, job: str) -> None:
    """One rank of two, from where the standby is to the end; writes a line for each step once `commit` has returned."""
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2)
    wrapped, model, optimizer = build(kind, rank)
    replicator, start = None, 0
    if address is not None:
        replicator = Replicator(model, optimizer, standby=address, job=job, mode=mode)
        found = replicator.restore()
        start = 0 if found is None else found.step + 1
    with log.open("a") as file:
        file.write(json.dumps({"start": start}) + "\n")
        file.flush()
        for i in range(start, NUM_STEPS):
            x = torch.randn(8, 32)
            loss = (wrapped(x) - x.flip(0)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if replicator is not None:
                replicator.commit(i)
            file.write(json.dumps({"step": i, "loss": loss.item()}) + "\n")
            file.flush()
        if replicator is not None:
            replicator.close()
        file.write(json.dumps({"weights": weights(model)}) + "\n")


class Group:
    """Both ranks of a training, forked from this process, which has imported what they need."""

    def __init__(self, folder: Path, program: Callable[..., None], **options: Any) -> None:
        folder.mkdir()
        self._folder = folder
        self._program = program
        self._options = options
        self._num_runs = 0

    def run(self, victim: int = -1, lines: int = 0, place: str = "anywhere") -> bool:
        """Trains; once a rank has ended badly, the other one is killed too, as launchers do.

        Returns:
            Whether both came to the end.
        """
        self._num_runs += 1
        for rank in range(2):
            with (self._folder / f"log{rank}").open("a") as file:
                file.write(json.dumps({"run": self._num_runs}) + "\n")
        pids = [self._fork(rank, lines if rank == victim else 0, place) for rank in range(2)]
        running, failed = set(pids), False
        while running:
            pid, status = os.wait()
            running.remove(pid)
            if pids.index(pid) == victim and status == signal.SIGKILL:
                for other in running:
                    os.kill(other, signal.SIGKILL)
                for other in running:
                    os.waitpid(other, 0)
                return False
            # A survivor fails too, as it notices the death, perhaps before it is seen here.
            assert status == 0 or victim >= 0, f"rank {pids.index(pid)} ended with status {status}"
            failed |= status != 0
        assert not failed, "a rank failed although none was killed"
        return True

    def log(self, rank: int) -> list[dict[str, Any]]:
        """What a rank has written in all runs."""
        return [json.loads(line) for line in (self._folder / f"log{rank}").read_text().splitlines()]

    def _fork(self, rank: int, lines: int, place: str) -> int:
        pid = os.fork()
        if pid != 0:
            return pid
        status = 1
        try:
            if lines:
                die_after(lines, place)
            random.seed(0)
            self._program(rank, self._folder / f"store{self._num_runs}", self._folder / f"log{rank}", **self._options)
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(status)


def be_killed(
    rank: Rank | None,
    folder: str,
    program: Callable[..., None],
    kind: str,
    mode: str,
    address: str,
    deaths: int,
    seed: int,
) -> None:
    """Trainings that die again and again in random places, beside one that does not; checks that they are as one."""
    import torch.distributed.fsdp  # noqa: F401  once for all

    numbers = random.Random(seed)
    calm = Group(Path(folder, "calm"), program, kind=kind, address=None, mode=mode, job="")
    assert calm.run()
    num_trainings = 0
    while deaths > 0:
        num_trainings += 1
        name = f"{kind}-{mode}-{num_trainings}"
        rough = Group(Path(folder, name), program, kind=kind, address=address, mode=mode, job=name)
        for _ in range(min(5, deaths)):
            place = numbers.choice(["commit", "copy", "optimizer", "anywhere"])
            if rough.run(numbers.randrange(2), numbers.randrange(1, 8000), place):
                break
            deaths -= 1
        else:
            assert rough.run()
        _assert_as_one(calm, rough, 0 if mode == "rpo0" else 1)
        if rank is None:
            print(f"{num_trainings} trainings are as the one that was left in peace, {deaths} deaths to go", flush=True)


def _assert_as_one(calm: Group, rough: Group, allowed: int) -> None:
    logs = [rough.log(rank) for rank in range(2)]
    for rank, log in enumerate(logs):
        expected = calm.log(rank)
        losses = {line["step"]: line["loss"] for line in expected if "step" in line}
        for line in log:
            if "step" in line:
                assert line["loss"] == losses[line["step"]], (rank, line)
        final = [expected[-1]["weights"]]
        if _runs(log)[-1][1] is None:
            # Nothing was left to do. Lightning makes DDP once it has loaded the state, and DDP gives all ranks the
            # buffers of rank 0, as it does before each step; an undisturbed rank ends with those of its own last step.
            final.append(calm.log(0)[-1]["weights"])
        assert log[-1]["weights"] in final
    # A step is done once both ranks have done it.
    done = -1
    for (start, end), (other_start, other_end) in zip(*map(_runs, logs), strict=True):
        if start is not None and other_start is not None:
            assert start == other_start
            assert start >= done + 1 - allowed, "more was done again than is allowed"
        if end is not None and other_end is not None:
            done = max(done, min(end, other_end))


def _runs(log: list[dict[str, Any]]) -> list[tuple[int | None, int | None]]:
    """Where each run of a rank started, and its last step; None where it died before."""
    runs: list[tuple[int | None, int | None]] = []
    for line in log:
        if "run" in line:
            runs.append((None, None))
        elif "start" in line:
            runs[-1] = line["start"], None
        elif "step" in line:
            runs[-1] = runs[-1][0], line["step"]
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["ddp", "fsdp", "lightning"])
    parser.add_argument("mode", choices=["lag1", "rpo0"])
    parser.add_argument("--deaths", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    os.environ.setdefault("TORCHEXT_STANDBY_TOKEN", secrets.token_hex(16))
    torch.set_num_threads(1)
    program = train
    if options.kind == "lightning":
        from tests.callbacks.lightning_ranks import train as program
    process, address = start_standby("--jobs", "1000")
    try:
        with tempfile.TemporaryDirectory() as folder:
            be_killed(None, folder, program, options.kind, options.mode, address, options.deaths, options.seed)
    finally:
        process.kill()
        process.communicate()


if __name__ == "__main__":
    main()
