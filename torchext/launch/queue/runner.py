"""The process that runs one part of a job: ``torchext run``, with a result that outlives it.

Started as ``python -m torchext.launch.queue.runner FOLDER`` with the lock of the folder inherited and locked.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from torchext.launch.queue.folders import read_json, write_pid, write_whole


def main(folder: Path) -> int:
    """Runs the part to its end and leaves the exit status in its folder."""
    if (folder / "result.json").exists():
        return 0
    write_pid(folder, os.getpid())
    status = 143 if (folder / "end").exists() else _run(folder)
    write_whole(folder / "result.json", json.dumps({"status": status, "end_s": time.time()}))
    return status


def _run(folder: Path) -> int:
    from torchext.launch.arguments import parser
    from torchext.launch.run import run

    part = read_json(folder / "part.json")
    try:
        args = parser().parse_args(part["words"])
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    args.queue = None  # it has been through it
    return run(args)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
