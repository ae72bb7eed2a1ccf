"""What keeping the state of every step costs: the standby beside ways to save a checkpoint, interleaved.

    python tests/benchmarks/standby.py [--workload transformer] [--rounds 5] [--steps 3] [--contenders ...]

Each contender trains a model of its own and saves after each step. The workloads: "transformer" (17.3 M parameters by
default, fused AdamW, 208 MB of state), "LoRA" (the same, frozen, with adapters of rank 16 that are trained) and
"sparse" (an embedding of 262,144 rows of 64, SparseAdam, 4,096 random rows in each step, 201 MB). A round gives every
contender some steps. Reported, as medians over all steps: how long a step took, also against "nothing" in the same
rounds, and for how long saving held up the training (within the call, and at the gate before the optimizer's step); in
brackets the 10th percentiles, as a busy machine only ever makes a step longer.
For standbys, the CPU time that their process took for each step, and what they read of the state in each step, also
against the bytes that the step changed. Training uses one thread, as the standby's share of a machine is to be seen
apart; --threads gives it more. "In backward" means that each parameter has an optimizer of its own, which steps as soon
as the gradient is there. "Only copied" is no standby, but what any standby on the same host costs at least: another
process copies what the step changed, in one memmove for each tensor, and does nothing else: no messages but a byte, no
checksums, no commits. "Tracked" has the kernel say which pages were written; "huge pages" need some of 2 MiB reserved
(sysctl vm.nr_hugepages=500), else they are left out by default. Files go to a temporary folder.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import secrets
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from standby_workloads import WORKLOADS, Dense

import torchext
from torchext.standby import Replicator
from torchext.standby.link import status


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


def cpu_s_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class OnlyCopied(Contender):
    """A child copies the parameters and moments of whatever parameters it is told; the optimizer waits for it."""

    is_waited_for_at_once = False

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        super().__init__(options, folder)
        self.child, self.num_copying, self.waited_s = 0, 0, 0.0
        orders, self.orders = os.pipe()
        self.answers, answers = os.pipe()
        self.ends_of_child = orders, answers
        for optimizer in self.workload.optimizers:
            optimizer.register_step_pre_hook(lambda *_: self.wait())

    def parameters(self) -> list[torch.Tensor]:
        return [p for optimizer in self.workload.optimizers for g in optimizer.param_groups for p in g["params"]]

    def start_child(self) -> None:
        """Once there are moments."""
        tensors = []
        for optimizer in self.workload.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    moments = [each for each in optimizer.state[parameter].values() if each.ndim]
                    tensors.append([each.detach().share_memory_() for each in (parameter, *moments)])
        self.child = os.fork()
        if self.child:
            return
        for each in map(int, os.listdir("/proc/self/fd")):  # also of the pipes of others like this one
            if each > 2 and each not in self.ends_of_child:
                with contextlib.suppress(OSError):  # that of the listing
                    os.close(each)
        copies = [[ctypes.create_string_buffer(each.nbytes) for each in several] for several in tensors]
        while order := os.read(self.ends_of_child[0], 4):
            (i,) = struct.unpack("<I", order)
            for target, source in zip(copies[i], tensors[i], strict=True):
                ctypes.memmove(target, source.data_ptr(), source.nbytes)
            os.write(self.ends_of_child[1], b".")
        os._exit(0)

    def copy(self, *numbers: int) -> None:
        if self.child:
            os.write(self.orders, struct.pack(f"<{len(numbers)}I", *numbers))
            self.num_copying += len(numbers)

    def wait(self) -> None:
        start = time.perf_counter()
        while self.num_copying:
            self.num_copying -= len(os.read(self.answers, self.num_copying))
        self.waited_s += time.perf_counter() - start

    def save(self, step: int) -> float:
        if self.child == 0:
            self.start_child()
        start = time.perf_counter()
        before, self.waited_s = self.waited_s, 0.0
        self.order()
        call_s = time.perf_counter() - start
        if self.is_waited_for_at_once:
            self.wait()
        else:
            self.waited_s = 0.0
        return before + call_s + self.waited_s

    def order(self) -> None:
        self.copy(*range(len(self.parameters())))

    def cpu_s(self) -> float:
        return cpu_s_of(self.child)

    def close(self) -> None:
        for end in (self.orders, self.answers, *self.ends_of_child):
            os.close(end)
        os.waitpid(self.child, 0)


class OnlyCopiedAtOnce(OnlyCopied):
    is_waited_for_at_once = True


class OnlyCopiedInBackward(OnlyCopiedAtOnce):
    in_backward = True

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        super().__init__(options, folder)
        for i, optimizer in enumerate(self.workload.optimizers):
            optimizer.register_step_post_hook(lambda *_, i=i: self.copy(i))  # type: ignore[misc]

    def order(self) -> None:
        pass


class Standby(Contender):
    """`Replicator` with a standby process of its own."""

    mode: Any = "lag1"
    how: ClassVar[dict[str, Any]] = {"transport": "local"}

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
            on_standby_loss="raise",
            **self.how,
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
        return cpu_s_of(self.process.pid)

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
    how: ClassVar[dict[str, Any]] = {"transport": "tcp"}


class StandbyPages(Standby):
    """The kernel says which pages were written."""

    how: ClassVar[dict[str, Any]] = {"tracking": "pages", "huge_pages": False}


class StandbyHuge(Standby):
    how: ClassVar[dict[str, Any]] = {"huge_pages": True}


class StandbyHugePages(Standby):
    how: ClassVar[dict[str, Any]] = {"tracking": "pages", "huge_pages": True}


CONTENDERS: dict[str, Callable[[argparse.Namespace, Path], Contender]] = {
    "nothing": Contender,
    "standby": Standby,
    "standby, rpo0": StandbyRpo0,
    "nothing, in backward": NothingInBackward,
    "standby, rpo0, in backward": StandbyRpo0InBackward,
    "standby, TCP": StandbyTcp,
    "standby, pages tracked": StandbyPages,
    "standby, huge pages": StandbyHuge,
    "standby, huge pages tracked": StandbyHugePages,
    "only copied": OnlyCopied,
    "only copied, at once": OnlyCopiedAtOnce,
    "only copied, in backward": OnlyCopiedInBackward,
    "torch.save": TorchSave,
    "TorchCheckpointIO": LightningIO,
    "AsyncCheckpointIO": AsyncLightningIO,
    "DCP async_save, thread": AsyncDCP,
    "DCP async_save, process": AsyncDCPProcess,
    "fork, copy on write": ForkCopyOnWrite,
}


def p10(times_s: list[float]) -> float:
    return sorted(times_s)[len(times_s) // 10]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="transformer", choices=list(WORKLOADS))
    parser.add_argument("--threads", type=int, default=1, help="of each training")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="of each contender in a round")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no round after so long")
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), help="default: all")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8, help="sequences of 64 tokens")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    if options.contenders is None:
        left_out = [] if options.workload != "sparse" else ["in backward", "only copied"]
        if int(Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").read_text()) < 400:
            left_out.append("huge pages")
        options.contenders = [name for name in CONTENDERS if not any(word in name for word in left_out)]
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
        end = time.monotonic() + options.seconds
        for _ in range(options.rounds):
            if time.monotonic() > end:
                break
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
    base_p10 = p10(running["nothing"].step_s) if "nothing" in running else float("nan")
    print(f"{options.workload}: {size / 1e6:.1f} M parameters, {changed / 1e6:.1f} MB of state change in a step")
    rows = []
    for name, contender in running.items():
        step_s, held_up_s = statistics.median(contender.step_s), statistics.median(contender.held_up_s)
        step_p10_s, held_up_p10_s = p10(contender.step_s), p10(contender.held_up_s)
        before, after = cpu_before[name], cpu_after[name]
        cpu = None if before is None or after is None else (after - before) / len(contender.step_s)
        rows.append(
            {
                "contender": name,
                "step_s": step_s,
                "step_p10_s": step_p10_s,
                "slowest_step_s": max(contender.step_s),
                "held_up_s": held_up_s,
                "held_up_p10_s": held_up_p10_s,
                "standby_cpu_s": cpu,
                "bytes_per_step": None if (pulled := contender.bytes_per_change()) is None else pulled[0],
                "bytes_per_changed_byte": None if pulled is None else pulled[1],
            }
        )
        words = "" if cpu is None else f"  standby: {1e3 * cpu:.1f} ms of CPU per step"
        if pulled is not None:
            words += f", {pulled[0] / 1e6:.2f} MB ({pulled[1]:.3f}x of what changed)"
        print(
            f"{name:<26} step {1e3 * step_s:6.1f} ms {100 * (step_s / base - 1):+6.1f} % "
            f"[{1e3 * step_p10_s:.1f} ms {100 * (step_p10_s / base_p10 - 1):+.1f} %]  "
            f"held up {1e3 * held_up_s:7.2f} ms {100 * held_up_s / base:6.2f} % of a step "
            f"[{1e3 * held_up_p10_s:.2f} ms]{words}"
        )
    if options.json:
        versions = {"torchext": torchext.__version__, "torch": torch.__version__, "threads": torch.get_num_threads()}
        options.json.write_text(json.dumps({"versions": versions, "options": sys.argv[1:], "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
