"""A worker for tests, without torch: says who it is, then does what its arguments say.

up: prints "up RANK/WORLD attempt N pid P", then does the steps given, one after the other:

    wait FILE         until FILE exists
    fail-on RANK N    exits with status N if this is that rank
    fail-first RANK N the same, in attempt 0 alone
    stay              until signalled
    spawn             starts a child that ignores SIGTERM, in a session of its own; prints "child P"
    save SECONDS      from now on, SIGTERM makes it print "saving", take so long, print "saved" and exit with 0
    deaf              from now on, ignores SIGTERM and SIGINT
    show NAME         prints NAME=value of an environment variable
    say TEXT          prints it
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import FrameType

RANK = int(os.environ["RANK"])
ATTEMPT = os.environ["TORCHELASTIC_RESTART_COUNT"]

_DEAF_CHILD = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
while True:
    signal.pause()
"""


def say(text: str) -> None:
    # One write, so that lines of several workers do not mix.
    os.write(1, f"{text}\n".encode())


def save(seconds: float) -> None:
    def handle(number: int, frame: FrameType | None) -> None:
        say(f"rank {RANK} saving")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.02)
        say(f"rank {RANK} saved")
        os._exit(0)

    signal.signal(signal.SIGTERM, handle)


def main(steps: Iterator[str]) -> None:
    say(f"up {RANK}/{os.environ['WORLD_SIZE']} attempt {ATTEMPT} pid {os.getpid()}")
    for step in steps:
        if step == "wait":
            path = next(steps)
            while not os.path.exists(path):
                time.sleep(0.02)
        elif step in ("fail-on", "fail-first"):
            rank, status = int(next(steps)), int(next(steps))
            if rank == RANK and (step == "fail-on" or ATTEMPT == "0"):
                sys.exit(status)
        elif step == "stay":
            while True:
                signal.pause()
        elif step == "spawn":
            command = [sys.executable, "-S", "-c", _DEAF_CHILD]
            child = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
            assert child.stdout is not None
            child.stdout.readline()
            say(f"child {child.pid}")
        elif step == "save":
            save(float(next(steps)))
        elif step == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        elif step == "show":
            name = next(steps)
            say(f"{name}={os.environ.get(name)}")
        elif step == "say":
            say(f"rank {RANK} {next(steps)}")
        else:
            raise ValueError(f"unknown step {step!r}")


if __name__ == "__main__":
    main(iter(sys.argv[1:]))
