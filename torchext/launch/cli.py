"""The commands of this feature: ``torchext run``."""

from __future__ import annotations

from collections.abc import Sequence


def run_main(argv: Sequence[str]) -> int:
    """Runs ``torchext run``; returns its exit status."""
    from torchext.launch.arguments import parser
    from torchext.launch.run import run

    return run(parser().parse_args(argv))
