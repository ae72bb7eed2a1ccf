"""A job of the drill: FOLDER NUMBER. Notes its beginning and its end, and whether it runs twice at a time."""

from __future__ import annotations

import fcntl
import os
import sys
import time
from pathlib import Path


def main(folder: Path, number: int) -> None:
    ledger = os.open(folder / "ledger", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with open(folder / f"lock-{number}", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.write(ledger, f"double {number}\n".encode())
        os.write(ledger, f"begin {number} {os.environ['TORCHEXT_RUN']}\n".encode())
        time.sleep(0.5 + number % 4 / 2)
        os.write(ledger, f"end {number} {os.environ['TORCHEXT_RUN']}\n".encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
