"""The folder of a part: how it is started once, found again, and told to end, whoever dies in between.

====================  ================================================================================================
``part.json``         what to run
``lock``              locked (flock) for as long as the runner or its agent lives; it is locked before they are started
``pid.json``          process and start time of the runner
``end``               it has been told to end
``endpoint``          where the store of the run is
``result.json``       exit status, written last
``lost``              it has been lost, and nothing of it lives
``output.log``        what the run prints, with job, node and rank before each line
``ranks/``            one file for each rank and attempt
====================  ================================================================================================

A folder whose lock is free and that has no result belongs to a part that was lost: it is never started again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from pathlib import Path
from typing import Any


def write_whole(path: Path, text: str) -> None:
    """Writes a file, for this user alone, so that it is there whole or not at all, also after a crash."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)  # of a process that was killed and had the same number
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_json(path: Path) -> Any:
    """Reads a file that `write_whole` has written; None where there is none."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


def read_endpoint(folder: Path) -> str | None:
    """Says where the store of the run is, once a part that holds it has written that."""
    try:
        return (folder / "endpoint").read_text()
    except FileNotFoundError:
        return None


def read_piece(path: Path, offset: int, size: int) -> bytes:
    """Reads a piece of a log; empty where there is none yet."""
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(size)
    except FileNotFoundError:
        return b""


def lock(path: Path) -> int | None:
    """Opens and locks a file; returns its descriptor, which processes may inherit, or None if another has it locked."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def is_locked(path: Path) -> bool:
    """Whether somebody holds the lock; a file that is not there is not locked."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def start_time(pid: int) -> str | None:
    """When a process was started, in clock ticks since the machine was; with its number, this names it for good."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    return None


def write_pid(folder: Path, pid: int) -> None:
    """Takes note of who runs a part."""
    write_whole(folder / "pid.json", json.dumps({"pid": pid, "start": start_time(pid)}))
