"""The command line of ``torchext run``: torchrun's own parser, with one more group of options."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.run import get_args_parser, parse_min_max_nnodes

from torchext.launch.durations import duration
from torchext.launch.errors import LaunchError

if sys.platform != "win32":
    import resource


def parser() -> argparse.ArgumentParser:
    """Makes the parser. Every spelling that torchrun understands, abbreviations included, means the same here."""
    made = get_args_parser()
    made.prog = "torchext run"
    made.description = "Starts the processes of a training script, as torchrun does."
    before = set(made._option_string_actions)
    group = made.add_argument_group("torchext")
    group.add_argument(
        "--grace",
        type=duration,
        metavar="TIME",
        help="how long workers may take to end once asked to (SIGTERM), on every path: a signal, a failed peer, a "
        "restart; then they are killed. Seconds, or as in 90s, 5m, 1h. Default: --shutdown-timeout, or 30 s",
    )
    queue = made.add_argument_group("with a queue (torchext queue start)")
    queue.add_argument(
        "--queue", metavar="URL", help="submit there instead of running: tcp://HOST:PORT, a folder, or local"
    )
    for words, options in QUEUE_OPTIONS.items():
        queue.add_argument(words, **options)
    _prefer(made, before)
    return made


def _prefer(made: argparse.ArgumentParser, names: set[str]) -> None:
    """Lets an abbreviation of these names stay one, whatever else the parser has learned since."""
    find: Any = made._get_option_tuples

    def find_preferred(text: str) -> list[Any]:
        found: list[Any] = find(text)
        return [match for match in found if match[1] in names] or found

    made._get_option_tuples = find_preferred  # type: ignore[method-assign,assignment]


# Say something to a queue only.
QUEUE_OPTIONS: dict[str, dict[str, Any]] = {
    "--name": {"help": "of the job, for people; default: that of the script"},
    "--estimate": {"type": duration, "metavar": "TIME", "help": "how long it will run, you think"},
    "--deadline": {
        "type": duration,
        "metavar": "TIME",
        "help": "when it should have ended, from now",
    },
    "--priority": {"type": int, "metavar": "N", "help": "the highest are served first, default 0"},
    "--retries": {"type": int, "metavar": "N", "help": "how many failures are followed by another run, default 0"},
    "--min-nodes": {"type": int, "metavar": "N", "help": "go on with so many of --nnodes when the others are lost"},
    "--class": {"dest": "job_class", "metavar": "NAME", "help": "kind of work, as in the speeds of the cluster file"},
    "--max-price": {"type": float, "metavar": "X", "help": "run on no machine that costs more per GPU and hour"},
}


def grace_s(args: argparse.Namespace) -> float:
    """Says how long workers may take to end: ``--grace``, or what torchrun's options and environment say."""
    for value in (
        args.grace,
        getattr(args, "shutdown_timeout", None),
        os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT"),
    ):
        if value is not None:
            return float(value)
    return 30.0


def check_queue_options(args: argparse.Namespace) -> None:
    """Refuses options that say something to a queue where there is none.

    Raises:
        LaunchError: There is such an option.
    """
    for words, options in QUEUE_OPTIONS.items():
        name = options.get("dest", words.strip("-").replace("-", "_"))
        if getattr(args, name) is not None:
            raise LaunchError(f"{words} is for a queue: give --queue URL, too, or leave it out")


def check(args: argparse.Namespace) -> None:
    """Refuses what could not work, before anything is started.

    Raises:
        LaunchError: No such script or program, or a number that makes no sense; says which argument, and what it was.
    """
    _check_script(args)
    _check_nodes(args.nnodes)
    if args.max_restarts < 0:
        raise LaunchError(f"--max-restarts must not be negative, got {args.max_restarts}")
    _check_processes(args.nproc_per_node)


def _check_script(args: argparse.Namespace) -> None:
    script = args.training_script
    if args.no_python and args.module:
        raise LaunchError("--no-python and --module exclude each other: give one of them")
    if args.module:
        return  # found by Python, in a way that only the worker knows
    if args.no_python and not args.run_path:
        if shutil.which(script) is None:
            raise LaunchError(f"there is no program {script!r}, as a path or on PATH (--no-python runs it as it is)")
        return
    path = Path(script)
    if path.is_dir():
        if not (path / "__main__.py").is_file():
            raise LaunchError(f"{script!r} is a folder without a __main__.py; give the training script")
    elif not path.exists():
        names = [other.name for other in path.parent.glob("*.py")] if path.parent.is_dir() else []
        near = _nearest(path.name, names)
        hint = f"; did you mean {str(path.parent / near)!r}?" if near else ""
        raise LaunchError(f"there is no training script {script!r} in {str(Path.cwd())!r}{hint}")


def _nearest(name: str, names: list[str]) -> str | None:
    import difflib

    return next(iter(difflib.get_close_matches(name, names, n=1)), None)


def _check_nodes(nnodes: str) -> None:
    try:
        low, high = parse_min_max_nnodes(nnodes)
    except (RuntimeError, ValueError):
        raise LaunchError(f"--nnodes must be a number or MIN:MAX, got {nnodes!r}") from None
    if not 1 <= low <= high:
        raise LaunchError(f"--nnodes must be at least 1, and MIN no more than MAX, got {nnodes!r}")


def _check_processes(nproc_per_node: str) -> None:
    try:
        count = int(nproc_per_node)
    except ValueError:
        return  # auto, cpu, gpu, ...: torch knows them
    if count < 1:
        raise LaunchError(f"--nproc-per-node must be at least 1, got {count}")
    if sys.platform != "win32":
        limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        if limit != resource.RLIM_INFINITY and count > limit:
            raise LaunchError(
                f"--nproc-per-node {count} is more than the {limit} processes that this user may have (ulimit -u)"
            )
    pids = _pid_limit()
    if count > pids:
        raise LaunchError(f"--nproc-per-node {count} is more than the {pids} processes that this system can have")


def _pid_limit() -> float:
    try:
        return int(Path("/proc/sys/kernel/pid_max").read_text())
    except (OSError, ValueError):
        return math.inf


def too_few_gpus(nproc_per_node: int) -> str | None:
    """Words for a warning where a node has fewer GPUs than processes; None where that is not so."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not 0 < gpus < nproc_per_node:
        return None
    return (
        f"--nproc-per-node is {nproc_per_node}, but this machine has {gpus} GPUs: "
        f"local ranks {gpus} to {nproc_per_node - 1} have none of their own"
    )
