"""One machine: starts parts there, sees what has become of them, ends them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Protocol

from torchext.launch import folders
from torchext.launch.queue.types import Part, PartKey, PartReport, PartState

logger = logging.getLogger(__name__)

_MARK = "TORCHEXT_PART"  # in the environment of all processes of a part; its value is the folder
SPARE_S = 15.0  # beyond the grace, before what should have ended is killed from outside


class Node(Protocol):
    """A machine as the dispatcher sees it. Nothing blocks for long."""

    @property
    def away(self) -> bool:
        """Whether it takes nothing new at present."""
        ...

    def start(self, part: Part) -> None:
        """Starts a part, once: one that has been started before is left alone."""
        ...

    def look(self, key: PartKey) -> PartReport:
        """Says what has become of a part."""
        ...

    def end(self, key: PartKey) -> None:
        """Asks a part to end, within its grace. May be called again and again."""
        ...

    def read_log(self, key: PartKey, offset: int, size: int) -> bytes:
        """Reads what a part has printed, from an offset on."""
        ...


class LocalNode:
    """This machine, or a share of it.

    Args:
        folder: For the folders of parts.
        address: Where other nodes reach this one.
        devices: What stands for each slot in CUDA_VISIBLE_DEVICES; None where slots are CPUs.
        lease: File that says until when jobs may run; None: for ever.
    """

    def __init__(
        self,
        folder: Path,
        *,
        address: str = "127.0.0.1",
        devices: tuple[str, ...] | None = None,
        lease: Path | None = None,
    ) -> None:
        self._folder = folder
        self._lease = lease
        self._address = address
        self._devices = devices
        self._children: dict[PartKey, subprocess.Popen[bytes]] = {}
        self._kill_at: dict[PartKey, float] = {}  # parts that are asked to end
        self._signalled: set[PartKey] = set()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @property
    def away(self) -> bool:
        """See `Node`."""
        return False

    def start(self, part: Part) -> None:
        """See `Node`.

        Raises:
            OSError: The folder cannot be written.
        """
        folder = self._path(part.key)
        if folder.exists():
            return
        # What the user has asked for comes after these words, and so holds. The environment may hold secrets.
        ranks = ("--tee", "3", "--log-dir", str(folder / "ranks"), "--local-addr", self._address)
        fields = {**part.to_dict(), "words": [*ranks, *part.words], "env": {}}
        fields["lease"] = None if self._lease is None else str(self._lease)
        # Made aside, so that a folder is there whole or not at all.
        making = folder.with_name(f".{folder.name}")
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
        folders.write_whole(making / "part.json", json.dumps(fields))
        held = folders.lock(making / "lock")
        assert held is not None
        try:
            making.rename(folder)
            self._spawn(part, folder, held)
        finally:
            os.close(held)

    def _spawn(self, part: Part, folder: Path, held: int) -> None:
        env = {**part.env, _MARK: str(folder)}
        if part.holds_store:
            env["TORCHEXT_ENDPOINT_FILE"] = str(folder / "endpoint")
        log = os.open(folder / "output.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with open(log, "ab") as output:
            try:
                if self._devices is not None:
                    env["CUDA_VISIBLE_DEVICES"] = self._visible(part)
                child = subprocess.Popen(
                    [part.python, "-m", "torchext.launch.queue.runner", str(folder)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=part.cwd,
                    env=env,
                    pass_fds=[held],
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:  # ValueError: a word or name that the system cannot pass on
                words = f"torchext: cannot start {part.python} in {part.cwd}: {error}\n"
                output.write(words.encode(errors="backslashreplace"))
                folders.write_whole(folder / "result.json", json.dumps({"status": 1, "end_s": time.time()}))
                return
        self._children[part.key] = child
        folders.write_pid(folder, child.pid)

    def _visible(self, part: Part) -> str:
        assert self._devices is not None
        if max(part.slots) >= len(self._devices):
            raise ValueError(
                f"slots {part.slots} are asked for, but this machine has {len(self._devices)} GPUs; "
                "the cluster file should say so"
            )
        return ",".join(self._devices[slot] for slot in part.slots)

    def look(self, key: PartKey) -> PartReport:
        """See `Node`."""
        folder = self._path(key)
        if not folder.exists():
            return PartReport(PartState.ABSENT)
        child = self._children.get(key)
        if child is not None:
            child.poll()  # else it would stay as one that has ended and is not waited for
        if folders.is_locked(folder / "lock"):
            self._follow_up(key, folder)
            return PartReport(PartState.RUNNING, endpoint=folders.read_endpoint(folder))
        result = folders.read_json(folder / "result.json")
        self._children.pop(key, None)
        self._kill_at.pop(key, None)
        self._signalled.discard(key)
        if result is None:
            if not (folder / "lost").exists() and not _kill_marked(folder):
                with contextlib.suppress(OSError):  # a full disk; we look again
                    (folder / "lost").touch()
            return PartReport(PartState.LOST)
        return PartReport(PartState.ENDED, status=result["status"], endpoint=folders.read_endpoint(folder))

    def end(self, key: PartKey) -> None:
        """See `Node`."""
        folder = self._path(key)
        if not folder.exists():
            return
        (folder / "end").touch()
        self._follow_up(key, folder)

    def started(self) -> list[PartKey]:
        """Names the parts that have been started here and have no result yet."""
        return [
            PartKey(int(folder.parts[-3]), int(folder.parts[-2].removeprefix("run-")), int(folder.name[len("node-") :]))
            for folder in self._folder.glob("*/run-*/node-*")
            if not (folder / "result.json").exists() and not (folder / "lost").exists()
        ]

    def read_log(self, key: PartKey, offset: int, size: int) -> bytes:
        """See `Node`."""
        return folders.read_piece(self._path(key) / "output.log", offset, size)

    def _path(self, key: PartKey) -> Path:
        return key.folder(self._folder)

    def _follow_up(self, key: PartKey, folder: Path) -> None:
        """Sees to it that a part that runs, and has been asked to end, does."""
        if not (folder / "end").exists():
            return
        now = time.monotonic()
        if key not in self._kill_at:
            self._kill_at[key] = now + folders.read_json(folder / "part.json")["grace_s"] + SPARE_S
        if key not in self._signalled and _signal(folder):
            self._signalled.add(key)
        if now > self._kill_at[key]:
            logger.warning("part %s has not ended in its grace: killing it", key)
            _kill_marked(folder)


def _signal(folder: Path) -> bool:
    """Sends the runner SIGTERM, and nobody else who may have its number by now; says whether it is known."""
    known = folders.read_json(folder / "pid.json")
    if known is None:
        return False
    try:
        handle = os.pidfd_open(known["pid"])
    except ProcessLookupError:
        return True
    try:
        if folders.start_time(known["pid"]) == known["start"]:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGTERM)
    finally:
        os.close(handle)
    return True


def _kill_marked(folder: Path) -> bool:
    """Kills all that was started for a part and still lives; says whether there was any."""
    found = False
    wanted = f"{_MARK}={folder}".encode()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in entry.read_bytes().split(b"\0"):
                found = True
                os.kill(int(entry.parent.name), signal.SIGKILL)
        except OSError:
            continue  # it has ended, or is another user's
    return found
