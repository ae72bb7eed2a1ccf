"""The ``torchext`` command: finds the subcommand and hands over to it.

Each subcommand is ``main(argv: list[str]) -> int`` in the package of its feature, imported when it is called; what it
returns is the exit status.
"""

from __future__ import annotations

import argparse
import importlib
import os
import select
import sys
from collections.abc import Sequence

import torchext

# Name -> ("module:function", what it does, for the help).
_COMMANDS = {
    "doctor": ("torchext.doctor.cli:main", "say what this machine offers to torchext, and how to get the rest"),
    "node": ("torchext.launch.cli:node_main", "let a queue on another machine run jobs on this one"),
    "queue": ("torchext.launch.cli:queue_main", "order and place jobs: start a queue, look into it, stop jobs"),
    "run": ("torchext.launch.cli:run_main", "start a training script on one or many processes, as torchrun does"),
    "simulate": ("torchext.scheduling.cli:main", "try scheduling policies on recorded jobs and compare them"),
    "site": ("torchext.replication.cli:main", "run a site of a replicated system, or ask one that runs"),
    "standby": ("torchext.standby.cli:main", "hold the training state of jobs as of their last step"),
    "train-policy": ("torchext.scheduling.dual.cli:main", "train a scheduling policy on recorded jobs"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; the console script and ``python -m torchext`` exit with what it returns.

    Args:
        argv: The command line without the program; None takes that of this process.

    Raises:
        SystemExit: For ``--help``, ``--version`` and a command line that is not understood, as argparse does.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    # Up to the subcommand only: what follows, --help included, is for it.
    command = _parser().parse_args(words[:1]).command
    module, _, function = _COMMANDS[command][0].partition(":")
    try:
        status: int = getattr(importlib.import_module(module), function)(words[1:])
        sys.stdout.flush()  # here, where a closed pipe can still be told apart
    except BrokenPipeError:
        if not _reader_is_gone():
            raise  # of another pipe or socket: an error of the command
        # The reader (head, less) has seen enough. Python would complain once more when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as a shell reports a death by SIGPIPE
    except KeyboardInterrupt:
        return 130  # by SIGINT
    return status


def _reader_is_gone() -> bool:
    """Whether standard output is a pipe that nobody reads any more."""
    watch = select.poll()
    watch.register(sys.stdout.fileno(), 0)  # 0: only what is reported unasked, POLLERR (Linux) or POLLHUP (macOS)
    return bool(watch.poll(0))


def _parser() -> argparse.ArgumentParser:
    listing = "\n".join(f"  {name:<13}{words}" for name, (_, words) in sorted(_COMMANDS.items()))
    parser = argparse.ArgumentParser(
        prog="torchext",
        usage="torchext [--help] [--version] COMMAND ...",
        description="PyTorch training extensions.",
        epilog=f"commands:\n{listing}\n\nwhat a command takes: torchext COMMAND --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"torchext {torchext.__version__}")
    parser.add_argument("command", choices=sorted(_COMMANDS), metavar="COMMAND", help=argparse.SUPPRESS)
    return parser
