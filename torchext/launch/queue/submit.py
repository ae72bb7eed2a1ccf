"""From a command line of ``torchext run --queue`` to a job."""

from __future__ import annotations

import getpass
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from torchext.launch.errors import LaunchError
from torchext.launch.queue.client import Client
from torchext.launch.queue.types import Submission


def describe(words: Sequence[str]) -> Submission:
    """Describes the job that ``torchext run --queue URL`` with these words asks for, here and in this environment.

    Args:
        words: Options, script and its arguments, as in ``["--nproc-per-node", "2", "train.py", "--lr", "1"]``.

    Raises:
        LaunchError: It cannot work, or not in a queue.
        SystemExit: The options are not understood.
    """
    from torch.distributed.run import parse_min_max_nnodes  # here: a daemon needs no torch

    from torchext.launch import arguments

    words = [str(word) for word in words]
    args = arguments.parser().parse_args(words)
    arguments.check(args)
    low, high = parse_min_max_nnodes(args.nnodes)
    if low != high:
        raise LaunchError(f"--nnodes must be one number with --queue, got {args.nnodes!r}")
    if args.standalone and high > 1:
        raise LaunchError("--standalone is for one node; leave it out, the queue lets the nodes meet")
    begin = len(words) - len(args.training_script_args) - 1
    assert words[begin] == args.training_script
    options = words[:begin]
    if options and options[-1] == "--":
        options.pop()  # the queue adds options of its own after these
    try:
        nproc: int | None = int(args.nproc_per_node)
    except ValueError:
        nproc = None  # auto, gpu, cpu: what the machine has
    made = Submission(
        name=args.name or Path(args.training_script).stem,
        user=getpass.getuser(),
        options=tuple(options),
        command=tuple(words[begin:]),
        python=sys.executable,
        cwd=str(Path.cwd()),
        env=dict(os.environ),
        num_nodes=high,
        nproc_per_node=nproc,
        grace_s=arguments.grace_s(args),
        min_nodes=args.min_nodes,
        rendezvous=args.rdzv_conf,
        estimate_s=args.estimate,
        deadline_s=None if args.deadline is None else time.time() + args.deadline,
        job_class=args.job_class or "",
        priority=args.priority or 0,
        max_price_per_gpu_hour=args.max_price,
        retries=args.retries or 0,
    )
    made.check()
    return made


def submit(url: str, words: Sequence[str]) -> int:
    """Submits the job; returns its number.

    Raises:
        LaunchError: It cannot work, the cluster could never run it, or no queue answers.
    """
    described = describe(words)
    with Client(url) as client:
        return client.submit(described)
