"""The commands of this feature: ``torchext run`` and ``torchext queue``."""

from __future__ import annotations

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

            print(f"job {submit(args, argv)}")
            return 0
        arguments.check_queue_options(args)
    except LaunchError as error:
        print_error(error)
        return 1
    return run(args)


def queue_main(argv: Sequence[str]) -> int:
    """Runs ``torchext queue``; returns its exit status."""
    from torchext.launch.queue.cli import parser

    args = parser().parse_args(argv)
    try:
        status: int = args.function(args)
    except LaunchError as error:
        sys.stderr.write(f"torchext queue {args.command}: {error}\n")
        return 1
    return status
