"""Warm workers: programs that are ready to train, and wait until their job has lost its training process.

A standby that was started with ``--promote COMMAND`` keeps one such program running. It does all that a training does
up to `Replicator.restore`, or to the loading of ``ckpt_path``, and waits there. Once it has taken over and committed a
step, the next one starts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import subprocess
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchext.standby.link import Link

logger = logging.getLogger(__name__)

_VARIABLE = "TORCHEXT_STANDBY_WARM"  # the standby's address, in the environment of a warm worker
_FIRST_PAUSE_S = 1.0  # before a worker that has ended is started again; twice as long each time
_LONGEST_PAUSE_S = 30.0
_GRACE_S = 5.0  # between SIGTERM and SIGKILL
_TAKEOVER_S = 10.0  # the longest that a takeover keeps the next worker from being started


def await_promotion(link: Link, address: str) -> None:
    """In a warm worker, waits until it is to take over its rank, once; in any other program, does nothing.

    Args:
        link: Open, but not claimed.
        address: Of its standby.

    Raises:
        StandbyLostError: The standby is gone.
    """
    if os.environ.get(_VARIABLE) == address:
        link.await_promotion()
        del os.environ[_VARIABLE]  # it is a training process like any other now, as are its children


class Promoter:
    """Keeps a warm worker running, in a thread of its own; another one once it has been promoted.

    Args:
        command: As for a shell, without the shell.
        address: Of the standby, for the worker.
    """

    def __init__(self, command: str, address: str) -> None:
        self._command = shlex.split(command)
        self._address = address
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._warm: subprocess.Popen[bytes] | None = None  # guarded by _lock
        self._promoted: list[subprocess.Popen[bytes]] = []  # guarded by _lock; waited for, and else left alone
        self._next = threading.Event()
        self._settled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchext-standby-promote", daemon=True)

    def start(self) -> None:
        """Starts the first worker."""
        self._thread.start()

    def has_promoted(self) -> None:
        """The worker trains from now on. Several calls are one, as of several ranks of the same worker."""
        with self._lock:
            if self._warm is not None:
                self._promoted.append(self._warm)
                self._warm = None
        self._next.set()

    def has_settled(self) -> None:
        """What was promoted has done a step, or is gone: the next worker may start, which takes a core for seconds."""
        self._settled.set()

    @property
    def warm_pid(self) -> int | None:
        """The process of the worker that waits, if there is one."""
        with self._lock:
            return None if self._warm is None else self._warm.pid

    def stop(self) -> None:
        """Ends the worker that waits; one that trains goes on. Idempotent."""
        self._stopping.set()
        self._next.set()
        self._settled.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            warm, self._warm = self._warm, None
        if warm is not None:
            _end(warm)

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._stopping.is_set():
            self._next.clear()
            self._settled.clear()
            environment = {**os.environ, _VARIABLE: self._address}
            try:
                # A group of its own, so that it ends with its children, and not by the terminal's Ctrl-C.
                worker = subprocess.Popen(
                    self._command, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
                )
            except OSError as error:
                logger.warning("cannot start the warm worker %s: %s", shlex.join(self._command), error)
            else:
                with self._lock:
                    self._warm = worker
                if self._watch(worker):
                    self._settled.wait(_TAKEOVER_S)
                    pause_s = _FIRST_PAUSE_S
                    continue
                if not self._stopping.is_set():
                    logger.warning(
                        "the warm worker %s has ended with status %s; the next one starts in %g s",
                        shlex.join(self._command),
                        worker.returncode,
                        pause_s,
                    )
            self._stopping.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _watch(self, worker: subprocess.Popen[bytes]) -> bool:
        """Until the worker was promoted (true), has ended, or `stop` was called."""
        while not self._next.wait(0.2):
            with self._lock:
                self._promoted = [each for each in self._promoted if each.poll() is None]
                if self._warm is worker and worker.poll() is not None:
                    self._warm = None
                    return False
        return not self._stopping.is_set()


def _end(worker: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, number)
        try:
            worker.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            continue
        break
    with contextlib.suppress(ProcessLookupError):  # children that outlived it
        os.killpg(worker.pid, signal.SIGKILL)
