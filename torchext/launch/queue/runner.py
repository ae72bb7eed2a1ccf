"""The process that runs one part of a job: ``torchext run``, with a result that outlives it.

Started as ``python -m torchext.launch.queue.runner FOLDER`` with the lock of the folder inherited and locked.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from torchext.launch.folders import read_json, write_pid, write_whole
from torchext.launch.queue.lease import is_over

_LEASE_S = 1.0  # between looks at the lease
_AGAIN_S = 1.0  # after the disk was full


def main(folder: Path) -> int:
    """Runs the part to its end and leaves the exit status in its folder."""
    if (folder / "result.json").exists():
        return 0
    write_pid(folder, os.getpid())
    status = 143 if (folder / "end").exists() else _run(folder)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it has ended, and must not be taken for lost now
    _leave(folder / "result.json", json.dumps({"status": status, "end_s": time.time()}))
    return status


def _leave(path: Path, text: str) -> None:
    """Writes the result; where the disk is full, once there is room: without one the run would count as lost."""
    while True:
        try:
            write_whole(path, text)
            return
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            time.sleep(_AGAIN_S)


def _run(folder: Path) -> int:
    part = read_json(folder / "part.json")
    if part["lease"] is not None:
        _watch_lease(Path(part["lease"]))
    from torchext.launch.arguments import parser
    from torchext.launch.run import run

    try:
        args = parser().parse_args(part["words"])
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    args.queue = None  # it has been through it
    return run(args)


def _watch_lease(path: Path) -> None:
    """Ends this run, as SIGTERM does, once the lease of the machine is over: the job may be started elsewhere then."""

    def look(number: int, frame: FrameType | None) -> None:
        if is_over(path):
            signal.setitimer(signal.ITIMER_REAL, 0)
            os.kill(os.getpid(), signal.SIGTERM)

    # A timer of this process alone: what it forks has none.
    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _LEASE_S, _LEASE_S)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
