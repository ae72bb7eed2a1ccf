"""How long after the loss of a training process a warm worker goes on.

    python tests/benchmarks/standby_takeover.py [--rounds 7] [--width 512 --layers 5]

In each round a training of a transformer with fused AdamW (17.3 M parameters, 208 MB of state by default) is lost while
it trains, and the worker that ``torchext standby --promote`` keeps warm takes over:

- killed: by SIGKILL, its memory read by the standby of the same host, which sees its end at once;
- silent: by SIGSTOP, its state sent over TCP, as a remote host that is gone: the standby misses its heartbeats.

Reported, as medians over the rounds: from the loss until the worker has the state back and begins its first new step,
and until that step has ended; the step itself for comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from standby_workloads import transformer

from torchext.standby import Replicator
from torchext.standby.link import status

WARM_UP = 4  # steps before the loss


def train(address: str, log: str, transport: Any, width: int, layers: int) -> None:
    """The training program: writes when it has its state and when each step ends."""
    torch.manual_seed(0)
    model = transformer(width, layers)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(0, 2000, (8, 64))
    model(tokens).square().mean().backward()  # what only the first step costs; the gradients are thrown away
    optimizer.zero_grad()
    replicator = Replicator(model, optimizer, standby=address, job="benchmark", transport=transport)
    with Path(log).open("a", buffering=1) as file:
        found = replicator.restore()
        file.write(json.dumps({"pid": os.getpid(), "restored": time.monotonic()}) + "\n")
        step = 0 if found is None else found.step + 1
        while True:
            start = time.monotonic()
            optimizer.zero_grad()
            model(tokens).square().mean().backward()
            optimizer.step()
            file.write(
                json.dumps({"pid": os.getpid(), "ended": time.monotonic(), "took": time.monotonic() - start}) + "\n"
            )
            replicator.commit(step)
            step += 1


def until(condition: Callable[[], bool], deadline_s: float = 120.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {deadline_s:g} s")
        time.sleep(0.01)


def lines(log: Path) -> list[dict[str, Any]]:
    whole = log.read_text().rpartition("\n")[0] if log.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]


def one_loss(folder: Path, how: signal.Signals, transport: str, options: argparse.Namespace) -> dict[str, float]:
    log = folder / f"log-{secrets.token_hex(4)}"
    with socket.socket() as sock:  # a port that is free now; nobody else is likely to take it
        sock.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{sock.getsockname()[1]}"
    program = [sys.executable, __file__, "--train", address, str(log), transport]
    program += ["--width", str(options.width), "--layers", str(options.layers)]
    standby = subprocess.Popen(
        [sys.executable, "-m", "torchext", "standby", "--listen", address, "--promote", " ".join(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    first = None
    try:
        assert standby.stdout is not None
        standby.stdout.readline()
        first = subprocess.Popen(program)
        # The worker is warm once it waits: it has started first, and needs as long.
        until(lambda: sum(line["pid"] == first.pid and "ended" in line for line in lines(log)) >= WARM_UP)
        until(lambda: status(address)["warm"] is not None and status(address)["waiting"])
        lost = time.monotonic()
        first.send_signal(how)
        until(lambda: any(line["pid"] != first.pid and "ended" in line for line in lines(log)))
        ours = [line for line in lines(log) if line["pid"] != first.pid]
        os.kill(ours[0]["pid"], signal.SIGKILL)
        return {
            "begins_s": ours[0]["restored"] - lost,
            "ended_s": ours[1]["ended"] - lost,
            "step_s": statistics.median(
                line["took"] for line in lines(log) if line["pid"] == first.pid and "took" in line
            ),
        }
    finally:
        if first is not None:
            first.kill()
            first.wait()
        standby.terminate()
        standby.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)  # what this file starts
    options = parser.parse_args()
    if options.train is not None:
        address, log, transport = options.train
        train(address, log, transport, options.width, options.layers)
    os.environ.setdefault("TORCHEXT_STANDBY_TOKEN", secrets.token_hex(16))
    cases = {"killed, same host": (signal.SIGKILL, "local"), "silent, over TCP": (signal.SIGSTOP, "tcp")}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            for name, (how, transport) in cases.items():
                rounds[name].append(one_loss(Path(folder), how, transport, options))
    for name, found in rounds.items():
        median = {key: statistics.median(each[key] for each in found) for key in found[0]}
        fastest = min(each["begins_s"] for each in found)
        print(
            f"{name:<18} first new step begins {1e3 * median['begins_s']:7.1f} ms after the loss (fastest "
            f"{1e3 * fastest:.1f}), has ended {1e3 * median['ended_s']:7.1f} ms after; a step takes "
            f"{1e3 * median['step_s']:.1f} ms"
        )
    if options.json is not None:
        options.json.write_text(
            json.dumps({"torch": torch.__version__, "options": sys.argv[1:], "rounds": rounds}, indent=2)
        )


if __name__ == "__main__":
    main()
