"""Whether a process can still issue a collective while some of its threads wait in one."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import weakref
from collections.abc import Collection
from types import FrameType

_LIBRARIES = tuple({os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "purelib", "platlib")})


class OwnThread(threading.Thread):
    """A thread of this package; the engine itself knows when it may issue a collective."""


def without_collectives(thread: threading.Thread) -> threading.Thread:
    """Declares that a thread never issues collectives, so that a deadlock among others can be told while it runs.

    Needed only for threads of your own that run all the time, such as one that reads files ahead: a rank counts as able
    to go on, and no deadlock is told before the timeout, while it has a thread that might.

    Returns:
        The thread.
    """
    with _lock:
        _without.add(thread)
    return thread


_lock = threading.Lock()
_without: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # guarded by _lock


def only_waiting(blocked: Collection[int], issuers: Collection[tuple[int, int]]) -> bool:
    """Whether no thread of the process can issue a collective before one of those that wait in one goes on.

    Threads that can: all that run, sleep or wait for a file, a socket or a time. Those that cannot: threads in
    ``blocked``; threads that wait, without a time limit, for something that another thread of this process has to do,
    such as `Thread.join`; daemon threads of libraries (a progress bar's, a data loader's) that have issued none so
    far; and those declared by `without_collectives`. Where it is not certain, the answer is no.

    Args:
        blocked: Identifiers of the threads that wait in a collective.
        issuers: Those of all threads that have issued one, each with its number as the kernel gives it.
    """
    threads = {thread.ident: thread for thread in threading.enumerate()}
    frames = sys._current_frames()
    issued = {ident for ident, _ in issuers}
    for issuer, tid in issuers:  # one that Python does not know, as of autograd, may be anywhere
        if issuer not in blocked and issuer not in threads and os.path.exists(f"/proc/self/task/{tid}"):
            return False
    with _lock:
        without = set(_without)
    helpers = others = 0
    for ident, thread in threads.items():
        if ident in blocked or isinstance(thread, OwnThread):
            continue
        frame = frames.get(ident) if ident is not None else None
        if frame is None:
            return False
        if _waits_for_a_thread(frame):
            others += 1
        elif ident not in issued and (thread in without or (thread.daemon and _is_of_a_library(frame))):
            helpers += 1
        else:
            return False
    return not (others and helpers)  # or a helper may be the one that another waits for


def _waits_for_a_thread(frame: FrameType) -> bool:
    name, module = frame.f_code.co_name, frame.f_globals.get("__name__")
    if module == "threading":
        # Condition.wait, which also serves Event, Semaphore and queue; Thread.join in its two forms.
        waits = name in ("wait", "join", "_wait_for_tstate_lock")
        return waits and frame.f_locals.get("timeout") in (None, -1)
    return module == "concurrent.futures.thread" and name == "_worker"  # idle: what it runs would be the inner frame


def _is_of_a_library(frame: FrameType) -> bool:
    outermost = None
    walk: FrameType | None = frame
    while walk is not None:
        if walk.f_globals.get("__name__") != "threading":
            outermost = walk
        walk = walk.f_back
    if outermost is None:
        return True
    return os.path.realpath(outermost.f_code.co_filename).startswith(_LIBRARIES)
