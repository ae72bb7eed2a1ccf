"""What keeping the state of every step costs: the standby beside ways to save a checkpoint, interleaved.

    python tests/benchmarks/standby.py [--workload transformer] [--rounds 5] [--steps 3] [--contenders ...]

Each contender trains a model of its own and saves after each step. The workloads: "transformer" (17.3 M parameters by
default, fused AdamW, 208 MB of state), "LoRA" (the same, frozen, with adapters of rank 16 that are trained) and
"sparse" (an embedding of 262,144 rows of 64, SparseAdam, 4,096 random rows in each step, 201 MB). A round gives every
contender some steps. Reported, as medians over all steps: how long a step took, also against "nothing" in the same
rounds, and for how long saving held up the training (within the call, and at the gate before the optimizer's step).
For standbys, the CPU time that their process took for each step, and what they read of the state in each step, also
against the bytes that the step changed. Training uses one thread, as the standby's share of a machine is to be seen
apart; --threads gives it more. "In backward" means that each parameter has an optimizer of its own, which steps as soon
as the gradient is there. Files go to a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import torchext
from torchext.standby import Replicator
from torchext.standby.link import status


def transformer(width: int, layers: int) -> torch.nn.Module:
    layer = torch.nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
    return torch.nn.Sequential(
        torch.nn.Embedding(2000, width),
        torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False),
        torch.nn.Linear(width, 1000),
    )


class WithAdapter(torch.nn.Module):
    """A frozen layer with a product of two thin matrices added."""

    def __init__(self, frozen: torch.nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = torch.nn.Linear(frozen.in_features, rank, bias=False)
        self.up = torch.nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.up(self.down(x))


class Dense:
    """A transformer: all of its state changes in each step."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.model = self.make(options)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(trained, fused=True)
        self.tokens = torch.randint(0, 2000, (options.batch, 64))
        self.optimizers = [self.optimizer]
        self.changed_bytes = 3 * sum(parameter.nbytes for parameter in trained)  # with two moments each

    def make(self, options: argparse.Namespace) -> torch.nn.Module:
        return transformer(options.width, options.layers)

    def step_in_backward(self) -> None:
        """From now on each parameter is updated as soon as its gradient is there, by an optimizer of its own."""
        own = {p: torch.optim.AdamW([p], fused=True) for group in self.optimizer.param_groups for p in group["params"]}

        def update(parameter: torch.Tensor) -> None:
            own[parameter].step()
            own[parameter].zero_grad()

        for parameter in own:
            parameter.register_post_accumulate_grad_hook(update)
        self.optimizers = list(own.values())

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.tokens).square().mean().backward()
        if self.optimizers == [self.optimizer]:
            self.optimizer.step()


class Adapted(Dense):
    """Of a frozen transformer, adapters of the feed-forward layers and the last layer are trained."""

    def make(self, options: argparse.Namespace) -> torch.nn.Module:
        model = transformer(options.width, options.layers).requires_grad_(False)
        for layer in model[1].layers:
            layer.linear1, layer.linear2 = WithAdapter(layer.linear1, 16), WithAdapter(layer.linear2, 16)
        return model


class Sparse:
    """An embedding of which each step changes few rows."""

    ROWS, WIDTH, PER_STEP = 262_144, 64, 4096

    def __init__(self, options: argparse.Namespace) -> None:
        self.model: torch.nn.Module = torch.nn.Embedding(self.ROWS, self.WIDTH, sparse=True)
        self.optimizer: torch.optim.Optimizer = torch.optim.SparseAdam(self.model.parameters())
        self.optimizers = [self.optimizer]
        self.generator = torch.Generator().manual_seed(0)
        self.changed_bytes = 0

    def train(self) -> None:
        ids = torch.randint(0, self.ROWS, (self.PER_STEP,), generator=self.generator)
        self.changed_bytes = 3 * 4 * self.WIDTH * len(ids.unique())
        self.optimizer.zero_grad()
        self.model(ids).square().sum().backward()
        self.optimizer.step()


WORKLOADS: dict[str, Callable[[argparse.Namespace], Dense | Sparse]] = {
    "transformer": Dense,
    "LoRA": Adapted,
    "sparse": Sparse,
}


class Contender:
    """A training of its own; subclasses save."""

    in_backward = False

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        torch.manual_seed(0)
        self.workload = WORKLOADS[options.workload](options)
        if self.in_backward:
            assert isinstance(self.workload, Dense)
            self.workload.step_in_backward()
        self.model, self.optimizer = self.workload.model, self.workload.optimizer
        self.folder = folder
        self.step_s: list[float] = []
        self.held_up_s: list[float] = []
        self.number = 0

    def step(self) -> None:
        start = time.perf_counter()
        self.workload.train()
        before = time.perf_counter()
        held_up = self.save(self.number)
        end = time.perf_counter()
        self.number += 1
        self.step_s.append(end - start)
        self.held_up_s.append(end - before if held_up is None else held_up)

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def save(self, step: int) -> float | None:
        """Saves; may say itself for how long it held up training, else the time of this call counts."""
        return 0.0

    def cpu_s(self) -> float | None:
        """CPU time of helper processes so far."""
        return None

    def bytes_per_change(self) -> tuple[float, float] | None:
        """What a save has read of the state, and that relative to what a step changes; of the last ones."""
        return None

    def close(self) -> None:
        pass


class TorchSave(Contender):
    def save(self, step: int) -> None:
        torch.save(self.state(), self.folder / "file.pt")


class LightningIO(Contender):
    """`TorchCheckpointIO`; the next one with its asynchronous wrapper."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        super().__init__(options, folder)
        from lightning.pytorch.plugins.io import TorchCheckpointIO

        self.io: Any = TorchCheckpointIO()

    def save(self, step: int) -> None:
        self.io.save_checkpoint(self.state(), str(self.folder / "file.ckpt"))


class AsyncLightningIO(LightningIO):
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        super().__init__(options, folder)
        from lightning.pytorch.plugins.io import AsyncCheckpointIO

        self.io = AsyncCheckpointIO(self.io)

    def close(self) -> None:
        self.io.teardown()


class AsyncDCP(Contender):
    """`torch.distributed.checkpoint.async_save`, which allows one save at a time, in a thread."""

    future: Any = None

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        if self.future is not None:
            self.future.result()
        where = self.folder / f"dcp{step % 2}"
        self.future = dcp.async_save(self.state(), checkpoint_id=where, **self.how())

    def how(self) -> dict[str, Any]:
        return {"no_dist": True}

    def close(self) -> None:
        if self.future is not None:
            self.future.result()


class AsyncDCPProcess(AsyncDCP):
    """In a process of its own, which needs a process group: one of this rank alone."""

    def how(self) -> dict[str, Any]:
        import torch.distributed as dist
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}

    def close(self) -> None:
        import torch.distributed as dist

        super().close()
        dist.destroy_process_group()


class ForkCopyOnWrite(Contender):
    """A forked child writes the state as it was."""

    child = 0

    def save(self, step: int) -> None:
        self.close()
        self.child = os.fork()
        if self.child == 0:
            torch.save(self.state(), self.folder / "file.pt")
            os._exit(0)

    def close(self) -> None:
        if self.child:
            os.waitpid(self.child, 0)
            self.child = 0


class Standby(Contender):
    """`Replicator` with a standby process of its own."""

    mode: Any = "lag1"
    transport: Any = "local"

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        super().__init__(options, folder)
        command = [sys.executable, "-m", "torchext", "standby", "--listen", "127.0.0.1:0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().split()[-1]
        self.replicator = Replicator(
            self.model,
            self.workload.optimizers,
            standby=self.address,
            job="benchmark",
            mode=self.mode,
            transport=self.transport,
            on_standby_loss="raise",
        )
        self.stalled_s = 0.0
        self.pulled = 0
        self.pulls: list[tuple[int, int]] = []  # bytes that a commit read, bytes that its step had changed
        self.changed_before = 0

    def save(self, step: int) -> float:
        start = time.perf_counter()
        waited = self.replicator.stats["stalled_s"]
        self.replicator.commit(step)
        call_s = time.perf_counter() - start
        now = self.replicator.stats["stalled_s"]
        # In the call, and at the gate of this step, which came before it.
        gate_s, self.stalled_s = waited - self.stalled_s, now
        pulled = self.replicator.stats["bytes_pulled"]
        if self.mode == "lag1":  # by now it has read the step before
            self.pulls.append((pulled - self.pulled, self.changed_before))
            self.changed_before = self.workload.changed_bytes
        else:
            self.pulls.append((pulled - self.pulled, self.workload.changed_bytes))
        self.pulled = pulled
        return call_s + gate_s

    def bytes_per_change(self) -> tuple[float, float]:
        pulls = self.pulls[3:] or self.pulls[-1:]  # the first are of all that there is
        return statistics.median(pull for pull, _ in pulls), statistics.median(p / max(1, c) for p, c in pulls)

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self.replicator.close()
        assert status(self.address)["jobs"]["benchmark"]["step"] == self.number - 1
        self.process.kill()
        self.process.communicate()


class StandbyRpo0(Standby):
    mode = "rpo0"


class NothingInBackward(Contender):
    in_backward = True


class StandbyRpo0InBackward(StandbyRpo0):
    in_backward = True


class StandbyTcp(Standby):
    transport = "tcp"


CONTENDERS: dict[str, Callable[[argparse.Namespace, Path], Contender]] = {
    "nothing": Contender,
    "standby": Standby,
    "standby, rpo0": StandbyRpo0,
    "nothing, in backward": NothingInBackward,
    "standby, rpo0, in backward": StandbyRpo0InBackward,
    "standby, TCP": StandbyTcp,
    "torch.save": TorchSave,
    "TorchCheckpointIO": LightningIO,
    "AsyncCheckpointIO": AsyncLightningIO,
    "DCP async_save, thread": AsyncDCP,
    "DCP async_save, process": AsyncDCPProcess,
    "fork, copy on write": ForkCopyOnWrite,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="transformer", choices=list(WORKLOADS))
    parser.add_argument("--threads", type=int, default=1, help="of each training")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="of each contender in a round")
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), help="default: all")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8, help="sequences of 64 tokens")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    if options.contenders is None:
        can_step_in_backward = options.workload != "sparse"
        options.contenders = [name for name in CONTENDERS if can_step_in_backward or "in backward" not in name]
    os.environ.setdefault("TORCHEXT_STANDBY_TOKEN", secrets.token_hex(16))
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as root:
        running: dict[str, Contender] = {}
        for name in options.contenders:
            folder = Path(root, name.replace(" ", "_"))
            folder.mkdir()
            running[name] = CONTENDERS[name](options, folder)
        for contender in running.values():
            contender.step()  # makes the moments, adopts, touches memory for the first time
            contender.step()
            contender.step_s.clear()
            contender.held_up_s.clear()
        cpu_before = {name: contender.cpu_s() for name, contender in running.items()}
        for _ in range(options.rounds):
            for contender in running.values():
                for _ in range(options.steps):
                    contender.step()
        cpu_after = {name: contender.cpu_s() for name, contender in running.items()}
        for contender in running.values():
            contender.close()
    first = next(iter(running.values()))
    size = sum(p.numel() for p in first.model.parameters())
    changed = first.workload.changed_bytes
    base = statistics.median(running["nothing"].step_s) if "nothing" in running else float("nan")
    print(f"{options.workload}: {size / 1e6:.1f} M parameters, {changed / 1e6:.1f} MB of state change in a step")
    rows = []
    for name, contender in running.items():
        step_s, held_up_s = statistics.median(contender.step_s), statistics.median(contender.held_up_s)
        before, after = cpu_before[name], cpu_after[name]
        cpu = None if before is None or after is None else (after - before) / len(contender.step_s)
        rows.append(
            {
                "contender": name,
                "step_s": step_s,
                "slowest_step_s": max(contender.step_s),
                "held_up_s": held_up_s,
                "standby_cpu_s": cpu,
                "bytes_per_step": None if (pulled := contender.bytes_per_change()) is None else pulled[0],
                "bytes_per_changed_byte": None if pulled is None else pulled[1],
            }
        )
        words = "" if cpu is None else f"  standby: {1e3 * cpu:.1f} ms of CPU per step"
        if pulled is not None:
            words += f", {pulled[0] / 1e6:.2f} MB ({pulled[1]:.3f}x of what changed)"
        print(
            f"{name:<26} step {1e3 * step_s:8.1f} ms ({100 * (step_s / base - 1):+6.1f} %)  held up "
            f"{1e3 * held_up_s:8.2f} ms ({100 * held_up_s / base:6.2f} % of a step){words}"
        )
    if options.json:
        versions = {"torchext": torchext.__version__, "torch": torch.__version__, "threads": torch.get_num_threads()}
        options.json.write_text(json.dumps({"versions": versions, "options": sys.argv[1:], "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
