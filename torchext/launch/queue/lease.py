"""Until when jobs of a machine may go on without a word from those who started them.

It is a file that is written again and again; times are on CLOCK_BOOTTIME, which nobody sets.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from torchext.launch.folders import read_json, write_whole


def write_lease(path: Path, until_s: float) -> None:
    """Lets the runners of this machine go on until then."""
    write_whole(path, json.dumps({"until_s": until_s}))


def is_over(path: Path) -> bool:
    """Whether the runners have to end their jobs; not before there is a lease."""
    lease = read_json(path)
    return lease is not None and time.clock_gettime(time.CLOCK_BOOTTIME) > lease["until_s"]
