"""Trainings in processes of their own that die in chosen places.

``python -m tests.standby.training [MODULE]`` loads torch and then forks a training for each line of JSON that it reads:
torch's optimizers take seconds to import, a fork takes none. For each it answers with how the training ended, as JSON.
A training is a call of ``train`` of the module, by default of this one.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from tests.standby.processes import ROOT, build, step

# Where a training may be told to die: the files whose lines are counted.
PLACES = {
    "commit": ("standby/publisher.py", "standby/link.py", "standby/wire.py", "standby/replicator.py"),
    "copy": ("standby/ledger.py", "standby/tree.py", "standby/changes.py"),
    "optimizer": ("torch/optim/",),
    "outputs": ("callbacks/outputs.py", "callbacks/phantasy.py", "tests/callbacks/output_jobs.py"),
    "anywhere": ("standby/", "torch/optim/", "tests/standby/"),
}


def train(log: str, num_steps: int, *, seed: int = 0, **options: Any) -> None:
    """Trains to the end, from where the standby is; writes a line for each step once `commit` has returned."""
    from torchext.standby import Replicator

    model, optimizer = build(seed)
    with Replicator(model, optimizer, **options) as replicator:
        found = replicator.restore()
        start = 0 if found is None else found.step + 1
        with Path(log).open("a") as file:
            file.write(json.dumps({"start": start}) + "\n")
            file.flush()
            for i in range(start, num_steps):
                loss = step(model, optimizer)
                replicator.commit(i, state=i)
                file.write(json.dumps({"step": i, "loss": loss}) + "\n")
                file.flush()
            weights = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
            file.write(json.dumps({"weights": weights}) + "\n")


def die_after(lines: int, place: str) -> None:
    """Makes this process kill itself after so many lines of Python in these files."""
    left = lines

    def count(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if not any(part in frame.f_code.co_filename for part in PLACES[place]):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return count

    sys.settrace(count)


class Trainings:
    """The other side: starts trainings, one at a time."""

    def __init__(self, module: str = __name__) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, module],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def start(self, **what: Any) -> int:
        """Starts one; returns its process."""
        return int(self._ask(what)["pid"])

    def wait(self) -> int:
        """How the one that was started ended: its exit status, or minus the signal."""
        return int(self._answer()["status"])

    def run(self, **what: Any) -> int:
        """Starts one and waits for its end."""
        self.start(**what)
        return self.wait()

    def close(self) -> None:
        """Ends the process that forks them."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(120)  # a machine may be slow to end what has loaded torch
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _ask(self, what: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


def main() -> None:
    """Forks."""
    build()  # imports all that an optimizer needs
    import torchext.standby  # noqa: F401

    program = importlib.import_module(sys.argv[1])
    for line in sys.stdin:
        what = json.loads(line)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                place, lines = what.pop("place", None), what.pop("lines", 0)
                if place is not None:
                    die_after(lines, place)
                random.seed(0)
                program.train(**what)
                status = 0
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        print(json.dumps({"pid": pid}), flush=True)
        print(json.dumps({"status": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}), flush=True)


if __name__ == "__main__":
    main()
