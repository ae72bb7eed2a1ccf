"""The commands of this feature: ``torchext run``, ``torchext queue`` and ``torchext node``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from torchext.launch.errors import LaunchError


def run_main(argv: Sequence[str]) -> int:
    """Runs ``torchext run``; returns its exit status."""
    from torchext.launch import arguments
    from torchext.launch.run import print_error, run

    args = arguments.parser().parse_args(argv)
    try:
        if args.queue is not None:
            from torchext.launch.queue.submit import submit

            print(f"job {submit(args.queue, argv)}")
            return 0
        arguments.check_queue_options(args)
    except LaunchError as error:
        print_error(error)
        return 1
    return run(args)


def queue_main(argv: Sequence[str]) -> int:
    """Runs ``torchext queue``; returns its exit status."""
    from torchext.launch.queue.cli import parser

    return _run(parser(), argv)


def node_main(argv: Sequence[str]) -> int:
    """Runs ``torchext node``; returns its exit status."""
    from torchext.launch.queue.cli import node_parser

    return _run(node_parser(), argv)


def _run(parser: argparse.ArgumentParser, argv: Sequence[str]) -> int:
    args = parser.parse_args(argv)
    try:
        status: int = args.function(args)
    except LaunchError as error:
        sys.stderr.write(f"{parser.prog} {args.command}: {error}\n")
        return 1
    return status
