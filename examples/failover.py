"""A training kills itself in a random step, starts again, finds its state at the standby, and the two curves are one.

    python examples/failover.py [--seed 1]

A small transformer learns to continue sequences. One run is left in peace. Another replicates each step to a standby
(on this host, started by the example) and is killed with SIGKILL in the middle of its work, three times. The output,
but for the numbers:

    undisturbed: 60 steps, loss 2.8978 -> 0.1778
    killed in step 13, goes on from step 12
    killed in step 41, goes on from step 40
    killed in step 59, goes on from step 58
    disturbed:   60 steps, loss 2.8978 -> 0.1778
    all 60 losses are equal, bit for bit
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

STEPS = 60
VOCABULARY = 16


class Model(torch.nn.Module):
    """Two layers of attention over short sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, 64)
        layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
        self.body = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(64, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.body(self.embedding(tokens), mask=mask, is_causal=True))


def batch() -> torch.Tensor:
    """Arithmetic sequences with random starts and strides: (32, 13) int64."""
    start, stride = torch.randint(VOCABULARY, (32, 1)), torch.randint(1, 4, (32, 1))
    return (start + stride * torch.arange(13)) % VOCABULARY


def train(log: Path, standby: str | None, die_in: int) -> None:
    """One process: goes on from where the standby is, and writes each step's loss to the log."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    replicator, first = None, 0
    if standby is not None:
        from torchext.standby import Replicator

        replicator = Replicator(model, optimizer, standby=standby, job="failover")
        found = replicator.restore()
        first = 0 if found is None else found.step + 1
    with log.open("a") as file:
        for step in range(first, STEPS):
            tokens = batch()
            logits = model(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            if step == die_in:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()  # waits until the standby has the step before
            if replicator is not None:
                replicator.commit(step)
            file.write(json.dumps({"step": step, "loss": loss.item()}) + "\n")
            file.flush()
        if replicator is not None:
            replicator.close()


def run(log: Path, standby: str | None, die_in: int = -1) -> int:
    """Runs `train` in a process of its own; returns how it ended."""
    command = [sys.executable, __file__, "--log", str(log), "--die-in", str(die_in)]
    if standby is not None:
        command += ["--standby", standby]
    return subprocess.run(command, check=False).returncode


def losses(log: Path) -> list[float]:
    """By step; what was done twice counts as it was done last."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    found = {line["step"]: line["loss"] for line in lines}
    return [found[step] for step in range(STEPS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of the steps in which it dies")
    for name in ("--log", "--standby", "--die-in"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.log is not None:  # one of the trainings that this started
        train(Path(options.log), options.standby, int(options.die_in))
        return
    os.environ.setdefault("TORCHEXT_STANDBY_TOKEN", secrets.token_hex(16))
    command = [sys.executable, "-m", "torchext", "standby", "--listen", "127.0.0.1:0"]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as standby,
    ):
        try:
            assert standby.stdout is not None
            address = standby.stdout.readline().split()[-1]
            calm, rough = Path(folder, "calm"), Path(folder, "rough")
            assert run(calm, None) == 0
            expected = losses(calm)
            print(f"undisturbed: {STEPS} steps, loss {expected[0]:.4f} -> {expected[-1]:.4f}", flush=True)
            for die_in in sorted(random.Random(options.seed).sample(range(5, STEPS), 3)):
                assert run(rough, address, die_in) == -signal.SIGKILL
                status = [sys.executable, "-m", "torchext", "standby", "status", "--json", "--standby", address]
                step = json.loads(subprocess.check_output(status))["jobs"]["failover"]["step"]
                print(f"killed in step {die_in}, goes on from step {step + 1}", flush=True)
            assert run(rough, address) == 0
            got = losses(rough)
            print(f"disturbed:   {STEPS} steps, loss {got[0]:.4f} -> {got[-1]:.4f}")
            equal = sum(a == b for a, b in zip(expected, got, strict=True))
            words = "all" if equal == STEPS else "only"
            print(f"{words} {equal} losses are equal, bit for bit")
        finally:
            standby.kill()
    sys.exit(0 if equal == STEPS else 1)


if __name__ == "__main__":
    main()
