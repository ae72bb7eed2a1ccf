"""What Slurm runs on each node of a job: starts one part there and sees it through.

Started by srun as ``python -m torchext.launch.queue.slurm_task FOLDER``, with the folder of a run (see `slurm_engine`).
It is to its part what a daemon or an agent is on other machines; the difference is that it ends with the part, and that
the part ends should it be killed.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
import time
from pathlib import Path

from torchext.launch.folders import read_json
from torchext.launch.queue.lease import write_lease
from torchext.launch.queue.node import LocalNode
from torchext.launch.queue.types import Part, PartState

_LOOK_S = 0.2
_LEASE_S = 10.0  # well below what the daemon waits before it counts a silent part as lost
_RENEW_S = 2.0


def main(run: Path) -> int:
    """Runs this node's part to its end."""
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    if not (run / "id").exists():
        sys.stderr.write("torchext: released, but not by the queue, which knows where this should run: giving up\n")
        return 1
    described = read_json(run / "run.json")
    number = described["machines"].index(os.environ["SLURMD_NODENAME"])
    part = _wait_for_part(run, number, stopped)
    if part is None:
        return 0
    lease = run / f"lease-{number}"
    node = LocalNode(run.parent.parent, address=described["addresses"][number], lease=lease)
    renewed_at = -_RENEW_S
    while True:
        now = time.monotonic()
        if now - renewed_at >= _RENEW_S:
            write_lease(lease, time.clock_gettime(time.CLOCK_BOOTTIME) + _LEASE_S)
            renewed_at = now
        node.start(part)  # once
        state = node.look(part.key).state
        if state is PartState.ENDED or (run / f"node-{number}" / "lost").exists():
            return 0
        if stopped.is_set() or (run / f"end-{number}").exists():
            node.end(part.key)
        time.sleep(_LOOK_S)  # files of other machines cannot be waited for


def _wait_for_part(run: Path, number: int, stopped: threading.Event) -> Part | None:
    """The first node says where the store is, and so starts before the others; None if there will be nothing to do."""
    while True:
        fields = read_json(run / f"part-{number}.json")
        if fields is not None:
            return dataclasses.replace(Part.from_dict(fields), env=dict(os.environ))
        first = run / "node-0"
        if (run / f"end-{number}").exists() or (first / "result.json").exists() or (first / "lost").exists():
            return None
        if stopped.wait(_LOOK_S):
            return None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
