"""A training as users write it: ``launched.py FOLDER STANDBY``, started by a launcher; rank 1 kills itself once."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch.distributed as dist

from tests.standby.processes import build, step
from torchext.standby import Replicator

NUM_STEPS = 8


def main(folder: Path, standby: str) -> None:
    """Writes a line for each step; the launcher may start this again."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, optimizer = build(rank)
    with Replicator(model, optimizer, standby=standby) as replicator, (folder / f"log{rank}").open("a") as log:
        found = replicator.restore()
        for i in range(0 if found is None else found.step + 1, NUM_STEPS):
            loss = step(model, optimizer)
            dist.barrier()
            if i == 5 and rank == 1 and not (folder / "died").exists():
                (folder / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            replicator.commit(i)
            log.write(f"{i} {loss!r}\n")
            log.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
