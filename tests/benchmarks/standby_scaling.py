"""How the cost of a standby grows with the state and with how often it is committed.

    python tests/benchmarks/standby_scaling.py [--megabytes 20 63 200 632 2000] [--every 1 3 10 30 100] [--plot out.png]

For each size, layers of 1024 x 1024 with AdamW (state: parameters, two moments) train on one thread, alone and with a
standby process that gets each N-th step; rounds of N steps, at least 4, alternate between all, and with rounds of 8
alone. The table gives, for each size and N, how much longer a step is than alone in per cent, and for how long commits
and gates held a step up in per mille of it: means of the steps of a round, medians over the rounds. The largest state
takes 8 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import torchext
from torchext.standby import Replicator

WIDTH = 1024
BATCH = 64
ALONE = 8  # steps of a round without a standby


class Training:
    """A model, its optimizer, and a standby that can be switched on."""

    def __init__(self, size_bytes: int, address: str) -> None:
        torch.manual_seed(0)
        num_layers = max(1, round(size_bytes / (3 * 4 * WIDTH * WIDTH)))
        self.model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.x = torch.randn(BATCH, WIDTH)
        self.size_bytes = 3 * sum(parameter.nbytes for parameter in self.model.parameters())
        self.replicator = Replicator(
            self.model, self.optimizer, standby=address, job=str(size_bytes), on_standby_loss="raise"
        )
        self.number = 0

    def round(self, num_steps: int, every: int | None) -> tuple[float, float]:
        """Seconds of a step, and for how long it was held up, on average."""
        self.replicator.gate()  # what is under way belongs to another round
        held_up_s, waited = 0.0, self.replicator.stats["stalled_s"]
        start = time.perf_counter()
        for i in range(num_steps):
            self.optimizer.zero_grad()
            self.model(self.x).square().mean().backward()
            self.optimizer.step()
            self.number += 1
            if every is not None and (i + 1) % every == 0:
                before, waited_before = time.perf_counter(), self.replicator.stats["stalled_s"]
                self.replicator.commit(self.number)
                # The gate within the call counts once.
                held_up_s += time.perf_counter() - before
                waited += self.replicator.stats["stalled_s"] - waited_before
        step_s = (time.perf_counter() - start) / num_steps
        gates_s = self.replicator.stats["stalled_s"] - waited
        return step_s, (held_up_s + gates_s) / num_steps


def measure(size_bytes: int, intervals: list[int], rounds: int, address: str) -> list[dict[str, Any]]:
    """A row for each interval."""
    training = Training(size_bytes, address)
    for _ in range(3):  # makes the moments, adopts, touches all memory
        training.round(1, 1)
    alone: list[float] = []
    replicated: dict[int, list[tuple[float, float]]] = {every: [] for every in intervals}
    for _ in range(rounds):
        for every in intervals:
            alone.append(training.round(ALONE, None)[0])
            replicated[every].append(training.round(max(4, every), every))
    training.replicator.close()
    rows = []
    base_s = statistics.median(alone)
    for every in intervals:
        rows.append(
            {
                "state_bytes": training.size_bytes,
                "every": every,
                "step_s": base_s,
                "longer": statistics.median(step_s for step_s, _ in replicated[every]) / base_s - 1,
                "held_up": statistics.median(held_up for _, held_up in replicated[every]) / base_s,
            }
        )
    return rows


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Both figures over the size, a line for each interval."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, key, label in zip(
        figure.subplots(1, 2), ("longer", "held_up"), ("step longer", "step held up"), strict=True
    ):
        for every in sorted({row["every"] for row in rows}):
            chosen = [row for row in rows if row["every"] == every]
            name = "every step" if every == 1 else f"every {every} steps"
            values = [100 * max(0.0, row[key]) for row in chosen]
            axes.plot([row["state_bytes"] / 1e6 for row in chosen], values, "o-", label=name)
        axes.set(xscale="log", xlabel="state, MB", ylabel=f"{label}, %", ylim=(0, None))
        axes.grid(alpha=0.3)
    figure.axes[0].legend(title="commit", fontsize="small")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[20, 63, 200, 632, 2000])
    parser.add_argument("--every", type=int, nargs="+", default=[1, 3, 10, 30, 100])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="needs pip install 'torchext[plots]'")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    os.environ.setdefault("TORCHEXT_STANDBY_TOKEN", secrets.token_hex(16))
    torch.set_num_threads(1)
    command = [sys.executable, "-m", "torchext", "standby", "--listen", "127.0.0.1:0"]
    rows = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as standby:
        try:
            assert standby.stdout is not None
            address = standby.stdout.readline().split()[-1]
            print("state MB   alone ms   longer % / held up permille, committed every N steps: N =", *options.every)
            for megabytes in options.megabytes:
                found = measure(1_000_000 * megabytes, options.every, options.rounds, address)
                cells = "  ".join(f"{100 * row['longer']:+6.1f} /{1e3 * row['held_up']:6.2f}" for row in found)
                print(f"{found[0]['state_bytes'] / 1e6:8.0f}   {1e3 * found[0]['step_s']:8.1f}   {cells}", flush=True)
                rows += found
                subprocess.run([*command[:4], "remove", "--standby", address, str(1_000_000 * megabytes)], check=True)
        finally:
            standby.kill()
    if options.plot:
        plot(rows, options.plot)
    if options.json:
        versions = {"torchext": torchext.__version__, "torch": torch.__version__, "python": platform.python_version()}
        options.json.write_text(json.dumps({"versions": versions, "options": sys.argv[1:], "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
