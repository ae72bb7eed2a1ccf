"""The process that outlives the agent: nothing of a job stays behind, whoever is killed.

``torchext run`` forks. The parent, the keeper, only waits; the child, the agent, starts workers and watches them::

    keeper -> agent -> worker, worker, ...

The keeper adopts what loses its parent (it is a *subreaper*), so when the agent is killed, it still has all that the
workers have started, and ends it: with SIGTERM, the grace, then SIGKILL. When the keeper is killed, the kernel sends
the agent SIGTERM, and the agent ends its workers. When both are killed at once, the kernel sends the workers SIGTERM.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

# Run by Python in front of a worker's own command: asks the kernel for SIGTERM should the agent die, then becomes the
# worker. It is a program of its own because nothing may run between fork and exec in a process with threads.
_GUARD = (
    "import ctypes,os,signal,sys;"
    f"ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG},int(signal.SIGTERM));"
    "os.getppid()==int(sys.argv[1]) or sys.exit('the agent is gone');"
    "os.execvp(sys.argv[2],sys.argv[2:])"
)


def guarded(command: Sequence[str]) -> list[str]:
    """A command that ends, by SIGTERM, when this process dies; to be started by this process itself."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid()), *command]


def ask_for_end_with_parent(parent: int) -> None:
    """Has the kernel send this process SIGTERM when its parent dies. Linux only, nothing elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)


def keep(agent: Callable[[], int], *, grace_s: float, signals: Iterable[signal.Signals]) -> int:
    """Runs the agent in a child process and waits until nothing is left of it and of what it has started.

    Call it from the main thread, before there are others. Elsewhere than on Linux the agent runs in this process.

    Args:
        agent: What the child runs; its result is the exit status.
        grace_s: How long what is left of a job may take to end once asked to.
        signals: Passed on to the agent.

    Returns:
        The agent's status; 128 + N where signal N killed it.
    """
    if sys.platform != "linux":
        return agent()
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
        logger.warning("cannot adopt orphans on this system; if the agent is killed, what workers started may stay")
    keeper = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    # Held back until both sides are ready for them.
    wanted = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, *signals}
    signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
    child = os.fork()
    if child == 0:
        _become_agent(agent, keeper, wanted)
    previous = {number: signal.signal(number, lambda received, _: _pass_on(child, received)) for number in wanted}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, wanted)
    try:
        code = _wait(child)
        for number in wanted:
            signal.signal(number, signal.SIG_IGN)  # nobody is there to pass them on to
        _end_what_is_left(grace_s, agent_was_killed=code < 0)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _become_agent(agent: Callable[[], int], keeper: int, signals: set[signal.Signals]) -> None:
    """Runs the agent to its end; does not return."""
    status = 1
    try:
        # Its own session: a signal from the terminal reaches the keeper alone, which passes it on once.
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        ask_for_end_with_parent(keeper)
        status = agent()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # this process ends here, whatever it is, and must not run its parent's code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _pass_on(child: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended, and so will we
        os.kill(child, number)


def _wait(child: int) -> int:
    """Waits for the agent, and on the way for orphans that have ended; returns its status, -N for signal N."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            return os.waitstatus_to_exitcode(status)


def _end_what_is_left(grace_s: float, *, agent_was_killed: bool) -> None:
    """Ends all descendants: asks, waits, kills."""
    if not _reap():
        return
    left = _descendants()
    if not left:
        return
    logger.warning("ending what the workers have left behind: %s", ", ".join(f"{pid} ({_name(pid)})" for pid in left))
    for pid in left:
        # A worker leads its session, and has had SIGTERM from the kernel if the agent was killed; a second one could
        # interrupt the saving of its checkpoint.
        if not (agent_was_killed and _leads_session(pid)):
            _send(pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while _reap() and time.monotonic() < deadline:
        time.sleep(0.02)  # their ends come as signals that cannot be waited for together with a deadline
    while _reap():
        for pid in _descendants():
            _send(pid, signal.SIGKILL)
        time.sleep(0.02)


def _reap() -> bool:
    """Takes note of children that have ended; says whether others are left."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, or is another user's by now
        os.kill(pid, number)


def _descendants() -> list[int]:
    """Live processes below this one; those nearest first."""
    children: dict[int, list[int]] = {}
    for pid, fields in _processes():
        if fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(pid)
    found: list[int] = []
    queue = [os.getpid()]
    for parent in queue:
        found += children.get(parent, [])
        queue += children.get(parent, [])
    return found


def _processes() -> Iterator[tuple[int, list[str]]]:
    for entry in Path("/proc").glob("[0-9]*"):
        fields = _stat(int(entry.name))
        if fields is not None:
            yield int(entry.name), fields


def _stat(pid: int) -> list[str] | None:
    """State, parent, group, session, ...: what follows the name in /proc/PID/stat."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _leads_session(pid: int) -> bool:
    fields = _stat(pid)
    return fields is not None and int(fields[3]) == pid


def _name(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        words = ""
    return words[:60] or "ended"
