"""A training program that may be kept warm: ``python -m tests.standby.worker ADDRESS LOG NUM_STEPS [WAIT]``.

It writes a line for each step, with the time, once that is committed. With WAIT, a line on the standard input is needed
for each step.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch

from tests.standby.processes import build, step


def main() -> None:
    """Trains."""
    from torchext.standby import Replicator

    torch.set_num_threads(1)
    address, log, num_steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    model, optimizer = build()
    with open(log, "a", buffering=1) as file, Replicator(model, optimizer, standby=address, job="job") as replicator:
        print(json.dumps({"pid": os.getpid()}), flush=True)
        found = replicator.restore()
        for i in range(0 if found is None else found.step + 1, num_steps):
            if len(sys.argv) > 4 and not sys.stdin.readline():
                return
            loss = step(model, optimizer)
            replicator.commit(i)
            file.write(json.dumps({"step": i, "loss": loss, "pid": os.getpid(), "at": time.time()}) + "\n")
        replicator.gate()
        weights = [tensor.tolist() for tensor in model.state_dict().values()]
        file.write(json.dumps({"weights": weights, "pid": os.getpid()}) + "\n")


if __name__ == "__main__":
    main()
