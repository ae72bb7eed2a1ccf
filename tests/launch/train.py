"""A real training script for tests: steps of all_reduce on gloo, with a checkpoint; says what it computed.

Arguments: number of steps, seconds per step, rank that dies by SIGKILL at step 2 of attempt 0 (-1: none).
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist


def main(num_steps: int, step_s: float, dying_rank: int) -> None:
    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
    total = torch.zeros(1)
    for step in range(num_steps):
        if rank == dying_rank and step == 2 and attempt == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        part = torch.full((1,), float(rank + step))
        dist.all_reduce(part)
        total += part
        time.sleep(step_s)
    # One write, so that the lines of several ranks do not mix.
    os.write(1, f"rank {rank}/{dist.get_world_size()} attempt {attempt} total {total.item():g}\n".encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
