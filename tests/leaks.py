"""What a test may leave behind in its process and on its machine, and how to see it.

Each detector is a function that takes a snapshot: a mapping from the identity of a thing to words about it. Whatever a
later snapshot has and the earlier one lacks has leaked. On systems without ``/proc`` the detectors that need it see
nothing.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

Snapshot = Mapping[Any, str]

# Set in the environment of the test process, and so of every program that its tests start: it finds those whose
# parent is gone. A mere fork does not show it (the kernel shows the environment as of the last exec).
MARKER = "TORCHEXT_TEST_PROCESS"

_PROC = Path("/proc")
_SHM = Path("/dev/shm")
# Set by libraries for as long as the process lives, when they are first used: by torch's compiler (which the first step
# of an optimizer loads) and by Lightning's look for GPUs. They do not change what a later test does.
LASTING_VARIABLES = frozenset(
    {"TORCHINDUCTOR_CACHE_DIR", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "PYTORCH_NVML_BASED_CUDA_CHECK"}
)
# Of the test that runs: its name, by pytest; its seed, by Lightning's seed_everything. conftest.py takes these away.
VARIABLES_OF_A_TEST = frozenset({"PYTEST_CURRENT_TEST", "PL_GLOBAL_SEED", "PL_SEED_WORKERS"})

# Helpers that live as long as the test process does, and end with it.
lasting_processes: set[int] = set()

_LISTENING_TCP = "0A"
_ACCEPTS_CONNECTIONS = 0x10000  # __SO_ACCEPTCON in /proc/net/unix


def threads() -> Snapshot:
    """Running Python threads, but for those that no test can end."""
    return {t.ident: f"thread {t.name!r} ({type(t).__name__})" for t in threading.enumerate() if not _is_lasting(t)}


def _is_lasting(thread: threading.Thread) -> bool:
    # A thread that Python did not start (autograd's device threads and other native pools): it has no owner here.
    if isinstance(thread, threading._DummyThread):
        return True
    # tqdm keeps one daemon monitor for the life of the process; fsspec (under Lightning) one input/output loop.
    return type(thread).__name__ == "TMonitor" or thread.name == "fsspecIO"


def processes() -> Snapshot:
    """Descendants of this process, dead and not waited for included, and orphans that carry our mark."""
    lasting = _lasting_processes()
    children: dict[int, list[int]] = {}
    for pid, parent in _parents().items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    queue = [os.getpid()]
    while queue:
        for pid in children.get(queue.pop(), []):
            if pid not in lasting:
                found.add(pid)
                queue.append(pid)
    mark = os.environ.get(MARKER)
    if mark is not None:
        found |= marked_processes(f"{MARKER}={mark}") - lasting
    # A process that ended since /proc was read is no leak.
    return {(pid, _start_time(pid)): f"process {pid}: {command(pid)}" for pid in found if (_PROC / str(pid)).exists()}


def _parents() -> dict[int, int]:
    fields_of = {pid: _stat_fields(pid) for pid in _pids()}
    return {pid: int(fields[1]) for pid, fields in fields_of.items() if fields is not None}


def _pids() -> list[int]:
    try:
        return [int(name) for name in os.listdir(_PROC) if name.isdigit()]
    except OSError:
        return []


def _stat_fields(pid: int) -> list[str] | None:
    """State, parent, ... of a process: what follows its name, which may hold spaces and brackets."""
    try:
        with open(f"{_PROC}/{pid}/stat", "rb") as stat:  # read for every process, before and after every test
            return stat.read().rpartition(b")")[2].decode().split()
    except OSError:
        return None


def _start_time(pid: int) -> str:
    fields = _stat_fields(pid)
    return fields[19] if fields is not None else ""


def _lasting_processes() -> set[int]:
    """With the helper that multiprocessing starts once per process and ends with it; named by its own record."""
    module = sys.modules.get("multiprocessing.resource_tracker")
    pid = getattr(getattr(module, "_resource_tracker", None), "_pid", None)
    return lasting_processes | ({pid} if pid is not None else set())


def marked_processes(setting: str) -> set[int]:
    """Other live processes started with this ``NAME=value`` in their environment."""
    wanted = setting.encode()
    found = set()
    for pid in _pids():
        try:
            with open(f"{_PROC}/{pid}/environ", "rb") as environ:
                # Empty for one that is dead and not waited for; refused for another user's.
                if pid != os.getpid() and wanted in environ.read().split(b"\0"):
                    found.add(pid)
        except OSError:
            continue
    return found


def command(pid: int) -> str:
    """The command line of a process, shortened; its state where it has none left."""
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        words = ""
    return words[:200] or ("not waited for" if state(pid) == "Z" else "ended")


def state(pid: int) -> str:
    """One letter: R, S, D, T (stopped), Z (not waited for), ...; empty where there is no such process."""
    fields = _stat_fields(pid)
    return fields[0] if fields is not None else ""


def session(pid: int) -> int:
    """The session that a process belongs to; 0 where there is no such process."""
    fields = _stat_fields(pid)
    return int(fields[3]) if fields is not None else 0


def shared_memory() -> Snapshot:
    """Entries of /dev/shm, those of other programs included: `find` leaves out what they hold (`held_by_others`)."""
    try:
        names = [e.name for e in os.scandir(_SHM)]
    except OSError:
        return {}
    return {name: f"{_SHM / name}" for name in names}


def held_by_others(names: set[str]) -> set[str]:
    """Which entries of /dev/shm are open or mapped in processes that do not descend from this one.

    Other programs of this machine come and go while a test runs; what they hold is theirs, and so is a folder that
    holds it.
    """
    ours = {os.getpid()} | {pid for pid, _ in processes()}
    inodes: set[int] = set()
    held: set[str] = set()
    for pid in _pids():
        if pid not in ours:
            for inode, path in _shared_memory_of(_PROC / str(pid)):
                # By inode too: a semaphore of glibc is mapped under a temporary name and linked to its own afterwards.
                inodes.add(inode)
                held.add(path.removeprefix(f"{_SHM}/").partition("/")[0])
    return {name for name in names if name in held or _inode(_SHM / name) in inodes}


def _shared_memory_of(process: Path) -> list[tuple[int, str]]:
    """Inodes and paths of what a process has open or mapped there."""
    found: list[tuple[int, str]] = []
    try:
        for line in (process / "maps").read_text().splitlines():
            if str(_SHM) in line:
                inode, path = line.split(maxsplit=5)[4:]
                found.append((int(inode), path))
        for fd in (process / "fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                if (path := os.readlink(fd)).startswith(str(_SHM)):
                    found.append((fd.stat().st_ino, path))
    except OSError:
        pass  # it ended, or it is another user's: then nothing more can be said of it
    return found


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def listening_sockets() -> Snapshot:
    """Sockets of this process that accept connections: TCP ports and Unix paths."""
    own = set()
    for fd in _descriptors():
        try:
            target = os.readlink(_PROC / "self" / "fd" / fd)
        except OSError:
            continue
        if target.startswith("socket:["):
            own.add(target[len("socket:[") : -1])
    if not own:
        return {}
    found: dict[str, str] = {}
    for table in ("tcp", "tcp6"):
        for row in _rows(table):
            if row[3] == _LISTENING_TCP and row[9] in own:
                found[row[9]] = f"{table} port {int(row[1].rpartition(':')[2], 16)}"
    for row in _rows("unix"):
        if int(row[3], 16) & _ACCEPTS_CONNECTIONS and row[6] in own:
            found[row[6]] = f"unix socket {row[7] if len(row) > 7 else '(unnamed)'}"
    return found


def _descriptors() -> list[str]:
    try:
        return os.listdir(_PROC / "self" / "fd")
    except OSError:
        return []


def _rows(table: str) -> list[list[str]]:
    try:
        return [line.split() for line in (_PROC / "net" / table).read_text().splitlines()[1:]]
    except OSError:
        return []


def environment() -> Snapshot:
    """Environment variables with their values. A removed one shows in `find`, which compares both ways."""
    ignored = LASTING_VARIABLES | VARIABLES_OF_A_TEST
    return {item: f"{item[0]}={item[1]}" for item in os.environ.items() if item[0] not in ignored}


def process_groups() -> Snapshot:
    """Process groups that torch.distributed knows, the default one included."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    if module is None:  # nobody has imported it, so nobody has made one
        return {}
    return {id(group): f"process group {name!r}" for group, name in module._world.pg_names.items()}


DETECTORS: dict[str, Callable[[], Snapshot]] = {
    "threads": threads,
    "processes": processes,
    "shared memory": shared_memory,
    "listening sockets": listening_sockets,
    "environment": environment,
    "process groups": process_groups,
}


def take() -> dict[str, Snapshot]:
    """One snapshot of each kind."""
    return {kind: detector() for kind, detector in DETECTORS.items()}


def find(
    before: Mapping[str, Snapshot], *, ignore: Collection[str] = (), settle_s: float = 2.0
) -> dict[str, list[str]]:
    """Says what has leaked since ``before``, after giving what is ending up to ``settle_s`` to end.

    Args:
        before: What `take` gave.
        ignore: Kinds not to look at.
        settle_s: How long to wait for a clean state before calling it a leak.

    Returns:
        For each kind with leaks, words about each of them.
    """
    leaks = _compare(before, ignore)
    if leaks:
        gc.collect()  # what only a reference cycle keeps alive is not the test's fault
    deadline = time.monotonic() + settle_s
    pause_s = 0.001
    while leaks and time.monotonic() < deadline:
        # Threads and processes on their way out are the common case, and nothing announces the end of all of them.
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)
        leaks = _compare(before, ignore)
    return leaks


def _compare(before: Mapping[str, Snapshot], ignore: Collection[str]) -> dict[str, list[str]]:
    leaks: dict[str, list[str]] = {}
    for kind, detector in DETECTORS.items():
        if kind in ignore:
            continue
        now = detector()
        new = set(now) - set(before[kind])
        if kind == "shared memory" and new:
            new -= held_by_others({str(name) for name in new})
        found = [now[key] for key in new]
        if kind == "environment":
            names_now = {name for name, _ in now}
            found += [f"{words} (removed)" for key, words in before[kind].items() if key[0] not in names_now]
        if found:
            leaks[kind] = sorted(found)
    return leaks
